"""The parts of an explanation, made of what serving a request brought about."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from backends.interfaces import RequestContext
from gateway.emulation.execute import count_parts
from gateway.exchange import ResponseStrategy
from gateway.fitting import select_unset_defaults
from gateway.routing.request_attributes import RequestAttributes, Scalar
from gateway.routing.router import Route
from gateway.routing.rules import RouteConditions, RouteRule, RuleMatch
from gateway.routing.traffic_split import compute_score
from gateway.translation import TranslationStrategy
from gateway.watching.account import (
    ExplainedAttempt,
    ExplainedDefault,
    ExplainedLimits,
    ExplainedRule,
    ExplainedShadow,
    ExplainedSplit,
    ExplainedStickySource,
    ExplainedTarget,
    ExplainedUpstreamRequest,
    ExplainedVersion,
)
from protocols.core.interfaces import ClientAdapter, ClientRequest, Headers, UpstreamRequest
from protocols.core.request import GenerationRequest

_SECRET_HEADERS: Final = frozenset(
    {"authorization", "proxy-authorization", "api-key", "x-api-key", "cookie", "set-cookie"}
)


def explain_rule(rule: RouteRule, unmet: str, match: RuleMatch | None) -> ExplainedRule:
    """A rule, as it was tried; ``match`` is None where ``unmet`` does not hold."""
    when = rule.conditions
    if match is None:
        return ExplainedRule(
            name=rule.name, followed=False, unmet=unmet, wanted=_get_expected_value(when, unmet)
        )
    return ExplainedRule(
        name=rule.name,
        followed=match.is_selected,
        unmet="" if match.is_selected else "share",
        share=when.share,
        sticky=match.sticky,
        bucket=match.bucket,
        lies=match.position,
        model=rule.to,
        version=rule.version,
    )


def _get_expected_value(when: RouteConditions, unmet: str) -> Scalar | None:
    kind, _, name = unmet.partition(":")
    match kind:
        case "header":
            return when.headers[name]
        case "body":
            return when.body[name]
        case _:
            found: Scalar | None = getattr(when, kind)
            return found


def explain_sticky_sources(
    sources: Sequence[str], traits: RequestAttributes, *, said: bool
) -> list[ExplainedStickySource]:
    """The sources, up to the first that says something; with ``said`` also what."""
    found = []
    for source in sources:
        text = traits.read_source(source)
        found.append(ExplainedStickySource(source, bool(text), text if said and text else None))
        if text:
            break
    return found


def explain_split(route: Route, traits: RequestAttributes, drawn: float) -> ExplainedSplit | None:
    """How the split chose; None where none did."""
    if not route.split:
        return None
    source, held = route.reason.sticky, route.model.split
    numbers: Mapping[str, int] = held.compute_buckets(traits.read_source(source)) if source else {}
    whole = sum(held.weights.values())
    arms = [
        ExplainedVersion(
            version,
            weight,
            weight / whole,
            numbers.get(version),
            compute_score(numbers[version], weight) if numbers else None,
            version == route.target.version,
        )
        for version, weight in held.weights.items()
    ]
    return ExplainedSplit(route.split, source or "chance", arms, None if source else drawn)


def explain_target(route: Route) -> ExplainedTarget:
    """Where a route leads."""
    to = route.target
    return ExplainedTarget(route.model.info.name, to.version, to.backend_name, to.backend_model)


def explain_shadow(route: Route) -> ExplainedShadow | None:
    """Where copies may go; none of a request that pinned its version does."""
    found = route.model.shadow
    return None if found is None or route.pinned else ExplainedShadow(found.to, found.share)


class PlannedAttempt(Struct, frozen=True):
    """One target that is about to be asked. ``body`` is the most that a request may bring."""

    adapter: ClientAdapter
    client_request: ClientRequest
    route: Route
    backend: ResponseStrategy
    context: RequestContext
    max_body: int


def explain_defaults(asking: PlannedAttempt) -> tuple[ExplainedDefault, ...]:
    """The model's defaults, and which of them hold for the request as the client sent it."""
    told = asking.route.model.defaults
    if not told.has_values:
        return ()
    applied: dict[str, Any] = {}
    request = asking.adapter.decode_request(asking.client_request, asking.route.model.info)
    if isinstance(request, GenerationRequest):
        applied |= select_unset_defaults(request.sampling, told.sampling)
        applied |= select_unset_defaults(request.stopping, told.stopping)
    both = {**told.sampling, **told.stopping}
    return tuple(ExplainedDefault(name, value, name in applied) for name, value in both.items())


def explain_attempt(asking: PlannedAttempt) -> ExplainedAttempt:
    """What is known of a target before it is asked."""
    route, answering = asking.route, asking.backend
    info, timeouts = route.model.info, asking.context.timeouts
    plan = answering.plan if isinstance(answering, TranslationStrategy) else None
    return ExplainedAttempt(
        target=explain_target(route),
        relayed=plan is None,
        on_loss=route.model.on_loss,
        defaults=explain_defaults(asking),
        losses=() if plan is None else plan.unsupported_parameters,
        limits=ExplainedLimits(
            asking.max_body,
            info.context_length,
            info.max_tokens,
            timeouts.connect,
            timeouts.first_token,
            timeouts.idle,
            asking.context.deadline.remaining(),
        ),
        parts=1 if plan is None else count_parts(answering.request, plan),
    )


def explain_upstream_request(
    url: str, wire: UpstreamRequest, most: int | None
) -> ExplainedUpstreamRequest:
    """A request to a worker, of its body no more than ``most`` bytes."""
    body = wire.body[:most]
    text, is_text = _decode_body_text(body)
    return ExplainedUpstreamRequest(
        url=url,
        method=wire.method,
        path=wire.path,
        headers=mask_headers(wire.headers),
        body=text,
        size=len(wire.body),
        base64=not is_text,
    )


def mask_headers(headers: Headers) -> list[tuple[str, str]]:
    """These headers, without what is secret in them."""
    return [(name, "***" if name.lower() in _SECRET_HEADERS else value) for name, value in headers]


def _decode_body_text(body: bytes) -> tuple[str, bool]:
    """A body as text, and whether it is one; a character that was cut in two is left out."""
    try:
        return body.decode(), True
    except UnicodeDecodeError as error:
        if len(body) - error.start < 4 and error.reason == "unexpected end of data":  # noqa: PLR2004 - the longest character
            return body[: error.start].decode(), True
        return b64encode(body).decode(), False
