"""An answer on its way to a client."""

import asyncio
from typing import Final, Protocol

from gateway.core.ports import Headers
from gateway.front.heads import head, named

_STREAMED: Final = "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
_STREAM_NAMES: Final = ("cache-control", "x-accel-buffering")
_CHUNKED: Final = "Transfer-Encoding: chunked\r\n"
_CLOSE: Final = "Connection: close\r\n"
_KEEP: Final = "Connection: keep-alive\r\n"
_LAST: Final = b"0\r\n\r\n"
_BODILESS: Final = (204, 304)


class Leaving(Protocol):
    """What may close its connections."""

    leaving: bool


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
        "_status",
        "_transport",
        "_writable",
        "closes",
        "finished",
        "started",
    )

    def __init__(
        self, transport: asyncio.Transport, owner: Leaving, *, bare: bool, http10: bool
    ) -> None:
        """``bare``: the client wants no body."""
        self.started = False
        self.finished = False
        self.closes = False
        """The connection ends with this answer."""
        self._transport = transport
        self._owner = owner
        self._bare = bare
        self._http10 = http10
        self._chunked = False
        self._head_sent = False
        self._status = 0
        self._headers: Headers = ()
        self._parts: list[bytes] = []
        self._writable: asyncio.Future[None] | None = None

    @property
    def pressure(self) -> bool:
        """See ``gateway.seam.Sink``."""
        return self._writable is not None or not self._head_sent

    def start(self, status: int, headers: Headers) -> None:
        """See ``gateway.seam.Sink``."""
        self.started = True
        self._status, self._headers = status, headers
        told = named(headers)
        self.closes = self.closes or told.closes
        self._chunked = told.chunked and not self._http10

    def write(self, data: bytes) -> None:
        """See ``gateway.seam.Sink``."""
        if self._head_sent:
            self._send(data)
        else:
            self._parts.append(data)

    def finish(self) -> None:
        """See ``gateway.seam.Sink``."""
        self.finished = True
        if not self._head_sent:
            self._whole()
        elif self._chunked:
            self._transport.write(_LAST)

    async def drain(self) -> None:
        """See ``gateway.seam.Sink``."""
        if not self._head_sent:
            self._open()
        if self._writable is not None:
            await self._writable

    def hold(self, loop: asyncio.AbstractEventLoop) -> None:
        """The client does not take what was sent as fast as it comes."""
        if self._writable is None:
            self._writable = loop.create_future()

    def resume(self) -> None:
        """It has caught up, or is gone."""
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None

    def _whole(self) -> None:
        body = b"".join(self._parts)
        if self._status in _BODILESS:
            framing, body = "", b""
        elif self._chunked:
            framing, body = _CHUNKED, self._framed(body) + _LAST
        else:
            framing = f"Content-Length: {len(body)}\r\n"
        top = head(self._status, self._headers, framing + self._connection())
        self._head_sent = True
        self._transport.write(top if self._bare else top + body)

    def _open(self) -> None:
        """Begin a stream."""
        self._chunked = not self._http10 and not self._bare
        self.closes = self.closes or self._http10
        framing = _STREAMED + (_CHUNKED if not self._http10 else "") + self._connection()
        headers = tuple(one for one in self._headers if one[0].lower() not in _STREAM_NAMES)
        top = head(self._status, headers, framing)
        self._head_sent = True
        data = b"".join(self._parts)
        self._parts.clear()
        self._transport.write(top + self._framed(data))

    def _connection(self) -> str:
        self.closes = self.closes or self._owner.leaving
        if self.closes:
            return _CLOSE
        return _KEEP if self._http10 else ""

    def _send(self, data: bytes) -> None:
        if framed := self._framed(data):
            self._transport.write(framed)

    def _framed(self, data: bytes) -> bytes:
        if self._bare or not data:
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
