"""One HTTP/1.1 connection to a worker: requests and responses, one after another."""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from backends.aio import WriteBatcher
from backends.http.interfaces import BodyConsumer
from protocols.core.errors import StreamBroken, WorkerError, WorkerFailed

# A response that is being received.


class ConnectionFault(NamedTuple):
    """What went wrong: raised anew each time, so that no error holds on to who met it."""

    kind: type[WorkerError]
    text: str

    def make_error(self) -> WorkerError:
        return self.kind(self.text)


_NO_HEADERS: Final[dict[str, str]] = {}
"""The headers of an answer that has not begun. Nobody writes into it."""
_CLOSED_EARLY: Final = ConnectionFault(
    StreamBroken, "the worker closed the connection before its response"
)
RESPONSE_CUT_OFF: Final = ConnectionFault(StreamBroken, "the worker's response ended early")
NOT_HTTP: Final = ConnectionFault(WorkerFailed, "the worker's response is not HTTP")


class ResponseTransport(Protocol):
    """The connection that an answer comes over."""

    loop: asyncio.AbstractEventLoop
    paused: bool
    """The worker is made to wait."""

    @property
    def is_stale(self) -> bool:
        """Whether it ended by itself after it had rested, before anything of an answer came."""

    def resume_reading(self) -> None:
        """What was held is taken."""

    def abort(self) -> None:
        """End it now, whatever is not yet written or read."""

    def release(self) -> None:
        """Serve again, if all that there was to write and to read is done; or else end."""


class Http1Response:
    """An answer as far as it has come: a ``Reading``."""

    __slots__ = (
        "_connection",
        "_consumer",
        "_fault",
        "_released",
        "_waiter",
        "complete",
        "headers",
        "held_bytes",
        "parts",
        "status",
    )

    def __init__(self, connection: ResponseTransport, parts: list[bytes]) -> None:
        self.status = 0
        self.headers = _NO_HEADERS
        """Others, once a head begins."""
        self.complete = False
        """All of it has come."""
        self._connection = connection
        self.parts = parts
        """What of the body came and nobody has taken yet."""
        self.held_bytes = 0
        """How many bytes came since some were taken."""
        self._consumer: BodyConsumer | None = None
        """Who takes what comes, at once."""
        self._waiter: asyncio.Future[bool] | None = None
        self._fault: ConnectionFault | None = None
        self._released = False

    def wait_headers(self) -> asyncio.Future[bool]:
        """See ``backends.http.interfaces.UpstreamResponse``."""
        waiter = self._waiter = self._connection.loop.create_future()
        if self.status:
            waiter.set_result(True)
        elif self._fault is not None:
            self._fail_headers(self._fault)
        return waiter

    def read_available(self) -> list[bytes]:
        """See ``backends.http.interfaces.UpstreamResponse``."""
        parts = self.parts
        pieces = parts[:]
        parts.clear()
        self.held_bytes = 0
        if self._connection.paused:
            self._connection.resume_reading()
        return pieces

    async def read(self) -> list[bytes]:
        """See ``backends.http.interfaces.UpstreamResponse``."""
        while not self.parts:
            if self.complete:
                return []
            await self._wait_more()
        return self.read_available()

    async def forward_to(self, take: BodyConsumer) -> bool:
        """See ``backends.http.interfaces.UpstreamResponse``."""
        while True:
            if self.parts:
                if not take(self.read_available()):
                    return False
            elif self.complete:
                return True
            else:
                self._consumer = take
                try:
                    if not await self._wait_more():
                        return False
                finally:
                    self._consumer = None

    def abort(self) -> None:
        """See ``backends.http.interfaces.UpstreamResponse``."""
        if not self._released:
            self._released = True
            self._connection.abort()
            self.parts = []
            self.complete = False  # what was thrown away must not look like the end
            self.fail()

    def release(self) -> None:
        """See ``backends.http.interfaces.UpstreamResponse``."""
        if not self._released:
            self._released = True
            self.parts = []  # what it was goes on to hold the next answer's
            self._connection.release()

    def _wait_more(self) -> asyncio.Future[bool]:
        """What is done when something has come. Raises StreamBroken or WorkerFailed.

        It is False where who listens takes no more.
        """
        if self._fault is not None:
            raise self._fault.make_error()
        waiter = self._waiter = self._connection.loop.create_future()
        return waiter

    # --- what the connection tells --------------------------------------------------------------

    def fail(self, fault: ConnectionFault | None = None) -> None:
        """No more comes, and it is not whole: the connection has ended, unless it is a fault."""
        if not self.complete and self._fault is None:
            self._fault = fault or (RESPONSE_CUT_OFF if self.status else _CLOSED_EARLY)
        if self.status or self._fault is None:
            self._wake_waiter()
        else:
            self._fail_headers(self._fault)

    def on_progress(self) -> None:
        """Something has come: who listens gets it now; else, and at the end, who waits is woken."""
        take = self._consumer
        if take is None:
            waiter = self._waiter
            if waiter is not None and self.status and not waiter.done():
                waiter.set_result(True)
            return
        try:
            more = not self.parts or take(self.read_available())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._wake_waiter(error)
            return
        if self.complete or not more:
            self._wake_waiter(more=more)

    def _fail_headers(self, fault: ConnectionFault) -> None:
        """No head comes: tell who waits for it."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        stale = self._connection.is_stale and fault.kind is StreamBroken
        self.abort()
        if stale:
            waiter.set_result(False)
        else:
            waiter.set_exception(fault.make_error())

    def _wake_waiter(self, error: Exception | None = None, *, more: bool = True) -> None:
        waiter, self._waiter = self._waiter, None
        self._consumer = None
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(more)
        else:
            waiter.set_exception(error)


_MAX_BUFFERED_BYTES: Final = 64 << 10
"""Bytes of an answer held before the worker is made to wait; one read more at most."""
_MAX_HEADER_BYTES: Final = 8190
"""Bytes of a header's name and value."""
_MAX_HEADERS: Final = 128
_MAX_BYTES_WITHOUT_BODY: Final = 64 << 10
"""Bytes that may come without one of a body among them: heads, chunk extensions, trailers."""
_STATUS_SWITCHING_PROTOCOLS: Final = 101
_FIRST_FINAL_STATUS: Final = 200


class HttpConnection(asyncio.Protocol):
    """A connection that serves one request after the other.

    ``rested`` is called with it when it may serve again, ``ended`` when it never will.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        outbox: WriteBatcher,
        rested: Callable[["HttpConnection"], None],
        ended: Callable[["HttpConnection"], None],
    ) -> None:
        self.idle_since = 0.0
        """When it began to rest, by the loop's clock."""
        self.loop = loop
        self._write_batcher = outbox
        self._on_idle = rested
        self._on_closed = ended
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        """Of the body of the answer that comes."""
        self.on_body: Callable[[bytes], None] = self._parts.append
        """A piece of the body, of which a stream has thousands: see ``httptools``."""
        self._body_end = 0
        """How many such pieces a whole answer had."""
        self._response = Http1Response(self, self._parts)
        """To the last request; there was none yet, and what nobody asked for is no part of it."""
        self._response.complete = True
        self._parser = HttpResponseParser(self)
        self._feed_parser: Callable[[bytes], None] = self._parser.feed_data
        self._was_reused = False
        """It was at rest before the last request."""
        self._keep_alive = True
        """Whether it may serve again, as far as is known."""
        self._aborted = False
        self.paused = False
        """The worker is made to wait."""
        self._bytes_without_body = 0
        """Bytes of an answer that came without one of a body among them."""
        self._header_count = 0
        """Headers of an answer, and what looks like one."""
        self._malformed = False

    @property
    def is_connected(self) -> bool:
        """Whether it is not at its end."""
        return self._transport is not None

    @property
    def is_stale(self) -> bool:
        """See ``Carrier``."""
        return self._was_reused and not self._response.held_bytes and not self._aborted

    def send(self, data: bytes) -> Http1Response:
        """Send a whole request. Nothing has come of its answer yet."""
        self._parts.clear()
        answer = self._response = Http1Response(self, self._parts)
        if self._transport is None:
            answer.fail()
        else:
            self._write_batcher.send(self._transport, data)
        return answer

    def resume_reading(self) -> None:
        """See ``Carrier``."""
        if self.paused and self._transport is not None:
            self.paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """See ``Carrier``."""
        self._keep_alive = False
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    def release(self) -> None:
        """See ``Carrier``."""
        transport = self._transport
        done = self._keep_alive and self._response.complete  # what was wrong has been cut
        if not done or transport is None or transport.get_write_buffer_size():
            self.abort()
            return
        self._was_reused = True
        if self.paused:
            self.resume_reading()
        self._on_idle(self)

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. The one who reads is woken once for all that came together."""
        answer = self._response
        if answer.complete:
            self.abort()  # nobody asked for this: what follows it could be taken for an answer
            return
        answer.held_bytes += len(data)
        parts = self._parts
        before = len(parts)
        try:
            self._feed_parser(data)
        except HttpParserUpgrade:
            self._keep_alive = False
        except HttpParserError:
            self._malformed = True
        self._bytes_without_body = (
            0 if len(parts) > before else self._bytes_without_body + len(data)
        )
        if self._response.complete:
            del parts[self._body_end :]  # nobody asked for more
        if self._malformed or self._bytes_without_body > _MAX_BYTES_WITHOUT_BODY:
            self._fail_malformed(answer)
        if answer.held_bytes > _MAX_BUFFERED_BYTES:
            self._pause_if_full()
        answer.on_progress()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._keep_alive = False
        answer = self._response
        if exc is None and answer.status and not self._aborted and not _has_explicit_end(answer):
            answer.complete = True  # its length is not told: it ends with the connection
        answer.fail()
        self._on_closed(self)
        del self._parser, self._feed_parser  # they refer to this object: a reference cycle

    # --- httptools ------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or what looks like one after the body."""
        answer = self._response
        self._header_count += 1
        if len(name) + len(value) > _MAX_HEADER_BYTES or self._header_count > _MAX_HEADERS:
            self._malformed = True
        elif not answer.status:
            answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head has come; one that only announces another is passed over."""
        answer, status = self._response, self._parser.get_status_code()
        if answer.complete or self._malformed:
            return
        if status >= _FIRST_FINAL_STATUS or status == _STATUS_SWITCHING_PROTOCOLS:
            answer.status = status
            if not self._parser.should_keep_alive():
                self._keep_alive = False

    def on_message_complete(self) -> None:
        """The end of an answer, or of what came before one."""
        answer = self._response
        if answer.status and not answer.complete:
            answer.complete = True
            self._body_end = len(self._parts)
            self._header_count = self._bytes_without_body = 0

    def on_message_begin(self) -> None:
        """A head begins: the awaited one, or one that nobody asked for."""
        if self._response.complete:
            self._keep_alive = False
        else:
            self._response.headers = {}

    # --- within ---------------------------------------------------------------------------------

    def _pause_if_full(self) -> None:
        """More has come than is to be held: make the worker wait."""
        if not self.paused and not self._aborted and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    def _fail_malformed(self, answer: Http1Response) -> None:
        """What came is not HTTP, or more of it than there can be sense in."""
        midway = answer.status and not answer.complete
        answer.complete = False  # if it told an end, that was not its end
        answer.fail(RESPONSE_CUT_OFF if midway else NOT_HTTP)
        self.abort()


def _has_explicit_end(answer: Http1Response) -> bool:
    """Whether it tells by itself where its body ends."""
    coding = answer.headers.get("transfer-encoding", "").lower()
    return coding.endswith("chunked") if coding else "content-length" in answer.headers
