"""One request at one worker: what it answers, as events, and how far that has come."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Final, NoReturn

from msgspec import Struct, field

from backends.aio import DeadlineTimer
from backends.interfaces import Deadline, EventSink, StreamItem, Timeouts
from backends.pool.errand import add_bearer
from backends.pool.member import get_error_kind
from backends.pool.roster import WorkerSlot
from backends.pool.tally import PoolMetrics
from backends.pool.watch import NO_TIMEOUT, AttemptTimeouts
from backends.upstream import HttpClient, UpstreamResponse
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
