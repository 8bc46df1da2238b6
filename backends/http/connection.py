"""One connection to a worker, and the answer that comes over it."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.core.errors import StreamBroken, WorkerError, WorkerFailed

_BUFFER: Final = 64 << 10
"""Bytes of an answer held before the worker is made to wait; one read more at most."""
_FIELD: Final = 8190
"""Bytes of a header's name and value."""
_HEADERS: Final = 128
_EMPTY: Final = 64 << 10
"""Bytes that may come without one of a body among them: heads, chunk extensions, trailers."""
_SWITCHED: Final = 101
_FINAL: Final = 200


class _Fault(NamedTuple):
    """What went wrong: raised anew each time, so that no error holds on to who met it."""

    kind: type[WorkerError]
    text: str

    def error(self) -> WorkerError:
        return self.kind(self.text)


_CLOSED: Final = _Fault(StreamBroken, "the worker closed the connection before its answer")
_STOPPED: Final = _Fault(StreamBroken, "the worker's answer stopped before its end")
_STRANGE: Final = _Fault(WorkerFailed, "the worker's answer is not HTTP")


class Answer:
    """An answer as far as it has come: a ``Reading`` once its head is there."""

    __slots__ = (
        "_connection",
        "_fault",
        "_loop",
        "_over",
        "_parts",
        "_waiter",
        "complete",
        "headers",
        "held",
        "status",
    )

    def __init__(self, connection: "Connection", loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.complete = False
        """All of it has come."""
        self.held = 0
        """Bytes that nobody has taken yet."""
        self._connection = connection
        self._loop = loop
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._fault: _Fault | None = None
        self._over = False

    async def begun(self) -> None:
        """Wait for the head. Raises StreamBroken or WorkerFailed."""
        while not self.status:
            if self._fault is not None:
                raise self._fault.error()
            await self._wait()

    async def read(self) -> bytes:
        """See ``backends.upstream.Reading``."""
        while not self._parts:
            if self.complete:
                return b""
            if self._fault is not None:
                raise self._fault.error()
            await self._wait()
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self.held = 0
        self._connection.go_on()
        return data

    def abort(self) -> None:
        """See ``backends.upstream.Reading``."""
        if not self._over:
            self._over = True
            self._connection.cut()
            self._parts.clear()
            self.fail()

    def release(self) -> None:
        """See ``backends.upstream.Reading``."""
        if not self._over:
            self._over = True
            self._connection.rest()

    # --- what the connection tells --------------------------------------------------------------

    def take(self, data: bytes) -> None:
        """A piece of the body."""
        self._parts.append(data)
        self.held += len(data)

    def fail(self, fault: _Fault | None = None) -> None:
        """No more comes, and it is not whole: the connection has ended, unless it is a fault."""
        if not self.complete and self._fault is None:
            self._fault = fault or (_STOPPED if self.status else _CLOSED)
        self.wake()

    def wake(self) -> None:
        """Something has come."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Connection(asyncio.Protocol):
    """A connection that serves one request after the other.

    ``rested`` is called with it when it may serve again, ``ended`` when it never will.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rested: Callable[["Connection"], None],
        ended: Callable[["Connection"], None],
    ) -> None:
        self.since = 0.0
        """When it began to rest, by the loop's clock."""
        self._loop = loop
        self._rested = rested
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._parser = HttpResponseParser(self)
        self._feed: Callable[[bytes], None] = self._parser.feed_data
        self._heard = False
        self._keeps = True
        """Whether it may serve again, as far as is known."""
        self._severed = False
        self._paused = False
        self._empty = 0
        self._headers: dict[str, str] = {}
        self._count = 0
        self._wrong = False
        self._framed = False
        self._begin()

    @property
    def connected(self) -> bool:
        """Whether it is not at its end."""
        return self._transport is not None

    @property
    def heard(self) -> bool:
        """Whether anything of the last request's answer came."""
        return self._heard

    def send(self, data: bytes) -> Answer:
        """Send a whole request; gives what its answer will be."""
        answer = self._answer = Answer(self, self._loop)
        self._heard = False
        if self._transport is None:
            answer.fail()
        else:
            self._transport.write(data)
        return answer

    def go_on(self) -> None:
        """What was held is taken."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def cut(self) -> None:
        """End it now, whatever is not yet written or read."""
        self._keeps = False
        self._severed = True
        if self._transport is not None:
            self._transport.abort()

    def rest(self) -> None:
        """Serve again, if all that there was to write and to read is done; or else end."""
        answer, transport = self._answer, self._transport
        done = answer is not None and answer.complete and not self._wrong
        if not done or not self._keeps or transport is None or transport.get_write_buffer_size():
            self.cut()
            return
        self._answer = None
        self.go_on()
        self._rested(self)

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. The one who reads is woken once for all that came together."""
        answer = self._answer
        if answer is None or answer.complete:
            self.cut()  # nobody asked for this: what follows it could be taken for an answer
            return
        self._heard = True
        before = answer.held
        try:
            self._feed(data)
        except HttpParserUpgrade:
            self._keeps = False
        except HttpParserError:
            self._wrong = True
        self._empty = 0 if answer.held > before else self._empty + len(data)
        if self._wrong or self._empty > _EMPTY:
            self._refuse(answer)
        elif answer.held > _BUFFER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        answer.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._keeps = False
        if (answer := self._answer) is not None:
            if exc is None and answer.status and not self._framed and not self._severed:
                answer.complete = True  # its length is not told: it ends with the connection
            answer.fail()
        self._ended(self)

    # --- httptools ------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or what looks like one after the body."""
        self._count += 1
        if len(name) + len(value) > _FIELD or self._count > _HEADERS:
            self._wrong = True
        elif self._answer is not None and not self._answer.status:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head has come; one that only announces another is passed over."""
        status = self._parser.get_status_code()
        if self._answer is None or self._wrong or (status < _FINAL and status != _SWITCHED):
            return
        headers = self._headers
        coding = headers.get("transfer-encoding", "")
        chunked = coding.lower().endswith("chunked")
        self._framed = chunked or (not coding and "content-length" in headers)
        self._answer.headers = headers
        self._answer.status = status

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._answer is not None and not self._answer.complete:
            self._answer.take(data)

    def on_message_complete(self) -> None:
        """The end of an answer, or of what came before one."""
        answer = self._answer
        if answer is None or not answer.status or answer.complete:
            self._headers = {}
            return
        answer.complete = True
        self._keeps = self._keeps and self._parser.should_keep_alive()
        self._begin()

    def on_message_begin(self) -> None:
        """A head begins: the awaited one, or one that nobody asked for."""
        if self._answer is not None and self._answer.complete:
            self._keeps = False

    # --- within ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Be ready for an answer."""
        self._headers = {}
        self._count = 0
        self._empty = 0
        self._framed = False

    def _refuse(self, answer: Answer) -> None:
        """What came is not HTTP, or more of it than there can be sense in."""
        midway = answer.status and not answer.complete
        answer.complete = False  # if it told an end, that was not its end
        answer.fail(_STOPPED if midway else _STRANGE)
        self.cut()
