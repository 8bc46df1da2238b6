"""An answer on its way to a client."""

import asyncio
from typing import Final, Protocol

from msgspec import Struct

from backends.aio import WriteBatcher
from gateway.front.heads import STREAM_PREFIXES, UNARY_PREFIXES, render_head, render_headers
from gateway.front.incoming import IncomingRequest
from protocols.core.interfaces import Headers

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
    """A gateway.seam.ResponseWriter over a transport.

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
    """See ``gateway.seam.ResponseWriter``."""
    _is_chunked: bool = False
    _head_sent: bool = False
    _status: int = 0
    _headers: Headers = ()
    _buffer: list[bytes] = []
    _writable: asyncio.Future[None] | None = None

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """See ``gateway.seam.ResponseWriter``."""
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
        """See ``gateway.seam.ResponseWriter``."""
        self.started = True
        self._status = status
        self._headers = headers

    def write(self, data: bytes) -> None:
        """See ``gateway.seam.ResponseWriter``."""
        if not self._head_sent:
            self._buffer.append(data)
        elif framed := self._frame_chunk(data):
            self._owner.write_batcher.send(self._transport, framed)

    def finish(self) -> None:
        """See ``gateway.seam.ResponseWriter``."""
        if self._head_sent:
            if self._is_chunked:
                self._owner.write_batcher.send(self._transport, _LAST_CHUNK)
        else:
            self._send_head(_LAST_CHUNK)
        self.finished = True

    async def drain(self) -> None:
        """See ``gateway.seam.ResponseWriter``."""
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
