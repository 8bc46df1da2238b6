"""One connection to a worker, and the answer that comes over it."""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.core.errors import StreamBroken, WorkerError, WorkerFailed
from gateway.core.fields import Names
from gateway.core.outbox import Outbox

_BUFFER: Final = 64 << 10
"""Bytes of an answer held before the worker is made to wait; one read more at most."""
_FIELD: Final = 8190
"""Bytes of a header's name and value."""
_HEADERS: Final = 128
_EMPTY: Final = 64 << 10
"""Bytes that may come without one of a body among them: heads, chunk extensions, trailers."""
_NAMES: Final = Names()
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
    """An answer as far as it has come: a ``Reading``."""

    __slots__ = (
        "_connection",
        "_fault",
        "_over",
        "_take",
        "_waiter",
        "complete",
        "headers",
        "held",
        "parts",
        "status",
    )

    def __init__(self, connection: "Connection", parts: list[bytes]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        """All of it has come."""
        self._connection = connection
        self.parts = parts
        """What of the body came and nobody has taken yet."""
        self.held = 0
        """How many bytes came since some were taken."""
        self._take: Callable[[bytes], bool] | None = None
        """Who takes what comes, at once."""
        self._waiter: asyncio.Future[bool] | None = None
        self._fault: _Fault | None = None
        self._over = False

    async def head(self) -> bool:
        """See ``backends.upstream.Reading``."""
        try:
            while not self.status:
                await self._more()
        except StreamBroken:
            stale = self._connection.stale
            self.abort()
            if stale:
                return False
            raise
        except BaseException:
            self.abort()
            raise
        return True

    def taken(self) -> bytes:
        """See ``backends.upstream.Reading``."""
        parts = self.parts
        data = b"".join(parts)
        parts.clear()
        self.held = 0
        if self._connection.paused:
            self._connection.go_on()
        return data

    async def read(self) -> bytes:
        """See ``backends.upstream.Reading``."""
        while not self.parts:
            if self.complete:
                return b""
            await self._more()
        return self.taken()

    async def listen(self, take: Callable[[bytes], bool]) -> bool:
        """See ``backends.upstream.Reading``."""
        while True:
            if self.parts:
                if not take(self.taken()):
                    return False
            elif self.complete:
                return True
            else:
                self._take = take
                try:
                    if not await self._more():
                        return False
                finally:
                    self._take = None

    def abort(self) -> None:
        """See ``backends.upstream.Reading``."""
        if not self._over:
            self._over = True
            self._connection.cut()
            self.parts = []
            self.complete = False  # what was thrown away must not look like the end
            self.fail()

    def release(self) -> None:
        """See ``backends.upstream.Reading``."""
        if not self._over:
            self._over = True
            self.parts = []  # what it was goes on to hold the next answer's
            self._connection.rest()

    def _more(self) -> asyncio.Future[bool]:
        """What is done when something has come. Raises StreamBroken or WorkerFailed.

        It is False where who listens takes no more.
        """
        if self._fault is not None:
            raise self._fault.error()
        waiter = self._waiter = self._connection.loop.create_future()
        return waiter

    # --- what the connection tells --------------------------------------------------------------

    def fail(self, fault: _Fault | None = None) -> None:
        """No more comes, and it is not whole: the connection has ended, unless it is a fault."""
        if not self.complete and self._fault is None:
            self._fault = fault or (_STOPPED if self.status else _CLOSED)
        self._wake()

    def came(self) -> None:
        """Something has come: who listens gets it now; else, and at the end, who waits is woken."""
        take = self._take
        if take is None:
            self._wake()
            return
        try:
            more = not self.parts or take(self.taken())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._wake(error)
            return
        if self.complete or not more:
            self._wake(more=more)

    def _wake(self, error: Exception | None = None, *, more: bool = True) -> None:
        waiter, self._waiter = self._waiter, None
        self._take = None
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(more)
        else:
            waiter.set_exception(error)


class Connection(asyncio.Protocol):
    """A connection that serves one request after the other.

    ``rested`` is called with it when it may serve again, ``ended`` when it never will.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        outbox: Outbox,
        rested: Callable[["Connection"], None],
        ended: Callable[["Connection"], None],
    ) -> None:
        self.since = 0.0
        """When it began to rest, by the loop's clock."""
        self.loop = loop
        self._outbox = outbox
        self._rested = rested
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        """Of the body of the answer that comes."""
        self.on_body: Callable[[bytes], None] = self._parts.append
        """A piece of the body, of which a stream has thousands: see ``httptools``."""
        self._extent = 0
        """How many such pieces a whole answer had."""
        self._answer = Answer(self, self._parts)
        """To the last request; there was none yet, and what nobody asked for is no part of it."""
        self._answer.complete = True
        self._parser = HttpResponseParser(self)
        self._feed: Callable[[bytes], None] = self._parser.feed_data
        self._served = False
        """It was at rest before the last request."""
        self._keeps = True
        """Whether it may serve again, as far as is known."""
        self._severed = False
        self.paused = False
        """The worker is made to wait."""
        self._empty = 0
        """Bytes of an answer that came without one of a body among them."""
        self._count = 0
        """Headers of an answer, and what looks like one."""
        self._wrong = False

    @property
    def connected(self) -> bool:
        """Whether it is not at its end."""
        return self._transport is not None

    @property
    def stale(self) -> bool:
        """Whether it ended by itself after it had rested, before anything of an answer came."""
        return self._served and not self._answer.held and not self._severed

    def ask(self, data: bytes) -> Answer:
        """Send a whole request. Nothing has come of its answer yet."""
        self._parts.clear()
        answer = self._answer = Answer(self, self._parts)
        if self._transport is None:
            answer.fail()
        else:
            self._outbox.send(self._transport, data)
        return answer

    def go_on(self) -> None:
        """What was held is taken."""
        if self.paused and self._transport is not None:
            self.paused = False
            self._transport.resume_reading()

    def cut(self) -> None:
        """End it now, whatever is not yet written or read."""
        self._keeps = False
        self._severed = True
        if self._transport is not None:
            self._transport.abort()

    def rest(self) -> None:
        """Serve again, if all that there was to write and to read is done; or else end."""
        transport = self._transport
        done = self._keeps and self._answer.complete  # what was wrong has been cut
        if not done or transport is None or transport.get_write_buffer_size():
            self.cut()
            return
        self._served = True
        if self.paused:
            self.go_on()
        self._rested(self)

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. The one who reads is woken once for all that came together."""
        answer = self._answer
        if answer.complete:
            self.cut()  # nobody asked for this: what follows it could be taken for an answer
            return
        parts = self._parts
        before = len(parts)
        answer.held += len(data)
        try:
            self._feed(data)
        except HttpParserUpgrade:
            self._keeps = False
        except HttpParserError:
            self._wrong = True
        self._empty = 0 if len(parts) > before else self._empty + len(data)
        if self._answer.complete:
            del parts[self._extent :]  # nobody asked for more
        if self._wrong or self._empty > _EMPTY:
            self._refuse(answer)
        elif answer.held > _BUFFER and not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()
        answer.came()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._keeps = False
        answer = self._answer
        if exc is None and answer.status and not self._severed and not _is_framed(answer):
            answer.complete = True  # its length is not told: it ends with the connection
        answer.fail()
        self._ended(self)

    # --- httptools ------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or what looks like one after the body."""
        answer = self._answer
        self._count += 1
        if len(name) + len(value) > _FIELD or self._count > _HEADERS:
            self._wrong = True
        elif not answer.status:
            answer.headers[_NAMES[name]] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head has come; one that only announces another is passed over."""
        answer, status = self._answer, self._parser.get_status_code()
        if answer.complete or self._wrong:
            return
        if status >= _FINAL or status == _SWITCHED:
            answer.status = status

    def on_message_complete(self) -> None:
        """The end of an answer, or of what came before one."""
        answer = self._answer
        if answer.complete:
            return
        if not answer.status:
            answer.headers = {}
            return
        answer.complete = True
        self._extent = len(self._parts)
        self._count = self._empty = 0
        if not self._parser.should_keep_alive():
            self._keeps = False

    def on_message_begin(self) -> None:
        """A head begins: the awaited one, or one that nobody asked for."""
        if self._answer.complete:
            self._keeps = False

    # --- within ---------------------------------------------------------------------------------

    def _refuse(self, answer: Answer) -> None:
        """What came is not HTTP, or more of it than there can be sense in."""
        midway = answer.status and not answer.complete
        answer.complete = False  # if it told an end, that was not its end
        answer.fail(_STOPPED if midway else _STRANGE)
        self.cut()


def _is_framed(answer: Answer) -> bool:
    """Whether it tells by itself where its body ends."""
    coding = answer.headers.get("transfer-encoding", "").lower()
    return coding.endswith("chunked") if coding else "content-length" in answer.headers
