"""One connection to a worker: its requests, and their answers, one after the other."""

import asyncio
from collections.abc import Callable
from typing import Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from backends.http.answer import STOPPED, STRANGE, Answer
from gateway.core.outbox import Outbox

_BUFFER: Final = 64 << 10
"""Bytes of an answer held before the worker is made to wait; one read more at most."""
_FIELD: Final = 8190
"""Bytes of a header's name and value."""
_HEADERS: Final = 128
_EMPTY: Final = 64 << 10
"""Bytes that may come without one of a body among them: heads, chunk extensions, trailers."""
_SWITCHED: Final = 101
_FINAL: Final = 200


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
        """See ``Carrier``."""
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
        """See ``Carrier``."""
        if self.paused and self._transport is not None:
            self.paused = False
            self._transport.resume_reading()

    def cut(self) -> None:
        """See ``Carrier``."""
        self._keeps = False
        self._severed = True
        if self._transport is not None:
            self._transport.abort()

    def rest(self) -> None:
        """See ``Carrier``."""
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
        answer.held += len(data)
        parts = self._parts
        before = len(parts)
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
        if answer.held > _BUFFER:
            self._hold_back()
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
            answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head has come; one that only announces another is passed over."""
        answer, status = self._answer, self._parser.get_status_code()
        if answer.complete or self._wrong:
            return
        if status >= _FINAL or status == _SWITCHED:
            answer.status = status
            if not self._parser.should_keep_alive():
                self._keeps = False

    def on_message_complete(self) -> None:
        """The end of an answer, or of what came before one."""
        answer = self._answer
        if answer.status and not answer.complete:
            answer.complete = True
            self._extent = len(self._parts)
            self._count = self._empty = 0

    def on_message_begin(self) -> None:
        """A head begins: the awaited one, or one that nobody asked for."""
        if self._answer.complete:
            self._keeps = False
        else:
            self._answer.headers = {}

    # --- within ---------------------------------------------------------------------------------

    def _hold_back(self) -> None:
        """More has come than is to be held: make the worker wait."""
        if not self.paused and not self._severed and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    def _refuse(self, answer: Answer) -> None:
        """What came is not HTTP, or more of it than there can be sense in."""
        midway = answer.status and not answer.complete
        answer.complete = False  # if it told an end, that was not its end
        answer.fail(STOPPED if midway else STRANGE)
        self.cut()


def _is_framed(answer: Answer) -> bool:
    """Whether it tells by itself where its body ends."""
    coding = answer.headers.get("transfer-encoding", "").lower()
    return coding.endswith("chunked") if coding else "content-length" in answer.headers
