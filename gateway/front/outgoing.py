"""An answer on its way to a client."""

import asyncio
from typing import Final, Protocol

from msgspec import Struct

from gateway.core.outbox import Outbox
from gateway.core.ports import Headers
from gateway.front.heads import STREAM, WHOLE, head, told
from gateway.front.incoming import Incoming

_STREAMED: Final = ("Cache-Control: no-cache", "X-Accel-Buffering: no")
_CHUNKED: Final = "Transfer-Encoding: chunked"
_CLOSE: Final = "Connection: close"
_KEEP: Final = "Connection: keep-alive"
_LAST: Final = b"0\r\n\r\n"
_BODILESS: Final = (204, 304)


class Leaving(Protocol):
    """What may close its connections."""

    leaving: bool
    outbox: Outbox
    """By which all of them are written to."""


class Outgoing(Struct, eq=False):
    """A gateway.seam.Sink over a transport.

    Of an answer in pieces, what is written before the first ``drain`` is sent with the head; with
    the end too, where that comes first. After it each ``write`` is sent as it comes.
    """

    _transport: asyncio.Transport
    _owner: Leaving
    _request: Incoming
    _bare: bool
    """The client wants no body."""
    started: bool = False
    finished: bool = False
    closes: bool = False
    """The connection ends with this answer: told with its head."""
    pressure: bool = True
    """See ``gateway.seam.Sink``."""
    _chunked: bool = False
    _head_sent: bool = False
    _status: int = 0
    _headers: Headers = ()
    _parts: list[bytes] = []
    _writable: asyncio.Future[None] | None = None

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """See ``gateway.seam.Sink``."""
        self.started = True
        lines, silent = told(headers, WHOLE)
        if status in _BODILESS:
            body = b""
        elif "transfer-encoding" in silent and not self._request.http10:
            self._chunked = True
            lines.append(_CHUNKED)
            body = self._framed(body) + _LAST
        else:
            lines.append(f"Content-Length: {len(body)}")
        if "connection" in silent:
            self.closes = True
        top = self._top(status, lines)
        self._owner.outbox.send(self._transport, top if self._bare else top + body)
        self.finished = True

    def start(self, status: int, headers: Headers) -> None:
        """See ``gateway.seam.Sink``."""
        self.started = True
        self._status = status
        self._headers = headers

    def write(self, data: bytes) -> None:
        """See ``gateway.seam.Sink``."""
        if not self._head_sent:
            self._parts.append(data)
        elif framed := self._framed(data):
            self._owner.outbox.send(self._transport, framed)

    def finish(self) -> None:
        """See ``gateway.seam.Sink``."""
        if self._head_sent:
            if self._chunked:
                self._owner.outbox.send(self._transport, _LAST)
        else:
            self._open(_LAST)
        self.finished = True

    async def drain(self) -> None:
        """See ``gateway.seam.Sink``."""
        if not self._head_sent:
            self._open()
        if self._writable is not None:
            await self._writable

    def hold(self, loop: asyncio.AbstractEventLoop) -> None:
        """The client does not take what was sent as fast as it comes."""
        self.pressure = True
        if self._writable is None:
            self._writable = loop.create_future()

    def resume(self) -> None:
        """It has caught up, or is gone."""
        self.pressure = not self._head_sent
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None

    def _open(self, last: bytes = b"") -> None:
        """Begin a stream; and end it, with ``last`` where that is told."""
        lines, silent = told(self._headers, STREAM)
        lines += _STREAMED
        http10 = self._request.http10
        if not http10:
            lines.append(_CHUNKED)
        self._chunked = not http10 and not self._bare
        self.closes = http10 or "connection" in silent
        top = self._top(self._status, lines)
        self._head_sent = True
        self.pressure = self._writable is not None
        said = [top] if self._bare else [top, *self._parts]
        if self._chunked:
            if size := sum(map(len, self._parts)):
                said[0] = b"%b%x\r\n" % (top, size)
                said.append(b"\r\n")
            said.append(last)
        self._parts.clear()
        self._owner.outbox.send(self._transport, b"".join(said))

    def _top(self, status: int, lines: list[str]) -> bytes:
        """The head, which also says whether the connection ends."""
        request = self._request
        # A body that nobody waited for is not read to its end: no other request can follow it.
        if self.closes or self._owner.leaving or not (request.keeps and request.complete):
            self.closes = True
            lines.append(_CLOSE)
        elif request.http10:
            lines.append(_KEEP)
        return head(status, lines)

    def _framed(self, data: bytes) -> bytes:
        if self._bare or not data:
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
