"""One connection from a client: its requests, served one after the other."""

import asyncio
from collections import Counter, deque
from typing import Final, Literal, Protocol, cast

from gateway.core.outbox import Outbox
from gateway.front import Serve
from gateway.front.heads import head
from gateway.front.incoming import Incoming
from gateway.front.limits import Limits
from gateway.front.outgoing import Outgoing
from gateway.front.reader import Reader, Refused

_QUEUED: Final = 8
"""Requests that may wait behind another before no more is read."""
_WRITE_HIGH: Final = 64 << 10
"""Bytes that a client has not taken before writing waits."""


State = Literal["head", "body", "answer", "ending", "lingering"]
"""What a connection waits for: a request, the rest of its body, its answer, the client to take the
end of that, or the client to read what refuses it."""


class Owner(Protocol):
    """Whose connections they are."""

    serve: Serve
    leaving: bool
    limits: Limits
    outbox: Outbox
    now: float
    """By the loop's clock, as of the last look at who takes too long."""
    refused: Counter[int]
    """What could not be read as a request, by the status that says so."""

    def opened(self, connection: "Connection") -> bool:
        """Whether there is room for one more."""

    def closed(self, connection: "Connection") -> None:
        """It is over."""

    def began(self, connection: "Connection") -> None:
        """A request of this connection is served."""

    def ended(self, connection: "Connection") -> None:
        """It is over."""


class Connection(asyncio.Protocol):
    """Reads requests and serves them in their order. Ends when its client does."""

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._limits = owner.limits
        self._state: State = "head"
        self.peer = ""
        """The client's address."""
        self._since = owner.now
        """When what it waits for last went on, by the owner's clock."""
        self._left = 0
        """Bytes that the client had not taken when it was last looked at."""
        self._transport: asyncio.Transport | None = None
        self._reader = Reader(owner.limits.header, loop, self._take, self._go_on)
        self._queue: deque[Incoming | Refused] = deque()
        self._sink: Outgoing | None = None
        self._task: asyncio.Task[None] | None = None
        self._paused = False

    @property
    def resting(self) -> bool:
        """Whether no request is in work or begun."""
        return self._task is None and not self._queue and not self._reader.in_head

    def end(self) -> None:
        """Close, once what was written is sent."""
        self._reader.deaf = True
        self._wait_for("ending")
        self._owner.outbox.flush()
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Close at once."""
        self._owner.outbox.flush()
        if self._transport is not None:
            self._transport.abort()

    def look(self) -> None:
        """Let the client go if what it is to do takes too long."""
        now = self._owner.now
        if self._transport is None or self._state == "answer":
            return
        left = self._transport.get_write_buffer_size()
        if left != self._left:  # it still reads what was sent before
            self._left = left
            self._since = now
        if now - self._since <= self._patience() + self._limits.grain:
            return
        if self._state == "body":
            self._reader.break_off()
        elif self._reader.in_head:
            self._reader.give_up(408, "the request's head took too long")
        else:
            self.cut()

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) else ""
        if not self._owner.opened(self):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        reader = self._reader
        if reader.deaf:
            return
        began = reader.in_head
        reader.feed(data)
        state = self._state
        if state == "body":
            self._since = self._owner.now
            if reader.body is None:
                self._state = "answer"
        elif state == "head" and reader.in_head and not began:
            self._wait_for("head")
        if self._queue or reader.body is not None:
            self._hold_back()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        del exc
        self._transport = None
        self._queue.clear()
        if self._sink is not None:
            self._sink.resume()
        if self._task is not None:
            self._task.cancel()
        self._owner.closed(self)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._sink is not None:
            self._sink.hold(self._loop)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._sink is not None:
            self._sink.resume()

    # --- reading --------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Let more of a body come."""
        body = self._reader.body
        if self._transport is not None and body is not None and body.expects:
            body.expects = False
            self._owner.outbox.flush()
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._read_on()

    def _read_on(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def _hold_back(self) -> None:
        """Read no more than is wanted."""
        body = self._reader.body
        wanted = len(self._queue) <= _QUEUED and not (body is not None and body.full)
        if self._transport is not None and not self._paused and not wanted:
            self._paused = True
            self._transport.pause_reading()

    # --- serving --------------------------------------------------------------------------------

    def _take(self, one: Incoming | Refused) -> None:
        """Serve a request, or say why it is none, when no other is served any more."""
        if self._task is not None:
            self._queue.append(one)
        elif type(one) is Refused:
            self._say(one)
        elif (transport := self._transport) is not None:
            owner = self._owner
            one.peer = self.peer
            if one.complete:
                self._state = "answer"
            else:
                self._wait_for("body")
            sink = self._sink = Outgoing(transport, owner, one, one.method == "HEAD")
            owner.began(self)
            self._task = asyncio.Task(self._serve(one, sink), loop=self._loop, name="exchange")

    async def _serve(self, request: Incoming, sink: Outgoing) -> None:
        owner = self._owner
        serve = owner.serve
        try:
            await serve(request, sink)
        finally:
            self._task = self._sink = None
            owner.ended(self)
            self._served(request, sink)

    def _served(self, request: Incoming, sink: Outgoing) -> None:
        """An answer is over: go on, or end."""
        if not sink.finished:
            self.cut()
        elif not request.complete:
            self._linger()
        elif sink.closes:
            self.end()
        else:
            if self._paused:
                self._read_on()
            if self._queue:
                self._take(self._queue.popleft())
            else:
                self._wait_for("head")

    def _say(self, refused: Refused) -> None:
        self._owner.refused[refused.status] += 1
        body = f"{refused.text}\n".encode()
        lines = (
            "Content-Type: text/plain; charset=utf-8",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        if self._transport is not None:
            self._owner.outbox.send(self._transport, head(refused.status, lines) + body)
        self._linger()

    def _linger(self) -> None:
        """End, but read on for a little: an answer is lost if its reader is met by a reset."""
        self._reader.deaf = True
        self._wait_for("lingering")
        self._owner.outbox.flush()
        self._read_on()
        if self._transport is not None:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:  # with TLS one side can't end alone
                self._transport.close()

    def _wait_for(self, state: State) -> None:
        self._state = state
        self._since = self._owner.now

    def _patience(self) -> float:
        limits = self._limits
        match self._state:
            case "head":
                return limits.head if self._reader.in_head else limits.idle
            case "lingering":
                return limits.linger
            case "body":
                return limits.body
            case _:
                return limits.taken
