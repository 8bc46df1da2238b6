"""Looks on while one request is served, and tells of it at any time."""

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from backends.interfaces import ExplainsSelection, WorkerSelection
from gateway.auth.api_keys import Principal
from gateway.exchange import ResponseStrategy
from gateway.observability.record import RequestRecord
from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.router import CATCH_ALL_MODEL, Route, Router
from gateway.routing.rules import RouteRule, RuleMatch
from gateway.seam import ResponseWriter
from gateway.watching import telling
from gateway.watching.account import (
    ExplainedAttempt,
    ExplainedFallback,
    ExplainedResponse,
    ExplainedRule,
    Explanation,
)
from protocols.core import loss
from protocols.core.errors import GatewayError, InternalError
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Clock,
    Headers,
    RoutingInfo,
    UpstreamRequest,
)

EXPLAIN_HEADER: Final = "x-interlingua-explain"
_MAX_BODY_BYTES: Final = 64 << 10
_MAX_RECORDED_REQUESTS: Final = 8
"""Of how many choices and workers of a target everything is kept."""
_MAX_CANDIDATES: Final = 50
_MAX_HEADER_TEXT: Final = 64
_UNPRINTABLE: Final = re.compile(r"[^ -~]")
_encode = msgspec.json.Encoder().encode


class DryRunComplete(InternalError):
    """Ends a request that is served dry, where it would be answered."""


class ExplainRecorder:
    """One request; a ``backends.interfaces.RequestObserver``. ``draw`` is the luck that it has.

    With ``dry``, what would send or answer anything is ended by Foretold. Such a request is
    nobody's, so that what it says of who asks is told, too.
    """

    def __init__(
        self, record: RequestRecord, clock: Clock, draw: Callable[[], float], *, dry: bool = False
    ) -> None:
        self.dry_run = dry
        self._record = record
        self._clock = clock
        self._random = draw
        self._drawn_number = 0.0
        self._bucket: int | None = None
        self._stage_started_at = clock()
        self._stage_seconds: dict[str, float] = {}
        self._explanation = Explanation(id=record.id, dry=dry)
        self._explained_rules: list[ExplainedRule] = []
        self._attempts: list[ExplainedAttempt] = []
        self._attempt_count = 0
        self._worker_url = ""

    # --- the life of the request ------------------------------------------------------------------

    def wrap_sink(self, sink: ResponseWriter) -> ResponseWriter:
        """The sink, with the header on what it is given."""
        return _ExplainSink(sink, self)

    def record_request(
        self, dialect: ClientAdapter, call: ClientRequest, principal: Principal | None, peer: str
    ) -> None:
        """The whole request is here."""
        self._end_stage("read")
        told = self._explanation
        told.dialect, told.peer = dialect.name, peer
        told.method, told.path = call.endpoint.method, call.path
        told.endpoint, told.task = call.endpoint.path, call.endpoint.task
        if principal is not None:
            told.key, told.tags = principal.name, sorted(principal.tags)

    def wrap_router(self, router: Router) -> Router:
        """The table as this request follows it."""
        return router.with_observer(self._record_rule, self._draw_number)

    def record_route(
        self, router: Router, envelope: RoutingInfo, route: Route, traits: RequestAttributes
    ) -> None:
        """A target was found for it."""
        self._end_stage("route")
        told = self._explanation
        told.asked, told.stream = envelope.model, envelope.stream
        known = {info.name for info in router.list_models()}
        told.model = route.requested_model if route.requested_model in known else CATCH_ALL_MODEL
        if route.pinned:
            told.pin = "name" if envelope.version is None else "path"
        told.split = telling.explain_split(route, traits, self._drawn_number)
        if told.split is not None:
            told.sticky = telling.explain_sticky_sources(
                route.model.sticky, traits, said=self.dry_run
            )
        told.target = telling.explain_target(route)
        told.shadow = telling.explain_shadow(route)
        self._bucket = route.reason.bucket

    def record_fallbacks(self, able: Iterable[tuple[Route, ResponseStrategy | str]]) -> None:
        """Who would answer in the target's stead, or why not; looked at of a dry request."""
        if self.dry_run:
            self._explanation.fallbacks = tuple(
                ExplainedFallback(route.target_name, found if isinstance(found, str) else "")
                for route, found in able
            )

    def record_attempt(self, asking: telling.PlannedAttempt) -> None:
        """A target is asked. Raises Foretold where that is all there is to foretell."""
        self._end_stage("instead" if self._attempts else "translate")
        self._attempts.append(telling.explain_attempt(asking))
        if self.dry_run and not isinstance(asking.route.target.backend, ExplainsSelection):
            raise DryRunComplete("the request would be answered")

    # --- what its backend does --------------------------------------------------------------------

    def on_selection(self, choice: WorkerSelection, wire: UpstreamRequest) -> None:
        """See ``backends.interfaces.RequestObserver``."""
        now = self._attempts[-1]
        if len(now.choices) < _MAX_RECORDED_REQUESTS and choice not in now.choices:
            now.choices.append(choice if self.dry_run else _shorten_selection(choice))
        if self.dry_run:
            now.sent.append(telling.explain_upstream_request(choice.expected_url, wire, None))
            raise DryRunComplete("the request would be sent")

    def on_send(self, url: str, wire: UpstreamRequest) -> None:
        """See ``backends.interfaces.RequestObserver``."""
        now = self._attempts[-1]
        self._attempt_count += 1
        self._worker_url = url
        if len(now.sent) < _MAX_RECORDED_REQUESTS:
            now.sent.append(telling.explain_upstream_request(url, wire, _MAX_BODY_BYTES))

    def on_failure(self, url: str, error: GatewayError) -> None:
        """See ``backends.interfaces.RequestObserver``."""
        for one in self._attempts[-1].sent:
            if one.url == url and not one.error:
                one.error = type(error).__name__
                return

    # --- what is told -----------------------------------------------------------------------------

    def format_header(self) -> str:
        """What the answer's header tells: JSON in ASCII, shorter than 4 KiB."""
        self._end_stage("first_byte")
        told, record = self._explanation, self._record
        found: dict[str, Any] = {
            "dialect": told.dialect,
            "model": _sanitize_text(record.model),
            "version": _sanitize_text(record.version),
            "rule": record.rule,
            "sticky": record.sticky,
            "bucket": self._bucket,
            "pinned": bool(told.pin),
            "fell_back": [_sanitize_text(one) for one in record.fell_back[:_MAX_RECORDED_REQUESTS]],
            "losses": _sanitize_text(loss.format_loss_header(record.losses), 1000),
            "worker": _sanitize_text(self._worker_url, 200),
            "attempts": self._attempt_count,
            "seconds": {name: round(long, 6) for name, long in self._stage_seconds.items()},
        }
        return _encode(found).decode()

    def build_explanation(self) -> Explanation:
        """All of it, as it is now."""
        record = self._record
        return replace(
            self._explanation,
            rules=tuple(self._explained_rules),
            fell_back=record.fell_back,
            tries=tuple(self._attempts),
            seconds={} if self.dry_run else self._stage_seconds,
            answer=None if self.dry_run or not record.duration else _explain_response(record),
        )

    # --- its own ----------------------------------------------------------------------------------

    def _record_rule(self, rule: RouteRule, unmet: str, match: RuleMatch | None) -> None:
        self._explained_rules.append(telling.explain_rule(rule, unmet, match))

    def _draw_number(self) -> float:
        self._drawn_number = self._random()
        return self._drawn_number

    def _end_stage(self, name: str) -> None:
        now = self._clock()
        self._stage_seconds[name] = (
            self._stage_seconds.get(name, 0.0) + now - self._stage_started_at
        )
        self._stage_started_at = now


class _ExplainSink:
    """A sink for the answer to a request that is explained."""

    def __init__(self, sink: ResponseWriter, watch: ExplainRecorder) -> None:
        self._sink = sink
        self._recorder = watch

    @property
    def started(self) -> bool:
        return self._sink.started

    @property
    def needs_drain(self) -> bool:
        return self._sink.needs_drain

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        self._sink.send_response(
            status, (*headers, (EXPLAIN_HEADER, self._recorder.format_header())), body
        )

    def start(self, status: int, headers: Headers) -> None:
        self._sink.start(status, (*headers, (EXPLAIN_HEADER, self._recorder.format_header())))

    def write(self, data: bytes) -> None:
        self._sink.write(data)

    def finish(self) -> None:
        self._sink.finish()

    async def drain(self) -> None:
        await self._sink.drain()


def _shorten_selection(choice: WorkerSelection) -> WorkerSelection:
    """A choice as it is remembered: of many workers the likely one and some more."""
    likely_first = sorted(choice.candidates, key=lambda one: one.url != choice.expected_url)
    return replace(choice, candidates=likely_first[:_MAX_CANDIDATES])


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


def _sanitize_text(text: str, most: int = _MAX_HEADER_TEXT) -> str:
    """A text as a header may hold it."""
    return _UNPRINTABLE.sub("?", text[:most])
