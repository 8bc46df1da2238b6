"""Exchanges that are traced, as they come about. All that a request without a trace costs is here.

A client's word for its trace is linked to, and the exchange is the first span of a trace of its
own: who may not be trusted can neither fill a trace with spans nor choose what is sampled. Where it
is trusted, the exchange goes on in its trace, and is sampled as it says.
"""

from collections.abc import Callable
from typing import Final

from msgspec import Struct, field

from gateway.seam import HttpRequest
from gateway.telemetry import RequestRecord
from gateway.tracing.parents import ParentSpan, parse_traceparent
from protocols.core.errors import GatewayError
from protocols.core.interfaces import Headers
from protocols.core.request import Request

_TRACE_ID_BYTES: Final = 16
_SPAN_ID_BYTES: Final = 8
"""Bytes of an id."""


class AttemptSpan(Struct):
    """A worker was asked. Times are in Unix seconds."""

    span_id: str
    url: str
    backend: str
    model: str
    started_at: float
    ended_at: float = 0.0
    error: str = ""
    """The class of what it failed with."""


class RequestTrace(Struct, eq=False):
    """What is known of one exchange; a ``backends.interfaces.AttemptTrace``."""

    record: RequestRecord
    method: str
    now: Callable[[], float]
    span_id: Callable[[], str]
    linked_parent: ParentSpan | None = None
    """What the client says of a trace, where that is another."""
    parent: ParentSpan | None = None
    """What this is part of."""
    request: Request | None = None
    attempts: list[AttemptSpan] = field(default_factory=list[AttemptSpan])

    def set_request(self, request: Request) -> None:
        """See ``backends.interfaces.AttemptTrace``."""
        self.request = request

    def start_attempt(self, url: str) -> Headers:
        """See ``backends.interfaces.AttemptTrace``."""
        record = self.record
        one = AttemptSpan(self.span_id(), url, record.backend, record.model, self.now())
        self.attempts.append(one)
        told = (("traceparent", f"00-{record.trace}-{one.span_id}-01"),)
        state = self.parent.tracestate if self.parent is not None else ""
        return (*told, ("tracestate", state)) if state else told

    def end_attempt(self, error: GatewayError | None) -> None:
        """See ``backends.interfaces.AttemptTrace``."""
        one = self.attempts[-1]
        if not one.ended_at:
            one.ended_at = self.now()
            one.error = "" if error is None else type(error).__name__


class TraceSampler:
    """Chooses exchanges by ``share``, and puts those that have ended where they are sent from.

    ``now`` gives Unix seconds, ``draw`` a number in [0, 1) and ``random`` so many random bytes.
    """

    def __init__(
        self,
        put: Callable[[RequestTrace], None],
        *,
        share: float,
        trust: bool,
        now: Callable[[], float],
        draw: Callable[[], float],
        random: Callable[[int], bytes],
    ) -> None:
        self._export = put
        self._sample_rate = share
        self._trust_parent = trust
        self._now = now
        self._draw = draw
        self._random = random
        self._open_traces: dict[str, RequestTrace] = {}
        """By the span's id."""

    def start_trace(self, record: RequestRecord, http: HttpRequest) -> None:
        """See ``gateway.server.Tracer``."""
        if not self._trust_parent:
            if self._draw() >= self._sample_rate:
                return
            said, followed = parse_traceparent(http.headers), None
        else:
            said, followed = None, parse_traceparent(http.headers)
            if not (self._draw() < self._sample_rate if followed is None else followed.sampled):
                return
        record.trace = (
            self._random(_TRACE_ID_BYTES).hex() if followed is None else followed.trace_id
        )
        record.span = self._make_span_id()
        self._open_traces[record.span] = RequestTrace(
            record, http.method, self._now, self._make_span_id, said, followed
        )

    def get_trace(self, record: RequestRecord) -> RequestTrace | None:
        """See ``gateway.server.Tracer``."""
        return self._open_traces.get(record.span) if record.span else None

    def end_trace(self, record: RequestRecord) -> None:
        """An exchange has ended."""
        if record.span and (trace := self._open_traces.pop(record.span, None)) is not None:
            self._export(trace)

    def _make_span_id(self) -> str:
        return self._random(_SPAN_ID_BYTES).hex()
