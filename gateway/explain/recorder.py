"""Records how a request is handled, and builds its explanation at any time."""

import re
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from backends.http.interfaces import join_path
from backends.interfaces import (
    ExplainsSelection,
    RequestContext,
    WorkerFailure,
    WorkerSelection,
)
from gateway.auth.api_keys import may_explain
from gateway.emulation.execute import count_parts
from gateway.explain.report import (
    ExplainedAttempt,
    ExplainedDefault,
    ExplainedFallback,
    ExplainedJudge,
    ExplainedLimits,
    ExplainedResponse,
    ExplainedRule,
    ExplainedShadow,
    ExplainedSplit,
    ExplainedStickySource,
    ExplainedTarget,
    ExplainedUpstreamRequest,
    ExplainedVersion,
    Explanation,
)
from gateway.observability.record import RequestRecord
from gateway.pipeline.services import HandlerSettings
from gateway.pipeline.state import RequestState, Stage
from gateway.pipeline.strategies import TargetAttempt, select_unset_defaults
from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.router import CATCH_ALL_MODEL, Model, Route, Router
from gateway.routing.rules import RouteRule, RuleMatch
from gateway.routing.traffic_split import compute_score
from protocols.core import loss
from protocols.core.errors import InternalError
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Clock,
    Headers,
    UpstreamRequest,
)
from protocols.core.request import GenerationRequest

# The parts of an explanation.

EXPLAIN_HEADER: Final = "x-interlingua-explain"
"""The request header that requests an explanation, and the response header that contains it."""
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


_MAX_BODY_BYTES: Final = 64 << 10
_MAX_RECORDED_REQUESTS: Final = 8
"""The number of worker selections and of sent requests that are kept per target."""
_MAX_CANDIDATES: Final = 50
_MAX_HEADER_TEXT: Final = 64
_UNPRINTABLE: Final = re.compile(r"[^ -~]")
_encode = msgspec.json.Encoder().encode


class DryRunComplete(InternalError):
    """Ends a dry run where the request would be sent to a worker or served by the backend."""


class ExplanationRecorder(Stage):
    """Records one request: its stage, and the observer of its routing and backends.

    ``draw`` gives its random numbers. With ``dry_run``, ``DryRunComplete`` ends it where it would
    be sent or served; such a request belongs to no user, so that its sticky sources are shown, too.
    """

    observes_response = True

    def __init__(
        self,
        record: RequestRecord,
        clock: Clock,
        draw: Callable[[], float],
        *,
        names: Collection[str] = (),
        max_body_size: int = 0,
        dry_run: bool = False,
    ) -> None:
        """``names`` are those of the models; ``max_body_size`` is the limit of bodies, in bytes."""
        self._names = names
        self.dry_run = dry_run
        self._max_body_size = max_body_size
        self._record = record
        self._clock = clock
        self._random = draw
        self._drawn_number = 0.0
        self._bucket: int | None = None
        self._stage_started_at = clock()
        self._stage_seconds: dict[str, float] = {}
        self._explanation = Explanation(id=record.id, dry_run=dry_run)
        self._explained_rules: list[ExplainedRule] = []
        self._attempts: list[ExplainedAttempt] = []
        self._attempt_count = 0
        self._worker_url = ""

    # --- the life of the request ------------------------------------------------------------------

    def on_read(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        client_request, principal = request.client_request, request.principal
        request.is_dry_run = self.dry_run
        request.route_observer = request.backend_observer = self
        self._end_stage("read")
        explanation = self._explanation
        explanation.protocol, explanation.peer = request.adapter.name, request.http.peer
        explanation.method, explanation.path = client_request.endpoint.method, client_request.path
        explanation.endpoint, explanation.task = (
            client_request.endpoint.path,
            client_request.endpoint.task,
        )
        if principal is not None:
            explanation.key, explanation.tags = principal.name, sorted(principal.tags)

    def draw(self) -> float:
        """See ``gateway.routing.router.RouteObserver``."""
        self._drawn_number = self._random()
        return self._drawn_number

    def on_rule(self, rule: RouteRule, mismatch: str, match: RuleMatch | None) -> None:
        """See ``gateway.routing.router.RouteObserver``."""
        self._explained_rules.append(explain_rule(rule, mismatch, match))

    def on_routed(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        routing_info, route = request.routing_info, request.route
        attributes = request.get_attributes()
        self._end_stage("route")
        explanation = self._explanation
        explanation.requested_model, explanation.stream = routing_info.model, routing_info.stream
        explanation.model = (
            route.requested_model if route.requested_model in self._names else CATCH_ALL_MODEL
        )
        if route.pinned:
            explanation.pinned_version = "name" if routing_info.version is None else "path"
        explanation.split = explain_split(route, attributes, self._drawn_number)
        if explanation.split is not None:
            explanation.sticky = explain_sticky_sources(
                route.model.sticky, attributes, include_values=self.dry_run
            )
        explanation.target = explain_target(route)
        explanation.shadow = explain_shadow(route)
        explanation.judge = explain_judge(route)
        self._bucket = route.reason.bucket

    def on_fallback(self, _: RequestState, route: Route, skipped: str) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        known = self._explanation.fallbacks
        self._explanation.fallbacks = (*known, ExplainedFallback(route.target_name, skipped))

    def on_attempt(self, _: RequestState, attempt: TargetAttempt) -> None:
        """See ``gateway.pipeline.state.Stage``. Raises DryRunComplete."""
        self._end_stage("fallback" if self._attempts else "translate")
        route, plan = attempt.route, attempt.plan
        model = route.model
        self._attempts.append(
            ExplainedAttempt(
                target=explain_target(route),
                passed_through=attempt.prepared.passthrough is not None,
                on_loss=model.on_loss,
                defaults=explain_defaults(attempt.adapter, attempt.client_request, model),
                unsupported_parameters=plan.unsupported_parameters,
                limits=explain_limits(model, attempt.context, self._max_body_size),
                parts=count_parts(attempt.prepared.request, plan),
            )
        )
        if self.dry_run and not isinstance(route.target.backend, ExplainsSelection):
            raise DryRunComplete("the request would be served")

    # --- the backend ------------------------------------------------------------------------------

    def on_selection(self, selection: WorkerSelection, wire: UpstreamRequest) -> None:
        """See ``backends.interfaces.RequestObserver``."""
        attempt = self._attempts[-1]
        if len(attempt.choices) < _MAX_RECORDED_REQUESTS and selection not in attempt.choices:
            attempt.choices.append(selection if self.dry_run else _shorten_selection(selection))
        if self.dry_run:
            attempt.sent.append(explain_upstream_request(selection.expected_url, wire, None))
            raise DryRunComplete("the request would be sent")

    def on_send(self, url: str, wire: UpstreamRequest) -> None:
        """See ``backends.interfaces.RequestObserver``."""
        attempt = self._attempts[-1]
        self._attempt_count += 1
        self._worker_url = url
        if len(attempt.sent) < _MAX_RECORDED_REQUESTS:
            attempt.sent.append(explain_upstream_request(url, wire, _MAX_BODY_BYTES))

    def on_failure(self, failure: WorkerFailure) -> None:
        """See ``backends.interfaces.RequestObserver``."""
        for sent in self._attempts[-1].sent:
            if sent.url == failure.worker and not sent.error:
                sent.error, sent.worker_text = failure.error, failure.text
                sent.worker_status = failure.status
                return

    def add_headers(self, _: RequestState, __: int) -> Headers:
        """See ``gateway.pipeline.state.Stage``."""
        return ((EXPLAIN_HEADER, self.format_header()),)

    # --- the explanation --------------------------------------------------------------------------

    def format_header(self) -> str:
        """The value of the response header: JSON in ASCII, shorter than 4 KiB."""
        self._end_stage("first_byte")
        explanation, record = self._explanation, self._record
        fields: dict[str, Any] = {
            "protocol": explanation.protocol,
            "model": _sanitize_text(record.model),
            "version": _sanitize_text(record.version),
            "rule": record.rule,
            "sticky": record.sticky,
            "bucket": self._bucket,
            "pinned": bool(explanation.pinned_version),
            "failed_attempts": [
                _sanitize_text(one) for one in record.failed_attempts[:_MAX_RECORDED_REQUESTS]
            ],
            "unsupported_parameters": _sanitize_text(
                loss.format_loss_header(record.unsupported_parameters), 1000
            ),
            "worker": _sanitize_text(self._worker_url, 200),
            "attempts": self._attempt_count,
            "seconds": {name: round(long, 6) for name, long in self._stage_seconds.items()},
        }
        return _encode(fields).decode()

    def build_explanation(self) -> Explanation:
        """The explanation so far."""
        record = self._record
        return replace(
            self._explanation,
            rules=tuple(self._explained_rules),
            failed_attempts=record.failed_attempts,
            attempts=tuple(self._attempts),
            seconds={} if self.dry_run else self._stage_seconds,
            answer=None if self.dry_run or not record.duration else _explain_response(record),
        )

    def _end_stage(self, name: str) -> None:
        now = self._clock()
        self._stage_seconds[name] = (
            self._stage_seconds.get(name, 0.0) + now - self._stage_started_at
        )
        self._stage_started_at = now


def _shorten_selection(selection: WorkerSelection) -> WorkerSelection:
    """A worker selection to keep: of many candidates the expected one and some more."""
    expected_first = sorted(selection.candidates, key=lambda one: one.url != selection.expected_url)
    return replace(selection, candidates=expected_first[:_MAX_CANDIDATES])


def _explain_response(record: RequestRecord) -> ExplainedResponse:
    return ExplainedResponse(
        record.status,
        record.outcome,
        record.error,
        tokens=record.tokens,
        usage=record.usage,
        first_byte=record.first_byte,
        duration=record.duration,
    )


def _sanitize_text(text: str, limit: int = _MAX_HEADER_TEXT) -> str:
    """A text that is safe in a header."""
    return _UNPRINTABLE.sub("?", text[:limit])


# The last explanations.

MAX_EXPLANATIONS: Final = 100
"""How many explanations are kept, each for as long as it is among the last."""


class ExplanationStore:
    """The last recorded requests in memory, by id; of two with the same id the last one.

    ``draw`` returns the requests' random numbers.
    """

    def __init__(self, clock: Clock, draw: Callable[[], float]) -> None:
        self._clock = clock
        self._random = draw
        self._recorders: dict[str, ExplanationRecorder] = {}

    def create_recorder(
        self, record: RequestRecord, names: Collection[str], max_body_size: int
    ) -> ExplanationRecorder:
        """The recorder of a request, which is kept as long as it is among the last."""
        recorder = ExplanationRecorder(
            record, self._clock, self._random, names=names, max_body_size=max_body_size
        )
        self._recorders.pop(record.id, None)
        self._recorders[record.id] = recorder
        if len(self._recorders) > MAX_EXPLANATIONS:
            del self._recorders[next(iter(self._recorders))]
        return recorder

    def find_explanation(self, id: str) -> Explanation | None:  # noqa: A002 - the field's name
        """The explanation so far of the request with this id."""
        recorder = self._recorders.get(id)
        return None if recorder is None else recorder.build_explanation()


class ExplainStage(Stage):
    """Records the requests of a listener whose explanation is requested by a header.

    The store keeps the explanations of the last ``MAX_EXPLANATIONS`` requests.
    """

    header = EXPLAIN_HEADER

    def __init__(self, store: ExplanationStore, router: Router, settings: HandlerSettings) -> None:
        self._store = store
        self._router = router
        self._settings = settings

    def on_read(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        settings = self._settings
        if not may_explain(request.principal, open_to_all=settings.explain_without_key):
            return
        names = list_model_names(self._router)
        recorder = self._store.create_recorder(request.record, names, settings.max_body_size)
        request.add_stage(recorder)
        recorder.on_read(request)


def list_model_names(router: Router) -> Collection[str]:
    """The public names of the models."""
    return {info.name for info in router.list_models()}
