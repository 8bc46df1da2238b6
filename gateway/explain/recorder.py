"""Records how a request is handled, and builds its explanation at any time."""

import re
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from backends.interfaces import ExplainsSelection, WorkerFailure, WorkerSelection
from gateway.emulation.execute import count_parts
from gateway.explain.parts import (
    explain_defaults,
    explain_judge,
    explain_limits,
    explain_rule,
    explain_shadow,
    explain_split,
    explain_sticky_sources,
    explain_target,
    explain_upstream_request,
)
from gateway.explain.report import (
    ExplainedAttempt,
    ExplainedFallback,
    ExplainedResponse,
    ExplainedRule,
    Explanation,
)
from gateway.observability.record import RequestRecord
from gateway.pipeline.state import RequestState, Stage
from gateway.pipeline.strategies import TargetAttempt
from gateway.routing.router import CATCH_ALL_MODEL, Route
from gateway.routing.rules import RouteRule, RuleMatch
from protocols.core import loss
from protocols.core.errors import InternalError
from protocols.core.interfaces import Clock, Headers, UpstreamRequest

EXPLAIN_HEADER: Final = "x-interlingua-explain"
"""The request header that requests an explanation, and the response header that contains it."""


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
