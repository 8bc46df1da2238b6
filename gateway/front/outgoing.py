"""An answer on its way to a client."""

import asyncio
from typing import Final, Protocol

from gateway.core.ports import Headers
from gateway.front.heads import filled, head, named

_STREAMED: Final = "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
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
        "_http10",
        "_named",
        "_owner",
        "_parts",
        "_status",
        "_transport",
        "_values",
        "_writable",
        "closes",
        "finished",
        "pressure",
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
        self.pressure = True
        """See ``gateway.seam.Sink``."""
        self._transport = transport
        self._owner = owner
        self._bare = bare
        self._http10 = http10
        self._chunked = False
        self._head_sent = False
        self._status = 0
        self._named = named(())
        self._values: tuple[str, ...] = ()
        self._parts: list[bytes] = []
        self._writable: asyncio.Future[None] | None = None

    def start(self, status: int, headers: Headers) -> None:
        """See ``gateway.seam.Sink``."""
        self.started = True
        self._status = status
        names, self._values = zip(*headers, strict=True) if headers else ((), ())
        self._named = told = named(names)
        self.closes = self.closes or told.closes
        self._chunked = told.chunked and not self._http10

    def write(self, data: bytes) -> None:
        """See ``gateway.seam.Sink``."""
        if not self._head_sent:
            self._parts.append(data)
        elif framed := self._framed(data):
            self._transport.write(framed)

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
        body = b"".join(self._parts)
        if self._status in _BODILESS:
            framing, body = "", b""
        elif self._chunked:
            framing, body = _CHUNKED, self._framed(body) + _LAST
        else:
            framing = f"Content-Length: {len(body)}\r\n"
        top = self._top(self._named.whole, framing)
        self._transport.write(top if self._bare else top + body)

    def _open(self) -> None:
        """Begin a stream."""
        self._chunked = not self._http10 and not self._bare
        self.closes = self.closes or self._http10
        framing = _STREAMED + ("" if self._http10 else _CHUNKED)
        top = self._top(self._named.stream, framing)
        data = b"".join(self._parts)
        self._parts.clear()
        self._transport.write(top + self._framed(data))

    def _top(self, form: str, framing: str) -> bytes:
        """The head, which counts as sent. ``form`` is that of the answer's own headers."""
        self.closes = self.closes or self._owner.leaving
        if self.closes:
            framing += _CLOSE
        elif self._http10:
            framing += _KEEP
        made = head(self._status, filled(form, self._values), framing)
        self._head_sent = True
        self.pressure = self._writable is not None
        return made

    def _framed(self, data: bytes) -> bytes:
        if self._bare or not data:
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
