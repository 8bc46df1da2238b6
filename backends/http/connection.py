"""One HTTP/1.1 connection to a worker: requests and responses, one after another.

``HttpConnection`` writes a request and feeds what arrives to httptools, whose callbacks fill the
``Http1Response`` in: first its head, then the chunks of its body. Chunks wait in a list until they
are read, or go to a consumer in the same callback, so that no task wakes up for a token. If too
many bytes wait, the connection reads no more until they are taken.

What must never happen:

- Bytes of one response in the next: a response that was not received to its end, or bytes that
  nobody expects, close the connection.
- A response that was cut off and looks complete: without a length, only an orderly close of the
  connection ends it.
- Memory without a limit: heads, trailers, interim responses and unread chunks have one.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, NamedTuple, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from msgspec import Struct

from backends.http.interfaces import DEFAULT_MAX_HEAD, MAX_HELD_BYTES, MAX_READ, BodyConsumer
from backends.write_batching import WriteBatcher
from protocols.core.errors import StreamBroken, WorkerError, WorkerFailed
from protocols.core.name_cache import NameCache

_MAX_BUFFERED_BYTES: Final = MAX_HELD_BYTES - MAX_READ
"""Buffered bytes of a response at which reading pauses; exceeded by one read at most."""
_read_buffer: Final = memoryview(bytearray(MAX_READ))
"""For the data of all connections: it is parsed before anything else is read."""
_MAX_HEADERS: Final = 256
_MAX_BYTES_WITHOUT_BODY: Final = 16 << 10
"""Bytes without a byte of body that may arrive beside headers: status lines, chunk extensions."""
_STATUS_SWITCHING_PROTOCOLS: Final = 101
_FIRST_FINAL_STATUS: Final = 200
_response_header_names: Final = NameCache[bytes, str](lambda name: name.decode("latin-1").lower())
"""Header names in lower case, by the name as it was sent."""


class ConnectionFault(NamedTuple):
    """An error that is created each time it is raised, so that it keeps no traceback alive."""

    kind: type[WorkerError]
    message: str

    def make_error(self) -> WorkerError:
        return self.kind(self.message)


_CLOSED_EARLY: Final = ConnectionFault(
    StreamBroken, "the worker closed the connection before its response"
)
RESPONSE_CUT_OFF: Final = ConnectionFault(StreamBroken, "the worker's response ended early")
NOT_HTTP: Final = ConnectionFault(WorkerFailed, "the worker's response is not HTTP")


class ResponseTransport(Protocol):
    """The connection on which a response is received."""

    loop: asyncio.AbstractEventLoop
    paused: bool
    """Whether reading is paused."""

    @property
    def is_stale(self) -> bool:
        """Whether the worker closed it while idle, before any byte of a response."""

    def resume_reading(self) -> None:
        """Resume reading; the buffered chunks were taken."""

    def abort(self) -> None:
        """Close it at once; unsent and unread data is lost."""

    def release(self) -> None:
        """Make it idle if everything is written and read; otherwise close it."""


class Http1Response(Struct, eq=False):
    """An ``UpstreamResponse``."""

    _connection: ResponseTransport
    parts: list[bytes]
    """The unread chunks of the body."""
    status: int = 0
    headers: dict[str, str] = {}
    complete: bool = False
    """Whether all of it has been received."""
    held_bytes: int = 0
    """Bytes received since the last read."""
    _consumer: BodyConsumer | None = None
    """Receives chunks as they arrive."""
    _waiter: asyncio.Future[bool] | None = None
    _fault: ConnectionFault | None = None
    _released: bool = False

    def __repr__(self) -> str:
        state = "complete" if self.complete else "failed" if self._fault else "incomplete"
        return f"<Http1Response {self.status or 'without head'}, {state}>"

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
        chunks = parts[:]
        parts.clear()
        self.held_bytes = 0
        if self._connection.paused:
            self._connection.resume_reading()
        return chunks

    async def read(self) -> list[bytes]:
        """See ``backends.http.interfaces.UpstreamResponse``."""
        while not self.parts:
            if self.complete:
                return []
            await self._wait_more()
        return self.read_available()

    async def forward_to(self, consumer: BodyConsumer) -> bool:
        """See ``backends.http.interfaces.UpstreamResponse``."""
        while True:
            if self.parts:
                if not consumer(self.read_available()):
                    return False
            elif self.complete:
                return True
            else:
                self._consumer = consumer
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
            self.complete = False  # discarded chunks must not look like the end
            self.fail()

    def release(self) -> None:
        """See ``backends.http.interfaces.UpstreamResponse``."""
        if not self._released:
            self._released = True
            self.parts = []  # the old list holds the next response's chunks
            self._connection.release()

    def _wait_more(self) -> asyncio.Future[bool]:
        """Done when something has arrived; False if the consumer accepts no more.

        Raises StreamBroken or WorkerFailed.
        """
        if self._fault is not None:
            raise self._fault.make_error()
        waiter = self._waiter = self._connection.loop.create_future()
        return waiter

    # --- called by the connection ---------------------------------------------------------------

    def fail(self, fault: ConnectionFault | None = None) -> None:
        """Fail with ``fault``, or because the connection was closed. A complete response stays."""
        if not self.complete and self._fault is None:
            self._fault = fault or (RESPONSE_CUT_OFF if self.status else _CLOSED_EARLY)
        if self.status or self._fault is None:
            self._wake_waiter()
        else:
            self._fail_headers(self._fault)

    def on_progress(self) -> None:
        """Pass new chunks to the consumer; without one, and at the end, wake the waiting task."""
        consumer = self._consumer
        if consumer is None:
            waiter = self._waiter
            if waiter is not None and self.status and not waiter.done():
                waiter.set_result(True)
            return
        try:
            more = not self.parts or consumer(self.read_available())
        except Exception as error:  # noqa: BLE001 - raised in the waiting task
            self._wake_waiter(error)
            return
        if self.complete or not more:
            self._wake_waiter(more=more)

    def _fail_headers(self, fault: ConnectionFault) -> None:
        """Wake the task that waits for the headers, with False or an error."""
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


class HttpConnection(asyncio.BufferedProtocol):
    """A connection that sends one request after the other.

    ``on_idle`` is called when it can be reused, ``on_closed`` when it is closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        write_batcher: WriteBatcher,
        on_idle: Callable[["HttpConnection"], None],
        on_closed: Callable[["HttpConnection"], None],
        max_head: int = DEFAULT_MAX_HEAD,
    ) -> None:
        self._max_head = max_head
        self._max_bytes_without_body = _MAX_BYTES_WITHOUT_BODY + max_head
        self.idle_since = 0.0
        """When it became idle, by the loop's clock."""
        self.loop = loop
        self._write_batcher = write_batcher
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        """The unread chunks of the current response's body."""
        self.on_body: Callable[[bytes], None] = self._parts.append
        """Called by httptools for each chunk: bound here, since a stream has thousands."""
        self._body_end = 0
        """The number of chunks of the complete response."""
        self._response = Http1Response(self, self._parts)
        """The response to the last request. Complete at first: nothing is expected yet."""
        self._response.complete = True
        self._parser = HttpResponseParser(self)
        self._feed_parser: Callable[[memoryview], None] = self._parser.feed_data
        self._was_reused = False
        """Whether it was idle before the last request."""
        self._has_received = False
        """Whether any byte of the current response has arrived."""
        self._keep_alive = True
        """Whether it can be reused, as far as is known."""
        self._aborted = False
        self.paused = False
        """Whether reading is paused."""
        self._bytes_without_body = 0
        """Bytes received since the last byte of body."""
        self._headers: list[tuple[bytes, bytes]] = []
        """Headers and trailers of the current response, or of an interim one, as they were sent."""
        self._header_count = 0
        """How many of them are no trailers."""
        self._malformed: ConnectionFault | None = None
        """Why no more of the connection is read."""

    def __repr__(self) -> str:
        if self._transport is None:
            return "<HttpConnection closed>"
        return f"<HttpConnection {'idle' if self._response.complete else self._response!r}>"

    @property
    def is_connected(self) -> bool:
        """Whether it is open."""
        return self._transport is not None

    @property
    def is_stale(self) -> bool:
        """See ``ResponseTransport``."""
        return self._was_reused and not self._has_received and not self._aborted

    def send(self, data: bytes) -> Http1Response:
        """Send a complete request; returns its response, not yet received."""
        self._parts.clear()
        self._has_received = False
        response = self._response = Http1Response(self, self._parts)
        if self._transport is None:
            response.fail()
        else:
            self._write_batcher.send(self._transport, data)
        return response

    def resume_reading(self) -> None:
        """See ``ResponseTransport``."""
        if self.paused and self._transport is not None:
            self.paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """See ``ResponseTransport``."""
        self._keep_alive = False
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    def release(self) -> None:
        """See ``ResponseTransport``."""
        transport = self._transport
        # An invalid response was aborted.
        reusable = self._keep_alive and self._response.complete
        if not reusable or transport is None or transport.get_write_buffer_size():
            self.abort()
            return
        self._was_reused = True
        if self.paused:
            self.resume_reading()
        self._on_idle(self)

    # --- asyncio.BufferedProtocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        del sizehint
        return _read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol. The waiting task is woken once for all chunks in it."""
        response, data = self._response, _read_buffer[:nbytes]
        if response.complete:
            self.abort()  # unexpected: it could be taken for the next response
            return
        self._has_received = True
        self._bytes_without_body += nbytes
        response.held_bytes += nbytes
        parts = self._parts
        known = len(parts)
        try:
            self._feed_parser(data)
        except HttpParserUpgrade:
            self._keep_alive = False
        except HttpParserError:
            self._malformed = self._malformed or NOT_HTTP
        if len(parts) > known:
            self._bytes_without_body = 0
        elif self._bytes_without_body > self._max_head:
            self._check_header_size()
        if self._response.complete:
            del parts[self._body_end :]  # bytes after the end of the response
        if self._malformed or self._bytes_without_body > self._max_bytes_without_body:
            self._fail_malformed(response)
        if response.held_bytes > _MAX_BUFFERED_BYTES and parts:  # else there is nothing to read
            self._pause_if_full()
        response.on_progress()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._keep_alive = False
        response = self._response
        if (
            exc is None
            and response.status
            and not self._aborted
            and not _has_explicit_end(response)
        ):
            response.complete = True  # without a length, it ends with the connection
        response.fail()
        self._on_closed(self)
        # They refer to this object: reference cycles.
        del self._parser, self._feed_parser, self._response

    # --- httptools ------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after the body."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is complete; interim responses (1xx) are ignored."""
        response, status = self._response, self._parser.get_status_code()
        headers = self._headers
        self._header_count = count = len(headers)
        if count > _MAX_HEADERS or self._bytes_without_body > self._max_head:
            self._check_header_size()
        if response.complete or self._malformed:
            return
        if status >= _FIRST_FINAL_STATUS or status == _STATUS_SWITCHING_PROTOCOLS:
            names = _response_header_names
            response.headers = {names[name]: value.decode("latin-1") for name, value in headers}
            if len(response.headers) < count:
                response.headers = _join_headers(headers)
            response.status = status
            if not self._parser.should_keep_alive():
                self._keep_alive = False

    def on_message_complete(self) -> None:
        """The end of a response, or of an interim one."""
        response = self._response
        if len(self._headers) > self._header_count:
            self._check_header_size()
        if response.status and not response.complete:
            response.complete = True
            self._body_end = len(self._parts)
            self._bytes_without_body = 0

    def on_message_begin(self) -> None:
        """A head begins: the expected one, or an unexpected one."""
        self._headers.clear()
        if self._response.complete:
            self._keep_alive = False

    # --- private --------------------------------------------------------------------------------

    def _pause_if_full(self) -> None:
        """Pause reading."""
        if not self.paused and not self._aborted and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    def _check_header_size(self) -> None:
        """Note that the headers and trailers exceed a limit, if they do."""
        size = sum(map(len, chain.from_iterable(self._headers)))
        if size > self._max_head or len(self._headers) > _MAX_HEADERS:
            self._malformed = self._make_large_head_fault()

    def _fail_malformed(self, response: Http1Response) -> None:
        """The data is not HTTP, or exceeds a limit."""
        fault = self._malformed or self._make_large_head_fault()
        is_cut = response.status and not response.complete
        response.complete = False  # the end that was parsed is not its end
        response.fail(RESPONSE_CUT_OFF if is_cut else fault)
        self.abort()

    def _make_large_head_fault(self) -> ConnectionFault:
        text = (
            f"the head of the worker's response has more than {self._max_head} bytes "
            f"(max_response_head) or {_MAX_HEADERS} headers"
        )
        return ConnectionFault(WorkerFailed, text)


def _join_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers of which one has several lines: a list of their values (RFC 9110, 5.3)."""
    joined: dict[str, dict[str, None]] = {}
    for name, value in headers:
        joined.setdefault(_response_header_names[name], {})[value.decode("latin-1")] = None
    return {name: ", ".join(values) for name, values in joined.items()}


def _has_explicit_end(response: Http1Response) -> bool:
    """Whether its headers say where the body ends."""
    encoding = response.headers.get("transfer-encoding", "").lower()
    return encoding.endswith("chunked") if encoding else "content-length" in response.headers
