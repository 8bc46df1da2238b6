"""One request at one worker: what it answers, as events, and how far that has come."""

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

# How long a worker may be silent.

TimeoutName = Literal["first_token", "idle", "total"]

NO_TIMEOUT: Final = math.inf


class AttemptTimeouts:
    """Looks after one worker's answer, and cuts it off when the worker is silent for too long.

    ``first`` is when the first events must be there, by the lookout's clock; ``NEVER`` where only
    the deadline says. Once they have ``begun``, what comes next has ``idle`` seconds each time. The
    deadline holds for all. Whoever waits says so (``start``, then ``wait``), and that it waits no
    more (``rest``); at the end it is taken from the lookout. What reads the answer is one, and says
    how it is ``cut``.
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
        """The first events have come."""
        self.longest_gap = 0.0
        """Seconds from one read to the next, or to ``hurry``, at most; since the first events."""
        self._last_read_at = NO_TIMEOUT
        """When the last read after the first events began, by the clock."""
        self._is_waiting = False
        self._next_check = NO_TIMEOUT
        """When it is looked at, by the clock."""
        self._expired: TimeoutName | None = None
        """The limit that cut it off."""
        self._connecting_task: asyncio.Task[Any] | None = None
        """What waits for a connection."""

    def abort_response(self) -> None:
        """Cut it off, if there is anything yet."""

    async def wait_response(
        self, opening: Coroutine[Any, Any, UpstreamResponse]
    ) -> UpstreamResponse:
        """The answer whose head ``opening`` waits for. Raises DeadlineExceeded."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        cancelled = task.cancelling()
        self._connecting_task = task
        try:
            if self._expired is not None:  # just when a connection that had rested ended
                raise _make_deadline_error(self._expired)
            self.wait_next()
            return await opening
        except asyncio.CancelledError:
            # Unless somebody else wants it to end, too.
            if self._expired is not None and task.uncancel() <= cancelled:
                raise _make_deadline_error(self._expired) from None
            raise
        finally:
            self._connecting_task = None
            opening.close()

    def start_wait(self, now: float) -> None:
        """Have it cut off when its first bytes are late. Raises DeadlineExceeded."""
        due, total = self._first_due, self._deadline.expires_at
        if total <= now:
            raise _make_deadline_error("total")
        if due > total:  # noqa: PLR1730 - it would be a call for each request
            due = total
        self._is_waiting = True
        self._next_check = due
        self._deadline_timer.add(self, due)

    def wait_next(self) -> None:
        """Have it cut off when the next bytes are late. Raises DeadlineExceeded."""
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
        """Nobody waits."""
        self._is_waiting = False

    def record_read(self) -> float:
        """More has come of an answer that had begun, and more is waited for; gives the time."""
        now = self._deadline_timer.clock()
        if now - self._last_read_at > self.longest_gap:  # noqa: PLR1730 - it would be a call for each read
            self.longest_gap = now - self._last_read_at
        self._last_read_at = now
        return now

    def on_deadline(self, now: float) -> None:
        """Cut it off if it is late by ``now``."""
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
        """Wait for its first events no longer, whatever time they had."""
        self._expire("first_token")

    def set_drain_deadline(self, seconds: float) -> None:
        """Whatever is still to be read must come within ``seconds``."""
        now = self.record_read() if self.has_started else self._deadline_timer.clock()
        self.has_started = False
        self._first_due = now + seconds

    def get_cause(self, error: GatewayError) -> GatewayError:
        """What was behind ``error``: where a limit ran out, that broke the answer."""
        if self._expired is None or not isinstance(error, StreamBroken):
            return error
        return _make_deadline_error(self._expired)

    def _get_next_limit(self) -> tuple[float, TimeoutName]:
        """The next limit, by the clock, and which it is."""
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
    "first_token": "the worker took too long to begin its answer",
    "idle": "the worker fell silent in the middle of its answer",
    "total": "the request's time is up",
}


ErrorReader = Callable[[int, Mapping[str, str], bytes], GatewayError]
"""See ``protocols.core.interfaces.UpstreamAdapter.read_error``."""

_MAX_ERROR_BYTES: Final = 64 << 10
"""As much of an error's body as is read; its shape is known from less."""
_MAX_UNARY_BYTES: Final = 256 << 20
"""The largest answer in one piece. A stream has no such limit: it does not pile up."""
_MAX_BYTES_WITHOUT_CONTENT: Final = 16 << 20
"""How much of a stream may come before it says anything: that much is kept back."""
_BODY_END_SECONDS: Final = 1.0
"""How long the rest of a body may take when the answer, or its failure, is known already."""
_STATUS_OK: Final = 200
_NO_OUTPUT: Final[StreamItem] = None, ()
_EVENTS_WITHOUT_CONTENT: Final = frozenset({StreamStart, ResponseMetadata, Timing, Usage})
"""Events that tell nothing of an answer's content."""


class AttemptRequest(Struct, frozen=True):
    """One request on its way. ``wire`` has the headers that many have in common."""

    request: Request
    upstream_request: UpstreamRequest
    request_headers: Headers
    """The headers of this request alone, but for the worker's key."""
    make_response_reader: Callable[[], PassthroughReader]
    """Makes what reads the answer, a new one for each attempt."""
    read_error: ErrorReader
    deadline: Deadline
    background: bool = False
    """Nobody waits for it, and what comes of it is no sign of how well a worker is."""


class AttemptServices(Struct, frozen=True):
    """What every attempt of a pool needs."""

    http_client: HttpClient
    timeouts: Timeouts
    clock: Clock
    deadline_timer: DeadlineTimer
    metrics: PoolMetrics = field(default_factory=PoolMetrics)


class Attempt(AttemptTimeouts):
    """One request at one worker, which is told to that worker's health.

    ``begin``, then ``more`` until it is ``over``, then ``end`` unless the ``whole`` of it is there;
    and ``close`` whatever happened, which closes the worker's connection at once where the answer
    is not over. ``accepted``: the worker began an answer that looked good. ``failure`` is why it
    gave no whole one.
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
        # The first token of an answer in one piece is its last: only the deadline bounds it.
        first = place.acquired_at + timeouts.first_token if streams else NO_TIMEOUT
        AttemptTimeouts.__init__(self, means.deadline_timer, work.deadline, first, timeouts.idle)
        self._response: UpstreamResponse | None = None
        self._rate_limited = False
        self.finished = False
        """All is told: the last event was Done, or an error. Else the worker may be at work."""
        self.complete = False
        """Nothing more of an answer in one piece is to be waited for."""
        self.accepted = False
        self.failure: GatewayError | None = None

    async def begin(self) -> list[StreamItem]:
        """Ask, and wait for the first pieces of an answer.

        A stream begins with its first content, an answer in one piece when the whole of it is
        there. Until then another worker can make up for it. Raises DeadlineExceeded, WorkerError,
        and what the dialect reads in a worker's error.
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
        """See Watch."""
        if self._response is not None:
            self._response.abort()

    def _read_unary(self, pieces: Sequence[bytes]) -> list[StreamItem]:
        """What an answer in one piece means whose body this is."""
        if sum(map(len, pieces)) > _MAX_UNARY_BYTES:
            raise self._make_too_large_error()
        passage = self._response_reader
        held: list[StreamItem] = []  # not list[Piece](), which costs a hundred times as much
        raw, events = passage.feed(pieces) if pieces else _NO_OUTPUT
        if raw or events:
            held.append((raw, events))
        if not events or type(events[-1]) is not StreamEnd:
            held.append(_decode_end(passage))
        self.finished = True
        self.worker.record_success()
        return held

    async def _read_beginning(self, reading: UpstreamResponse) -> list[StreamItem]:
        """What the beginning of an answer means; that of one in one piece is the whole of it."""
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
        """The next piece; its last event is Done if it is the last. Raises as ``begin`` does.

        With ``take``, that gets the pieces as they come, and what is returned is the last one; or
        an empty one where it takes no more at once.
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
        """Wait a little for the body's end, for the connection's sake: the answer has been told."""
        reading = self._response
        assert reading is not None  # noqa: S101 - it has begun
        self.set_drain_deadline(_BODY_END_SECONDS)
        if self._is_stream and self.longest_gap:
            self._services.metrics.stream_gaps.add(self.longest_gap)
        with suppress(GatewayError):
            while not reading.complete:
                await self._read_body(reading)

    def close(self) -> None:
        """Nobody waits any more."""
        self._deadline_timer.remove(self)
        if self._response is not None:
            self._response.release()

    async def _send_on_new_connection(self, own: Headers) -> UpstreamResponse:
        """Send the request over a new connection, and wait for the head of its answer."""
        means, url = self._services, self.worker.config.url
        opening = means.http_client.send_on_new_connection(
            url, self._request.upstream_request, means.timeouts.connect, own
        )
        reading = self._response = await self.wait_response(opening)
        return reading

    async def _read_error(self, reading: UpstreamResponse) -> GatewayError:
        """What an answer of another status than 200 means."""
        status, headers = reading.status, reading.headers
        if status < HTTPStatus.BAD_REQUEST:
            return WorkerFailed(f"the worker answered {status}", status=status)
        self.set_drain_deadline(_BODY_END_SECONDS)
        body = bytearray()
        with suppress(GatewayError):  # what has come says enough
            while len(body) < _MAX_ERROR_BYTES and (pieces := await self._read_body(reading)):
                body += b"".join(pieces)
        told = bytes(body[:_MAX_ERROR_BYTES])
        self._rate_limited = "retry-after" in headers or b"overloaded" in told.lower()
        return self._request.read_error(status, headers, told)

    async def _read_body(self, reading: UpstreamResponse) -> list[bytes]:
        """The next of the body, [] at its end. Raises DeadlineExceeded or StreamBroken."""
        if reading.complete:
            return reading.read_available()
        self.wait_next()
        pieces = await reading.read()
        self.stop_wait()
        return pieces

    def _forward_body(self, pieces: Sequence[bytes]) -> bool:
        """Pass on what the next bytes mean; whether more is taken at once."""
        raw, events = self._response_reader.feed(pieces)
        if events and type(events[-1]) is StreamEnd:
            self._record_success()
            self._last_consumer = raw, events  # its reader writes it together with the end
            return False
        more = self._consumer(raw, events) if raw or events else True
        self.record_read()
        return more

    def _decode_body(self, pieces: Sequence[bytes]) -> StreamItem:
        """What the next bytes mean."""
        raw, events = self._response_reader.feed(pieces)
        if events and type(events[-1]) is StreamEnd:
            self._record_success()
        return raw, events

    def _decode_end(self) -> StreamItem:
        """What the body's end means; the last event is Done."""
        piece = _decode_end(self._response_reader)
        self._record_success()
        return piece

    def _record_success(self) -> None:
        self.finished = True
        self.worker.record_success()

    def _make_too_large_error(self) -> WorkerFailed:
        """Too much came of an answer before any of it was passed on."""
        if self._is_stream:
            return WorkerFailed(
                f"the worker sent {_MAX_BYTES_WITHOUT_CONTENT} bytes and said nothing"
            )
        return WorkerFailed(f"the worker's answer is larger than {_MAX_UNARY_BYTES} bytes")

    def _record_first_token(self) -> None:
        """The first token came, or its time is over.

        Of a text in one piece that says more about the text than about the worker.
        """
        if not self._request.background:
            now = self._services.clock()
            self.worker.latency_average.add(now, now - self.slot.acquired_at)

    def _raise_failure(self, error: GatewayError) -> NoReturn:
        """Raise ``error``, or what was behind it, having told of it."""
        cause = self.get_cause(error)
        self._record_failure(cause)
        if cause is error:
            raise error
        raise cause from None

    def _record_failure(self, error: GatewayError) -> None:
        self.failure = error
        if self.accepted and self._response is not None:
            self._response.abort()  # what else comes there must not be taken for another answer
        if isinstance(error, DeadlineExceeded):
            tells = self._is_stream or self._request.request.kind == "embedding"
            if error.phase == "first_token" and tells:
                self._record_first_token()
        elif not self.accepted or isinstance(error, StreamBroken):
            self.finished = True
        if not isinstance(error, ClientError) or isinstance(error, RateLimitExceeded):
            self._services.metrics.failures[get_error_kind(error)] += 1
        if not self._request.background:
            self.worker.record_failure(error, pushed_back=self._rate_limited)


class TranslatedResponse:
    """A Passage for an answer of which nothing is passed on as it is."""

    def __init__(self, decoder: ResponseDecoder) -> None:
        self._decoder = decoder

    def feed(self, pieces: Sequence[bytes]) -> StreamItem:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        return None, self._decoder.feed(b"".join(pieces))

    def close(self) -> StreamItem:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        return None, self._decoder.close()


def _decode_end(passage: PassthroughReader) -> StreamItem:
    """What the body's end means; the last event is Done."""
    raw, events = passage.close()
    if not events or type(events[-1]) is not StreamEnd:
        events = [*events, StreamEnd()]
    return raw, events


def _check_encoding(encoding: str) -> None:
    """Raises WorkerFailed where a body's encoding makes other bytes of it."""
    if encoding.lower() != "identity":
        raise WorkerFailed("the worker sent an encoded body, which was not asked for")


def _has_content(piece: StreamItem) -> bool:
    """Whether it, and what came before it, may be passed on: it tells of content, or the end."""
    for event in piece[1]:
        if type(event) is TextDelta:
            if event.text or event.token_ids or event.logprobs:
                return True
        elif type(event) not in _EVENTS_WITHOUT_CONTENT:
            return True
    return False


# What a worker sees in the headers of a request: the dialect's, the exchange's id, its trace.

_COMMON_HEADERS: Final = ("content-type", "accept")
"""The headers of a dialect that a worker sees, and that many requests have in common."""
_PER_REQUEST_HEADERS: Final = ("req-id",)
"""The same, but each of one request."""
_HEADER_WORD: Final = re.compile(r"[!-~]{1,256}")
"""Printable ASCII without spaces, and not too long for a header."""
_TRACESTATE: Final = re.compile(r"[ -~]{1,512}")
_TRACE_HEADERS: Final = ("traceparent", "tracestate")


def filter_headers(
    wire: UpstreamRequest, context: RequestContext
) -> tuple[UpstreamRequest, Headers]:
    """``wire`` with no header that a worker need not see, and the headers of this request alone."""
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
    """Those that a worker sees: what requests have in common, and what is each one's own."""
    shared = tuple(one for one in headers if one[0].lower() in _COMMON_HEADERS)
    if shared == headers:
        return headers, ()
    return shared, tuple(one for one in headers if one[0].lower() in _PER_REQUEST_HEADERS)


def add_trace_headers(
    work: AttemptRequest, trace: AttemptTrace, member: WorkerState
) -> AttemptRequest:
    """``work`` for one worker, which is told of the trace."""
    own = [one for one in work.request_headers if one[0] not in _TRACE_HEADERS]
    return replace(work, request_headers=(*own, *trace.start_attempt(member.name)))
