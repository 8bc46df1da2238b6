"""An answer on its way to a client."""

import asyncio
from typing import Final, Protocol

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


class Outgoing:
    """A gateway.seam.Sink over a transport.

    What is written before the first ``drain`` is sent with the head; with the end too, where that
    comes first. After it each ``write`` is sent as it comes.
    """

    __slots__ = (
        "_bare",
        "_chunked",
        "_head_sent",
        "_headers",
        "_http10",
        "_owner",
        "_parts",
        "_request",
        "_status",
        "_streams",
        "_transport",
        "_writable",
        "closes",
        "finished",
        "pressure",
        "started",
    )

    def __init__(self, transport: asyncio.Transport, owner: Leaving, request: Incoming) -> None:
        self.started = False
        self.finished = False
        self.closes = not request.keeps
        """The connection ends with this answer."""
        self.pressure = True
        """See ``gateway.seam.Sink``."""
        self._transport = transport
        self._owner = owner
        self._request = request
        self._bare = request.method == "HEAD"
        """The client wants no body."""
        self._http10 = request.http10
        self._chunked = False
        self._streams = False
        self._head_sent = False
        self._status = 0
        self._headers: Headers = ()
        self._parts: list[bytes] = []
        self._writable: asyncio.Future[None] | None = None

    def start(self, status: int, headers: Headers, *, streams: bool = False) -> None:
        """See ``gateway.seam.Sink``."""
        self.started = True
        self._streams = streams
        self._status = status
        self._headers = headers

    def write(self, data: bytes) -> None:
        """See ``gateway.seam.Sink``."""
        if not self._head_sent:
            self._parts.append(data)
        elif framed := self._framed(data):
            self._send(framed)

    def finish(self) -> None:
        """See ``gateway.seam.Sink``."""
        if self._head_sent:
            if self._chunked:
                self._send(_LAST)
        elif self._streams:
            self._open(_LAST)
        else:
            self._whole()
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

    def _whole(self) -> None:
        lines, silent = told(self._headers, WHOLE)
        body = b"".join(self._parts)
        if self._status in _BODILESS:
            body = b""
        elif "transfer-encoding" in silent and not self._http10:
            self._chunked = True
            lines.append(_CHUNKED)
            body = self._framed(body) + _LAST
        else:
            lines.append(f"Content-Length: {len(body)}")
        self.closes = self.closes or "connection" in silent
        top = self._top(lines)
        self._send(top if self._bare else top + body)

    def _open(self, last: bytes = b"") -> None:
        """Begin a stream; and end it, with ``last`` where that is told."""
        lines, silent = told(self._headers, STREAM)
        lines += _STREAMED
        if not self._http10:
            lines.append(_CHUNKED)
        self._chunked = not self._http10 and not self._bare
        self.closes = self.closes or self._http10 or "connection" in silent
        said = self._top(lines), self._framed(b"".join(self._parts)), last if self._chunked else b""
        self._parts.clear()
        self._send(b"".join(said))

    def _top(self, lines: list[str]) -> bytes:
        """The head, which counts as sent."""
        # A body that nobody waited for is not read to its end: no other request can follow it.
        self.closes = self.closes or self._owner.leaving or not self._request.complete
        if self.closes:
            lines.append(_CLOSE)
        elif self._http10:
            lines.append(_KEEP)
        made = head(self._status, lines)
        self._head_sent = True
        self.pressure = self._writable is not None
        return made

    def _send(self, data: bytes) -> None:
        self._owner.outbox.send(self._transport, data)

    def _framed(self, data: bytes) -> bytes:
        if self._bare or not data:
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
