"""An answer of a worker, as far as it has come."""

import asyncio
from typing import Final, NamedTuple, Protocol

from backends.upstream import BodyConsumer
from protocols.core.errors import StreamBroken, WorkerError, WorkerFailed


class ConnectionFault(NamedTuple):
    """What went wrong: raised anew each time, so that no error holds on to who met it."""

    kind: type[WorkerError]
    text: str

    def make_error(self) -> WorkerError:
        return self.kind(self.text)


_NO_HEADERS: Final[dict[str, str]] = {}
"""The headers of an answer that has not begun. Nobody writes into it."""
_CLOSED_EARLY: Final = ConnectionFault(
    StreamBroken, "the worker closed the connection before its answer"
)
RESPONSE_CUT_OFF: Final = ConnectionFault(
    StreamBroken, "the worker's answer stopped before its end"
)
NOT_HTTP: Final = ConnectionFault(WorkerFailed, "the worker's answer is not HTTP")


class ResponseTransport(Protocol):
    """The connection that an answer comes over."""

    loop: asyncio.AbstractEventLoop
    paused: bool
    """The worker is made to wait."""

    @property
    def is_stale(self) -> bool:
        """Whether it ended by itself after it had rested, before anything of an answer came."""

    def resume_reading(self) -> None:
        """What was held is taken."""

    def abort(self) -> None:
        """End it now, whatever is not yet written or read."""

    def release(self) -> None:
        """Serve again, if all that there was to write and to read is done; or else end."""


class Http1Response:
    """An answer as far as it has come: a ``Reading``."""

    __slots__ = (
        "_connection",
        "_consumer",
        "_fault",
        "_released",
        "_waiter",
        "complete",
        "headers",
        "held_bytes",
        "parts",
        "status",
    )

    def __init__(self, connection: ResponseTransport, parts: list[bytes]) -> None:
        self.status = 0
        self.headers = _NO_HEADERS
        """Others, once a head begins."""
        self.complete = False
        """All of it has come."""
        self._connection = connection
        self.parts = parts
        """What of the body came and nobody has taken yet."""
        self.held_bytes = 0
        """How many bytes came since some were taken."""
        self._consumer: BodyConsumer | None = None
        """Who takes what comes, at once."""
        self._waiter: asyncio.Future[bool] | None = None
        self._fault: ConnectionFault | None = None
        self._released = False

    def wait_headers(self) -> asyncio.Future[bool]:
        """See ``backends.upstream.UpstreamResponse``."""
        waiter = self._waiter = self._connection.loop.create_future()
        if self.status:
            waiter.set_result(True)
        elif self._fault is not None:
            self._fail_headers(self._fault)
        return waiter

    def read_available(self) -> list[bytes]:
        """See ``backends.upstream.UpstreamResponse``."""
        parts = self.parts
        pieces = parts[:]
        parts.clear()
        self.held_bytes = 0
        if self._connection.paused:
            self._connection.resume_reading()
        return pieces

    async def read(self) -> list[bytes]:
        """See ``backends.upstream.UpstreamResponse``."""
        while not self.parts:
            if self.complete:
                return []
            await self._wait_more()
        return self.read_available()

    async def forward_to(self, take: BodyConsumer) -> bool:
        """See ``backends.upstream.UpstreamResponse``."""
        while True:
            if self.parts:
                if not take(self.read_available()):
                    return False
            elif self.complete:
                return True
            else:
                self._consumer = take
                try:
                    if not await self._wait_more():
                        return False
                finally:
                    self._consumer = None

    def abort(self) -> None:
        """See ``backends.upstream.UpstreamResponse``."""
        if not self._released:
            self._released = True
            self._connection.abort()
            self.parts = []
            self.complete = False  # what was thrown away must not look like the end
            self.fail()

    def release(self) -> None:
        """See ``backends.upstream.UpstreamResponse``."""
        if not self._released:
            self._released = True
            self.parts = []  # what it was goes on to hold the next answer's
            self._connection.release()

    def _wait_more(self) -> asyncio.Future[bool]:
        """What is done when something has come. Raises StreamBroken or WorkerFailed.

        It is False where who listens takes no more.
        """
        if self._fault is not None:
            raise self._fault.make_error()
        waiter = self._waiter = self._connection.loop.create_future()
        return waiter

    # --- what the connection tells --------------------------------------------------------------

    def fail(self, fault: ConnectionFault | None = None) -> None:
        """No more comes, and it is not whole: the connection has ended, unless it is a fault."""
        if not self.complete and self._fault is None:
            self._fault = fault or (RESPONSE_CUT_OFF if self.status else _CLOSED_EARLY)
        if self.status or self._fault is None:
            self._wake_waiter()
        else:
            self._fail_headers(self._fault)

    def on_progress(self) -> None:
        """Something has come: who listens gets it now; else, and at the end, who waits is woken."""
        take = self._consumer
        if take is None:
            waiter = self._waiter
            if waiter is not None and self.status and not waiter.done():
                waiter.set_result(True)
            return
        try:
            more = not self.parts or take(self.read_available())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._wake_waiter(error)
            return
        if self.complete or not more:
            self._wake_waiter(more=more)

    def _fail_headers(self, fault: ConnectionFault) -> None:
        """No head comes: tell who waits for it."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        stale = self._connection.is_stale and fault.kind is StreamBroken
        self.abort()
        if stale:
            waiter.set_result(False)
        else:
            waiter.set_exception(fault.make_error())

    def _wake_waiter(self, error: Exception | None = None, *, more: bool = True) -> None:
        waiter, self._waiter = self._waiter, None
        self._consumer = None
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(more)
        else:
            waiter.set_exception(error)
