"""The parts of an explanation, from what the gateway decides by."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from backends.http.interfaces import join_path
from backends.interfaces import RequestContext
from gateway.explain.report import (
    ExplainedDefault,
    ExplainedJudge,
    ExplainedLimits,
    ExplainedRule,
    ExplainedShadow,
    ExplainedSplit,
    ExplainedStickySource,
    ExplainedTarget,
    ExplainedUpstreamRequest,
    ExplainedVersion,
)
from gateway.pipeline.model_settings import select_unset_defaults
from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.router import Model, Route
from gateway.routing.rules import RouteRule, RuleMatch
from gateway.routing.traffic_split import compute_score
from protocols.core.interfaces import ClientAdapter, ClientRequest, Headers, UpstreamRequest
from protocols.core.request import GenerationRequest

_SECRET_HEADERS: Final = frozenset(
    {"authorization", "proxy-authorization", "api-key", "x-api-key", "cookie", "set-cookie"}
)


def explain_rule(rule: RouteRule, unmet: str, match: RuleMatch | None) -> ExplainedRule:
    """A rule that was tried; ``match`` is None if the condition ``unmet`` is not met."""
    if match is None:
        return ExplainedRule(
            name=rule.name, followed=False, mismatch=unmet, wanted=rule.get_expected_value(unmet)
        )
    return ExplainedRule(
        name=rule.name,
        followed=match.is_selected,
        mismatch="" if match.is_selected else "share",
        share=rule.share,
        sticky=match.sticky,
        bucket=match.bucket,
        position=match.position,
        model=rule.config.to.model,
        version=rule.config.to.version,
    )


def explain_sticky_sources(
    sources: Sequence[str], attributes: RequestAttributes, *, include_values: bool
) -> list[ExplainedStickySource]:
    """The sticky sources up to the first present one; ``include_values`` adds its value."""
    explained = []
    for source in sources:
        text = attributes.read_source(source)
        explained.append(
            ExplainedStickySource(source, bool(text), text if include_values and text else None)
        )
        if text:
            break
    return explained


def explain_split(
    route: Route, attributes: RequestAttributes, random_number: float
) -> ExplainedSplit | None:
    """How the traffic split chose the version; None if none did."""
    if not route.split:
        return None
    source, split = route.reason.sticky, route.model.split
    buckets: Mapping[str, int] = (
        split.compute_buckets(attributes.read_source(source)) if source else {}
    )
    total_weight = sum(split.weights.values())
    versions = [
        ExplainedVersion(
            version,
            weight,
            weight / total_weight,
            buckets.get(version),
            compute_score(buckets[version], weight) if buckets else None,
            version == route.target.version,
        )
        for version, weight in split.weights.items()
    ]
    return ExplainedSplit(
        route.split, source or "chance", versions, None if source else random_number
    )


def explain_target(route: Route) -> ExplainedTarget:
    """The target of a route."""
    target = route.target
    return ExplainedTarget(
        route.model.info.name, target.version, target.backend_name, target.backend_model
    )


def explain_judge(route: Route) -> ExplainedJudge | None:
    """What judges answers to such requests."""
    judge = route.model.judge
    return None if judge is None else ExplainedJudge(judge.model, judge.share)


def explain_shadow(route: Route) -> ExplainedShadow | None:
    """Where shadows of such requests go; None for a pinned version."""
    rule = route.model.shadow
    if rule is None or route.pinned:
        return None
    return ExplainedShadow(rule.config.to, rule.config.share)


def explain_defaults(
    adapter: ClientAdapter, client_request: ClientRequest, model: Model
) -> tuple[ExplainedDefault, ...]:
    """The model's defaults, and which of them apply to the request as the client sent it."""
    defaults = model.defaults
    if not defaults.has_values:
        return ()
    applied: dict[str, Any] = {}
    request = adapter.decode_request(client_request, model.info)
    if isinstance(request, GenerationRequest):
        applied |= select_unset_defaults(request.sampling, defaults.sampling)
        applied |= select_unset_defaults(request.stopping, defaults.stopping)
    values = {**defaults.sampling, **defaults.stopping}
    return tuple(ExplainedDefault(name, value, name in applied) for name, value in values.items())


def explain_limits(model: Model, context: RequestContext, max_body_size: int) -> ExplainedLimits:
    """The limits of a request at this moment."""
    info, timeouts = model.info, context.timeouts
    return ExplainedLimits(
        body=max_body_size,
        context=info.context_length,
        max_tokens=info.max_tokens,
        connect=timeouts.connect,
        first_token=timeouts.first_token,
        idle=timeouts.idle,
        total=context.deadline.remaining(),
    )


def explain_upstream_request(
    url: str, upstream_request: UpstreamRequest, max_body_size: int | None
) -> ExplainedUpstreamRequest:
    """A request to a worker, with at most ``max_body_size`` bytes of its body."""
    body = upstream_request.body[:max_body_size]
    text, is_text = _decode_body_text(body)
    return ExplainedUpstreamRequest(
        url=url,
        method=upstream_request.method,
        path=join_path(urlsplit(url).path.rstrip("/"), upstream_request.path),
        headers=mask_headers(upstream_request.headers),
        body=text,
        size=len(upstream_request.body),
        base64=not is_text,
    )


def mask_headers(headers: Headers) -> list[tuple[str, str]]:
    """The headers with secrets masked."""
    return [(name, "***" if name.lower() in _SECRET_HEADERS else value) for name, value in headers]


def _decode_body_text(body: bytes) -> tuple[str, bool]:
    """A body as text, or in base64 with False. A character that was cut in two is left out."""
    try:
        return body.decode(), True
    except UnicodeDecodeError as error:
        if len(body) - error.start < 4 and error.reason == "unexpected end of data":  # noqa: PLR2004 - the longest character
            return body[: error.start].decode(), True
        return b64encode(body).decode(), False
