"""One attempt: one request to one worker, its timeouts, headers and response events."""

import asyncio
import functools
import math
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, Literal, NoReturn

from msgspec import Struct, field
from msgspec.structs import replace

from backends.aio import DeadlineTimer
from backends.http.interfaces import HttpClient, UpstreamResponse
from backends.interfaces import (
    AttemptTrace,
    Deadline,
    EventSink,
    RequestContext,
    StreamItem,
    Timeouts,
)
from backends.pool.metrics import PoolMetrics
from backends.pool.side_requests import add_bearer
from backends.pool.workers import WorkerSlot, WorkerState, get_error_kind
from protocols.core.errors import (
    ClientError,
    DeadlineExceeded,
    GatewayError,
    RateLimitExceeded,
    StreamBroken,
    WorkerFailed,
)
from protocols.core.events import ResponseMetadata, StreamEnd, StreamStart, TextDelta, Timing, Usage
from protocols.core.interfaces import (
    Clock,
    Headers,
    PassthroughReader,
    ResponseDecoder,
    UpstreamRequest,
)
from protocols.core.request import Request

# Timeouts of an attempt.

TimeoutName = Literal["first_token", "idle", "total"]

NO_TIMEOUT: Final = math.inf


class AttemptTimeouts:
    """Aborts a worker's response when the worker is silent for too long.

    ``first`` is the time, by the timer's clock, by which the first events must arrive;
    ``NO_TIMEOUT`` if only the deadline applies. After the first events (``has_started``), each
    further read may take ``idle`` seconds. The deadline always applies. The reader calls
    ``start_wait`` or ``wait_next`` before it waits and ``stop_wait`` afterwards, and at last
    removes the object from the timer. A subclass implements ``abort_response``.
    """

    __slots__ = (
        "_connecting_task",
        "_deadline",
        "_deadline_timer",
        "_expired",
        "_first_due",
        "_idle_timeout",
        "_is_waiting",
        "_last_read_at",
        "_next_check",
        "has_started",
        "longest_gap",
    )

    def __init__(
        self, lookout: DeadlineTimer, deadline: Deadline, first: float, idle: float
    ) -> None:
        self._deadline_timer = lookout
        self._deadline = deadline
        self._idle_timeout = idle
        self._first_due = first
        self.has_started = False
        """Whether the first events have arrived."""
        self.longest_gap = 0.0
        """The longest time between two reads since the first events, in seconds."""
        self._last_read_at = NO_TIMEOUT
        """Start of the last read after the first events, by the clock."""
        self._is_waiting = False
        self._next_check = NO_TIMEOUT
        """When the timer checks it next, by the clock."""
        self._expired: TimeoutName | None = None
        """The timeout that expired, if any."""
        self._connecting_task: asyncio.Task[Any] | None = None
        """The task that waits for a connection."""

    def abort_response(self) -> None:
        """Abort the response, if there is one yet."""

    async def wait_response(
        self, opening: Coroutine[Any, Any, UpstreamResponse]
    ) -> UpstreamResponse:
        """Await ``opening`` and return the response. Raises DeadlineExceeded."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        cancelled = task.cancelling()
        self._connecting_task = task
        try:
            if self._expired is not None:  # expired just as an idle connection closed
                raise _make_deadline_error(self._expired)
            self.wait_next()
            return await opening
        except asyncio.CancelledError:
            # Swallow the cancellation only if nobody else requested one.
            if self._expired is not None and task.uncancel() <= cancelled:
                raise _make_deadline_error(self._expired) from None
            raise
        finally:
            self._connecting_task = None
            opening.close()

    def start_wait(self, now: float) -> None:
        """Start to wait for the first bytes. Raises DeadlineExceeded."""
        due, total = self._first_due, self._deadline.expires_at
        if total <= now:
            raise _make_deadline_error("total")
        if due > total:  # noqa: PLR1730 - it would be a call for each request
            due = total
        self._is_waiting = True
        self._next_check = due
        self._deadline_timer.add(self, due)

    def wait_next(self) -> None:
        """Start to wait for the next bytes. Raises DeadlineExceeded."""
        if self.has_started:
            now = self.record_read()
            due = now + self._idle_timeout
        else:
            now, due = self._deadline_timer.clock(), self._first_due
        total = self._deadline.expires_at
        if total <= now:
            raise _make_deadline_error("total")
        self._is_waiting = True
        if due > total:  # noqa: PLR1730 - it would be a call for each read
            due = total
        if due < self._next_check:
            self._next_check = due
            self._deadline_timer.add(self, due)

    def stop_wait(self) -> None:
        """Stop waiting: no timeout but the next check applies."""
        self._is_waiting = False

    def record_read(self) -> float:
        """Record a read after the first events; returns the time."""
        now = self._deadline_timer.clock()
        if now - self._last_read_at > self.longest_gap:  # noqa: PLR1730 - it would be a call for each read
            self.longest_gap = now - self._last_read_at
        self._last_read_at = now
        return now

    def on_deadline(self, now: float) -> None:
        """Abort the response if a timeout has expired by ``now``."""
        self._next_check = NO_TIMEOUT
        if not self._is_waiting:
            return
        due, which = self._get_next_limit()
        if due > now:
            self._next_check = due
            self._deadline_timer.add(self, due)
        else:
            self._expire(which)

    def cancel_wait(self) -> None:
        """Stop waiting for the first events, whatever time is left."""
        self._expire("first_token")

    def set_drain_deadline(self, seconds: float) -> None:
        """Let the rest of the body take at most ``seconds``."""
        now = self.record_read() if self.has_started else self._deadline_timer.clock()
        self.has_started = False
        self._first_due = now + seconds

    def get_cause(self, error: GatewayError) -> GatewayError:
        """The cause of ``error``: the timeout error if an expired timeout broke the response."""
        if self._expired is None or not isinstance(error, StreamBroken):
            return error
        return _make_deadline_error(self._expired)

    def _get_next_limit(self) -> tuple[float, TimeoutName]:
        """The next timeout, by the clock, and its name."""
        total = self._deadline.expires_at
        own = self._last_read_at + self._idle_timeout if self.has_started else self._first_due
        if own > total:
            return total, "total"
        return own, "idle" if self.has_started else "first_token"

    def _expire(self, which: TimeoutName) -> None:
        self._expired = which
        self.stop_wait()
        if self._connecting_task is None:
            self.abort_response()
        else:
            self._connecting_task.cancel()


def _make_deadline_error(which: TimeoutName) -> DeadlineExceeded:
    return DeadlineExceeded(_TIMEOUT_TEXTS[which], which=which)


_TIMEOUT_TEXTS: dict[TimeoutName, str] = {
    "first_token": "the worker sent no first token in time",
    "idle": "the worker stopped sending in the middle of its response",
    "total": "the request's time is up",
}


ErrorReader = Callable[[int, Mapping[str, str], bytes], GatewayError]
"""See ``protocols.core.interfaces.UpstreamAdapter.read_error``."""

_MAX_ERROR_BYTES: Final = 64 << 10
"""How much of an error body is read."""
_MAX_UNARY_BYTES: Final = 256 << 20
"""The largest unary response. Streams have no such limit: they are not buffered."""
_MAX_BYTES_WITHOUT_CONTENT: Final = 16 << 20
"""How much of a stream may arrive before its first content; it is buffered until then."""
_BODY_END_SECONDS: Final = 1.0
"""How long the rest of a body may take once the response or its error is complete."""
_STATUS_OK: Final = 200
_NO_OUTPUT: Final[StreamItem] = None, ()
_EVENTS_WITHOUT_CONTENT: Final = frozenset({StreamStart, ResponseMetadata, Timing, Usage})
"""Events without content of the response."""


class AttemptRequest(Struct, frozen=True):
    """A request as sent to workers. ``upstream_request`` has the headers common to requests."""

    request: Request
    upstream_request: UpstreamRequest
    request_headers: Headers
    """The headers of this request alone, without the worker's key."""
    make_response_reader: Callable[[], PassthroughReader]
    """Creates the reader of the response, a new one for each attempt."""
    read_error: ErrorReader
    deadline: Deadline
    background: bool = False
    """Shadow traffic: no client waits for it, and it does not affect the worker's health."""


class AttemptServices(Struct, frozen=True):
    """Shared by all attempts of a pool."""

    http_client: HttpClient
    timeouts: Timeouts
    clock: Clock
    deadline_timer: DeadlineTimer
    metrics: PoolMetrics = field(default_factory=PoolMetrics)


class Attempt(AttemptTimeouts):
    """One request to one worker. Its outcome is recorded in the worker's health.

    Call ``begin``, then ``read_next`` until ``finished``, then ``drain`` unless ``complete``.
    Always call ``close``, which closes the worker's connection if the response is unfinished.
    ``accepted``: the worker sent status 200. ``failure`` is the error that ended the response.
    """

    __slots__ = (
        "_consumer",
        "_is_stream",
        "_last_consumer",
        "_rate_limited",
        "_request",
        "_response",
        "_response_reader",
        "_services",
        "accepted",
        "complete",
        "failure",
        "finished",
        "slot",
        "worker",
    )

    def __init__(self, place: WorkerSlot, work: AttemptRequest, means: AttemptServices) -> None:
        self.slot = place
        self.worker = place.worker
        self._request = work
        self._services = means
        self._response_reader = work.make_response_reader()
        timeouts = means.timeouts
        self._is_stream = streams = work.request.stream
        # A unary response has no first token of its own: only the deadline applies.
        first = place.acquired_at + timeouts.first_token if streams else NO_TIMEOUT
        AttemptTimeouts.__init__(self, means.deadline_timer, work.deadline, first, timeouts.idle)
        self._response: UpstreamResponse | None = None
        self._rate_limited = False
        self.finished = False
        """The last event was StreamEnd or an error; else the worker may still be generating."""
        self.complete = False
        """A unary response has been read to its end."""
        self.accepted = False
        self.failure: GatewayError | None = None

    async def begin(self) -> list[StreamItem]:
        """Send the request and return the first items of the response.

        For a stream these reach to its first content; for a unary response they are all of it.
        Until then the request can be retried on another worker. Raises DeadlineExceeded,
        WorkerError, and the errors that the protocol's adapter reads from the worker.
        """
        member, work = self.worker, self._request
        worker = member.config
        own = (
            work.request_headers
            if worker.bearer is None
            else add_bearer(work.request_headers, worker)
        )
        member.waiting_attempts.add(self)
        try:
            self.start_wait(self.slot.acquired_at)
            reading = self._response = self._services.http_client.try_send(
                worker.url, work.upstream_request, own
            )
            if reading is None or not await reading.wait_headers():
                reading = await self._send_on_new_connection(own)
            if member.logged_state != "up":
                member.record_connected()
            if reading.status != _STATUS_OK:
                raise await self._read_error(reading)
            self.accepted = True
            if "content-encoding" in reading.headers:
                _check_encoding(reading.headers["content-encoding"])
            if reading.complete and not self._is_stream:
                held = self._read_unary(reading.read_available())
            else:
                held = await self._read_beginning(reading)
            self.complete = reading.complete and not self._is_stream
        except GatewayError as error:
            self._raise_failure(error)
        finally:
            member.waiting_attempts.discard(self)
        if self._is_stream or work.request.kind == "embedding":
            self._record_first_token()
        return held

    def abort_response(self) -> None:
        """See AttemptTimeouts."""
        if self._response is not None:
            self._response.abort()

    def _read_unary(self, pieces: Sequence[bytes]) -> list[StreamItem]:
        """Decode a unary response whose body is complete."""
        if sum(map(len, pieces)) > _MAX_UNARY_BYTES:
            raise self._make_too_large_error()
        passage = self._response_reader
        held: list[StreamItem] = []  # not list[StreamItem](), which costs a hundred times as much
        raw, events = passage.feed(pieces) if pieces else _NO_OUTPUT
        if raw or events:
            held.append((raw, events))
        if not events or type(events[-1]) is not StreamEnd:
            held.append(_decode_end(passage))
        self.finished = True
        self.worker.record_success()
        return held

    async def _read_beginning(self, reading: UpstreamResponse) -> list[StreamItem]:
        """Decode a stream up to its first content, or all of a unary response."""
        streams = self._is_stream
        held: list[StreamItem] = []
        size, most = 0, _MAX_BYTES_WITHOUT_CONTENT if streams else _MAX_UNARY_BYTES
        while not self.finished:
            pieces = reading.read_available() or await self._read_body(reading)
            if pieces:
                size += sum(map(len, pieces))
                if size > most:
                    raise self._make_too_large_error()
                self.has_started = not streams
                piece = self._decode_body(pieces)
                if piece[0] or piece[1]:
                    held.append(piece)
                    if streams and _has_content(piece):
                        break
            if (not pieces or reading.complete) and not self.finished:
                held.append(self._decode_end())
        self.stop_wait()
        self.has_started = True
        return held

    async def read_next(self, take: EventSink | None = None) -> StreamItem:
        """The next item; the last one ends with StreamEnd. Raises as ``begin`` does.

        ``take`` receives items as they arrive; returned is the last item, or an empty one if
        ``take`` accepts no more at once.
        """
        reading = self._response
        assert reading is not None  # noqa: S101 - it has begun
        try:
            if take is not None:
                self._consumer, self._last_consumer = take, _NO_OUTPUT
                self.wait_next()
                ended = await reading.forward_to(self._forward_body)
                self.stop_wait()
                return self._decode_end() if ended else self._last_consumer
            while pieces := await self._read_body(reading):
                piece = self._decode_body(pieces)
                if piece[0] or piece[1]:
                    return piece
            return self._decode_end()
        except GatewayError as error:
            self._raise_failure(error)

    async def drain(self) -> None:
        """Read the rest of the body for up to a second, so that the connection can be reused."""
        reading = self._response
        assert reading is not None  # noqa: S101 - it has begun
        self.set_drain_deadline(_BODY_END_SECONDS)
        if self._is_stream and self.longest_gap:
            self._services.metrics.stream_gaps.add(self.longest_gap)
        with suppress(GatewayError):
            while not reading.complete:
                await self._read_body(reading)

    def close(self) -> None:
        """Stop the timeouts and release the connection."""
        self._deadline_timer.remove(self)
        if self._response is not None:
            self._response.release()

    async def _send_on_new_connection(self, own: Headers) -> UpstreamResponse:
        """Send the request over a new connection and wait for the response headers."""
        means, url = self._services, self.worker.config.url
        opening = means.http_client.send_on_new_connection(
            url, self._request.upstream_request, means.timeouts.connect, own
        )
        reading = self._response = await self.wait_response(opening)
        return reading

    async def _read_error(self, reading: UpstreamResponse) -> GatewayError:
        """Read the error of a response whose status is not 200."""
        status, headers = reading.status, reading.headers
        if status < HTTPStatus.BAD_REQUEST:
            return WorkerFailed(f"the worker answered {status}", status=status)
        self.set_drain_deadline(_BODY_END_SECONDS)
        body = bytearray()
        with suppress(GatewayError):  # a part of the body is enough
            while len(body) < _MAX_ERROR_BYTES and (pieces := await self._read_body(reading)):
                body += b"".join(pieces)
        told = bytes(body[:_MAX_ERROR_BYTES])
        self._rate_limited = "retry-after" in headers or b"overloaded" in told.lower()
        return self._request.read_error(status, headers, told)

    async def _read_body(self, reading: UpstreamResponse) -> list[bytes]:
        """The next chunks of the body, [] at its end. Raises DeadlineExceeded or StreamBroken."""
        if reading.complete:
            return reading.read_available()
        self.wait_next()
        pieces = await reading.read()
        self.stop_wait()
        return pieces

    def _forward_body(self, pieces: Sequence[bytes]) -> bool:
        """Pass the next decoded item on; returns whether more is accepted at once."""
        raw, events = self._response_reader.feed(pieces)
        if events and type(events[-1]) is StreamEnd:
            self._record_success()
            self._last_consumer = raw, events  # its reader writes it together with the end
            return False
        more = self._consumer(raw, events) if raw or events else True
        self.record_read()
        return more

    def _decode_body(self, pieces: Sequence[bytes]) -> StreamItem:
        """Decode the next bytes."""
        raw, events = self._response_reader.feed(pieces)
        if events and type(events[-1]) is StreamEnd:
            self._record_success()
        return raw, events

    def _decode_end(self) -> StreamItem:
        """Decode the end of the body; the last event is StreamEnd."""
        piece = _decode_end(self._response_reader)
        self._record_success()
        return piece

    def _record_success(self) -> None:
        self.finished = True
        self.worker.record_success()

    def _make_too_large_error(self) -> WorkerFailed:
        """The error for a response that exceeds the buffer."""
        if self._is_stream:
            return WorkerFailed(
                f"the worker sent {_MAX_BYTES_WITHOUT_CONTENT} bytes without content"
            )
        return WorkerFailed(f"the worker's response is larger than {_MAX_UNARY_BYTES} bytes")

    def _record_first_token(self) -> None:
        """Record the time to the first token, or the timeout of it.

        Not for unary text, whose time depends on the length of the text.
        """
        if not self._request.background:
            now = self._services.clock()
            self.worker.latency_average.add(now, now - self.slot.acquired_at)

    def _raise_failure(self, error: GatewayError) -> NoReturn:
        """Record the failure and raise ``error`` or its cause."""
        cause = self.get_cause(error)
        self._record_failure(cause)
        if cause is error:
            raise error
        raise cause from None

    def _record_failure(self, error: GatewayError) -> None:
        self.failure = error
        if self.accepted and self._response is not None:
            self._response.abort()  # further bytes must not be read as another response
        if isinstance(error, DeadlineExceeded):
            tells = self._is_stream or self._request.request.kind == "embedding"
            if error.phase == "first_token" and tells:
                self._record_first_token()
        elif not self.accepted or isinstance(error, StreamBroken):
            self.finished = True
        if not isinstance(error, ClientError) or isinstance(error, RateLimitExceeded):
            self._services.metrics.failures[get_error_kind(error)] += 1
        if not self._request.background:
            self.worker.record_failure(error, overloaded=self._rate_limited)


class TranslatedResponse:
    """A PassthroughReader for a response that is translated: it returns no raw bytes."""

    def __init__(self, decoder: ResponseDecoder) -> None:
        self._decoder = decoder

    def feed(self, pieces: Sequence[bytes]) -> StreamItem:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        return None, self._decoder.feed(b"".join(pieces))

    def close(self) -> StreamItem:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        return None, self._decoder.close()


def _decode_end(passage: PassthroughReader) -> StreamItem:
    """Decode the end of the body; the last event is StreamEnd."""
    raw, events = passage.close()
    if not events or type(events[-1]) is not StreamEnd:
        events = [*events, StreamEnd()]
    return raw, events


def _check_encoding(encoding: str) -> None:
    """Raise WorkerFailed for a compressed body."""
    if encoding.lower() != "identity":
        raise WorkerFailed(
            f"unsupported content-encoding of the worker's response: {encoding[:100]!r}"
        )


def _has_content(piece: StreamItem) -> bool:
    """Whether the item holds content or the end, so that the response may be passed on."""
    for event in piece[1]:
        if type(event) is TextDelta:
            if event.text or event.token_ids or event.logprobs:
                return True
        elif type(event) not in _EVENTS_WITHOUT_CONTENT:
            return True
    return False


# Headers sent to workers: the protocol's own, the request id and the trace context.

_COMMON_HEADERS: Final = ("content-type", "accept")
"""Headers of a protocol that are sent to workers and are the same for many requests."""
_PER_REQUEST_HEADERS: Final = ("req-id",)
"""Headers of a protocol that differ for each request."""
_HEADER_WORD: Final = re.compile(r"[!-~]{1,256}")
"""Printable ASCII without spaces, and not too long for a header."""
_TRACESTATE: Final = re.compile(r"[ -~]{1,512}")
_TRACE_HEADERS: Final = ("traceparent", "tracestate")


def filter_headers(
    wire: UpstreamRequest, context: RequestContext
) -> tuple[UpstreamRequest, Headers]:
    """``wire`` with the common headers only, and the headers of this request alone."""
    shared, own = _split_headers(wire.headers)
    if shared is not wire.headers:
        wire = UpstreamRequest(wire.path, wire.body, shared, wire.method)
    if _HEADER_WORD.fullmatch(context.id):
        own += (("x-request-id", context.id),)
    if context.traceparent and _HEADER_WORD.fullmatch(context.traceparent):
        own += (("traceparent", context.traceparent),)
    if context.tracestate and _TRACESTATE.fullmatch(context.tracestate):
        own += (("tracestate", context.tracestate),)
    return wire, own


@functools.lru_cache(256)
def _split_headers(headers: Headers) -> tuple[Headers, Headers]:
    """The headers that are sent: those common to requests, and those of one request."""
    shared = tuple(one for one in headers if one[0].lower() in _COMMON_HEADERS)
    if shared == headers:
        return headers, ()
    return shared, tuple(one for one in headers if one[0].lower() in _PER_REQUEST_HEADERS)


def add_trace_headers(
    work: AttemptRequest, trace: AttemptTrace, member: WorkerState
) -> AttemptRequest:
    """``work`` with the trace headers of an attempt at this worker."""
    own = [one for one in work.request_headers if one[0] not in _TRACE_HEADERS]
    return replace(work, request_headers=(*own, *trace.start_attempt(member.name)))
