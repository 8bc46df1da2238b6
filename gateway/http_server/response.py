"""An answer on its way to a client."""

import asyncio
import functools
import http
import time
from collections.abc import Sequence
from email.utils import formatdate
from typing import Final, Protocol

from msgspec import Struct

from backends.aio import WriteBatcher
from gateway.http_server.parser import IncomingRequest
from protocols.core.interfaces import Headers

# The head of an answer, as bytes. Pure, but for the date.

_LISTENER_HEADERS: Final = frozenset(
    {"connection", "content-length", "date", "server", "transfer-encoding"}
)
"""What the front says itself, whatever the answer has."""
_STREAM_HEADERS: Final = frozenset({"cache-control", "x-accel-buffering"})
"""What it says itself of a stream, too."""
_MAX_CACHED_NAMES: Final = 1024
"""Names that are remembered, before all of them are forgotten."""


class HeaderPrefixCache(dict[str, str]):
    """What the line of a header begins with, by its name: "" where the front says it itself."""

    def __init__(self, ours: frozenset[str]) -> None:
        super().__init__()
        self._omitted = ours

    def __missing__(self, name: str) -> str:
        if not name.isprintable():
            raise ValueError("a header's name holds what none can")
        start = "" if name.lower() in self._omitted else f"{name}: "
        if len(self) >= _MAX_CACHED_NAMES:
            self.clear()
        self[name] = start
        return start


UNARY_PREFIXES: Final = HeaderPrefixCache(_LISTENER_HEADERS)
"""In an answer that is sent as a whole."""
STREAM_PREFIXES: Final = HeaderPrefixCache(_LISTENER_HEADERS | _STREAM_HEADERS)


def render_headers(
    headers: Headers, starts: HeaderPrefixCache
) -> tuple[list[str], tuple[str, ...]]:
    """The lines of an answer's own headers, and the names, in lower case, that have none.

    Raises ValueError for a header that would be two.
    """
    lines: list[str] = []
    silent: tuple[str, ...] = ()
    for name, value in headers:
        if start := starts[name]:
            lines.append(start + value)
        else:
            silent += (name.lower(),)
    said = "".join(lines)
    if "\n" in said or "\r" in said or "\0" in said:
        raise ValueError("a header of the answer holds a line's end")
    return lines, silent


def render_head(status: int, lines: Sequence[str]) -> bytes:
    """The status line, these lines, and what is said of every answer."""
    said = (_render_status_line(status), *lines, _render_date(int(time.monotonic())))
    return "\r\n".join(said).encode("utf-8", "surrogateescape")


@functools.cache
def _render_status_line(status: int) -> str:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\nServer: interlingua"


@functools.lru_cache(maxsize=1)
def _render_date(second: int) -> str:
    """Made anew each second; with the empty line that ends a head."""
    del second
    return f"Date: {formatdate(usegmt=True)}\r\n\r\n"


_STREAM_HEADER_LINES: Final = ("Cache-Control: no-cache", "X-Accel-Buffering: no")
_CHUNKED_LINE: Final = "Transfer-Encoding: chunked"
_CLOSE_LINE: Final = "Connection: close"
_KEEP_ALIVE_LINE: Final = "Connection: keep-alive"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_BODILESS_STATUSES: Final = (204, 304)


class ResponseOwner(Protocol):
    """What may close its connections."""

    is_draining: bool
    write_batcher: WriteBatcher
    """By which all of them are written to."""


class Http1ResponseWriter(Struct, eq=False):
    """A gateway.pipeline.http.ResponseWriter over a transport.

    Of an answer in pieces, what is written before the first ``drain`` is sent with the head; with
    the end too, where that comes first. After it each ``write`` is sent as it comes.
    """

    _transport: asyncio.Transport
    _owner: ResponseOwner
    _request: IncomingRequest
    _is_head_only: bool
    """The client wants no body."""
    started: bool = False
    finished: bool = False
    closes_connection: bool = False
    """The connection ends with this answer: told with its head."""
    needs_drain: bool = True
    """See ``gateway.pipeline.http.ResponseWriter``."""
    _is_chunked: bool = False
    _head_sent: bool = False
    _status: int = 0
    _headers: Headers = ()
    _buffer: list[bytes] = []
    _writable: asyncio.Future[None] | None = None

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """See ``gateway.pipeline.http.ResponseWriter``."""
        self.started = True
        lines, silent = render_headers(headers, UNARY_PREFIXES)
        if status in _BODILESS_STATUSES:
            body = b""
        elif "transfer-encoding" in silent and not self._request.is_http10:
            self._is_chunked = True
            lines.append(_CHUNKED_LINE)
            body = self._frame_chunk(body) + _LAST_CHUNK
        else:
            lines.append(f"Content-Length: {len(body)}")
        if "connection" in silent:
            self.closes_connection = True
        top = self._build_head(status, lines)
        self._owner.write_batcher.send(self._transport, top if self._is_head_only else top + body)
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
        if self._writable is not None:
            await self._writable

    def pause(self, loop: asyncio.AbstractEventLoop) -> None:
        """The client does not take what was sent as fast as it comes."""
        self.needs_drain = True
        if self._writable is None:
            self._writable = loop.create_future()

    def resume(self) -> None:
        """It has caught up, or is gone."""
        self.needs_drain = not self._head_sent
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None

    def _send_head(self, last: bytes = b"") -> None:
        """Begin a stream; and end it, with ``last`` where that is told."""
        lines, silent = render_headers(self._headers, STREAM_PREFIXES)
        lines += _STREAM_HEADER_LINES
        http10 = self._request.is_http10
        if not http10:
            lines.append(_CHUNKED_LINE)
        self._is_chunked = not http10 and not self._is_head_only
        self.closes_connection = http10 or "connection" in silent
        top = self._build_head(self._status, lines)
        self._head_sent = True
        self.needs_drain = self._writable is not None
        said = [top] if self._is_head_only else [top, *self._buffer]
        if self._is_chunked:
            if size := sum(map(len, self._buffer)):
                said[0] = b"%b%x\r\n" % (top, size)
                said.append(b"\r\n")
            said.append(last)
        self._buffer.clear()
        self._owner.write_batcher.send(self._transport, b"".join(said))

    def _build_head(self, status: int, lines: list[str]) -> bytes:
        """The head, which also says whether the connection ends."""
        request = self._request
        # A body that nobody waited for is not read to its end: no other request can follow it.
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
