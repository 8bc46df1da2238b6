"""HTTP/1.1 responses: headers, chunked bodies and the response writer."""

import asyncio
import functools
import http
import time
from collections.abc import Sequence
from email.utils import formatdate
from typing import Final, Protocol

from msgspec import Struct

from backends.write_batching import WriteBatcher
from gateway.http_server.parser import IncomingRequest
from gateway.http_server.turn_slices import TurnGate
from protocols.core.interfaces import Headers
from protocols.core.name_cache import NameCache

# Response heads. Pure, except for the date.

_LISTENER_HEADERS: Final = frozenset(
    {"connection", "content-length", "date", "server", "transfer-encoding"}
)
"""Headers that the server sets itself."""
_STREAM_HEADERS: Final = frozenset({"cache-control", "x-accel-buffering"})
"""Headers that the server also sets itself for streams."""


class HeaderPrefixCache(NameCache[str, str]):
    """Line prefixes by header name; "" for headers that the server sets itself."""

    def __init__(self, omitted: frozenset[str]) -> None:
        def build_prefix(name: str) -> str:
            if not name.isprintable():
                raise ValueError("a header name has invalid characters")
            return "" if name.lower() in omitted else f"{name}: "

        super().__init__(build_prefix)


UNARY_PREFIXES: Final = HeaderPrefixCache(_LISTENER_HEADERS)
"""For responses that are not streamed."""
STREAM_PREFIXES: Final = HeaderPrefixCache(_LISTENER_HEADERS | _STREAM_HEADERS)


def render_headers(
    headers: Headers, prefixes: HeaderPrefixCache
) -> tuple[list[str], tuple[str, ...]]:
    """Render headers; returns the lines and the lower-case names of omitted headers.

    Raises ValueError for header values with line breaks or NUL.
    """
    lines: list[str] = []
    omitted_names: tuple[str, ...] = ()
    for name, value in headers:
        if start := prefixes[name]:
            lines.append(start + value)
        else:
            omitted_names += (name.lower(),)
    parts = "".join(lines)
    if "\n" in parts or "\r" in parts or "\0" in parts:
        raise ValueError("a response header contains a line break or NUL")
    return lines, omitted_names


def render_head(status: int, lines: Sequence[str]) -> bytes:
    """Render the status line, these lines and the common headers."""
    parts = (_render_status_line(status), *lines, _render_date(int(time.monotonic())))
    return "\r\n".join(parts).encode("utf-8", "surrogateescape")


@functools.cache
def _render_status_line(status: int) -> str:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\nServer: interlingua"


@functools.lru_cache(maxsize=1)
def _render_date(second: int) -> str:
    """The Date line and the end of the head, cached per second."""
    del second
    return f"Date: {formatdate(usegmt=True)}\r\n\r\n"


_STREAM_HEADER_LINES: Final = ("Cache-Control: no-cache", "X-Accel-Buffering: no")
_CHUNKED_LINE: Final = "Transfer-Encoding: chunked"
_CLOSE_LINE: Final = "Connection: close"
_KEEP_ALIVE_LINE: Final = "Connection: keep-alive"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_LARGE_BODY: Final = 256 << 10
"""The size from which a body is written apart from its head, as joining them would copy it."""
WRITE_HIGH_WATER: Final = 16 << 10
"""Bytes in the write buffer before writing pauses."""
_BODILESS_STATUSES: Final = (204, 304)


class ResponseOwner(Protocol):
    """The listener that owns the connection."""

    is_draining: bool
    write_batcher: WriteBatcher
    """Batches the writes of all connections."""
    stream_turns: TurnGate
    """Lets streams go on that are as fast as their clients read."""


class Http1ResponseWriter(Struct, eq=False):
    """A ``gateway.pipeline.http.ResponseWriter`` over a transport.

    A stream's head is sent at the first ``drain`` or ``flush``, or at ``finish``, together with the
    data written before. Later writes are sent immediately.
    """

    _transport: asyncio.Transport
    _owner: ResponseOwner
    _request: IncomingRequest
    _is_head_only: bool
    """A HEAD request: no body is sent."""
    started: bool = False
    finished: bool = False
    closes_connection: bool = False
    """Whether the connection closes after this response; announced in its head."""
    needs_drain: bool = True
    """See ``gateway.pipeline.http.ResponseWriter``."""
    _is_chunked: bool = False
    _head_sent: bool = False
    _status: int = 0
    _headers: Headers = ()
    _buffer: list[bytes] = []
    _writable: asyncio.Future[None] | None = None
    _undrained: int = 0
    """Bytes written since the last ``drain``. The transport learns of them after the loop's turn,
    in which a fast worker may send many times as much as the transport takes."""

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """See ``gateway.pipeline.http.ResponseWriter``."""
        self.started = True
        lines, omitted_names = render_headers(headers, UNARY_PREFIXES)
        if omitted_names:
            self.closes_connection = "connection" in omitted_names
            self._is_chunked = "transfer-encoding" in omitted_names and not self._request.is_http10
        if status in _BODILESS_STATUSES:
            body = b""
        elif self._is_chunked:
            lines.append(_CHUNKED_LINE)
            body = self._frame_chunk(body) + _LAST_CHUNK
        else:
            lines.append(f"Content-Length: {len(body)}")
        head = self._build_head(status, lines)
        if self._is_head_only:
            body = b""
        send, transport = self._owner.write_batcher.send, self._transport
        if len(body) < _LARGE_BODY:
            send(transport, head + body)
        else:  # it is not copied
            send(transport, head)
            send(transport, body)
        self.finished = True

    def start(self, status: int, headers: Headers) -> None:
        """See ``gateway.pipeline.http.ResponseWriter``."""
        self.started = True
        self._status = status
        self._headers = headers

    def write(self, data: bytes) -> None:
        """See ``gateway.pipeline.http.ResponseWriter``."""
        if not self._head_sent:
            self._buffer.append(data)
        elif framed := self._frame_chunk(data):
            self._owner.write_batcher.send(self._transport, framed)
            self._undrained += len(framed)
            if self._undrained > WRITE_HIGH_WATER:
                self.needs_drain = True

    def flush(self) -> None:
        """See ``gateway.pipeline.http.ResponseWriter``."""
        if not self._head_sent:
            self._send_head()

    def finish(self) -> None:
        """See ``gateway.pipeline.http.ResponseWriter``."""
        if self._head_sent:
            if self._is_chunked:
                self._owner.write_batcher.send(self._transport, _LAST_CHUNK)
        else:
            self._send_head(_LAST_CHUNK)
        self.finished = True

    async def drain(self) -> None:
        """See ``gateway.pipeline.http.ResponseWriter``."""
        if not self._head_sent:
            self._send_head()
        elif self._undrained > WRITE_HIGH_WATER:
            self._owner.write_batcher.flush()
            await self._owner.stream_turns.wait()  # the transport may say that it takes no more
        self._undrained = 0
        if self._writable is not None:
            await self._writable
            await self._owner.stream_turns.wait()  # many clients may read on, or leave, at once
        self.needs_drain = False

    def pause(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note that the write buffer is full."""
        self.needs_drain = True
        if self._writable is None:
            self._writable = loop.create_future()

    def resume(self) -> None:
        """Note that the client has caught up or is gone."""
        self.needs_drain = not self._head_sent
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None

    def _send_head(self, last: bytes = b"") -> None:
        """Send the head and the buffered data, followed by ``last``."""
        lines, omitted_names = render_headers(self._headers, STREAM_PREFIXES)
        lines += _STREAM_HEADER_LINES
        http10 = self._request.is_http10
        if not http10:
            lines.append(_CHUNKED_LINE)
        self._is_chunked = not http10 and not self._is_head_only
        self.closes_connection = http10 or "connection" in omitted_names
        head = self._build_head(self._status, lines)
        self._head_sent = True
        self.needs_drain = self._writable is not None
        parts = [head] if self._is_head_only else [head, *self._buffer]
        if self._is_chunked:
            if size := sum(map(len, self._buffer)):
                parts[0] = b"%b%x\r\n" % (head, size)
                parts.append(b"\r\n")
            parts.append(last)
        self._buffer.clear()
        self._owner.write_batcher.send(self._transport, b"".join(parts))

    def _build_head(self, status: int, lines: list[str]) -> bytes:
        """Render the head, with the Connection header."""
        request = self._request
        # A request body that is not read to its end leaves no room for another request.
        if (
            self.closes_connection
            or self._owner.is_draining
            or not (request.keep_alive and request.is_complete)
        ):
            self.closes_connection = True
            lines.append(_CLOSE_LINE)
        elif request.is_http10:
            lines.append(_KEEP_ALIVE_LINE)
        return render_head(status, lines)

    def _frame_chunk(self, data: bytes) -> bytes:
        if self._is_head_only or not data:
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data
