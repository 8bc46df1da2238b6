"""Who keeps connections for whom."""

import asyncio
import ssl
from collections import deque
from typing import Final

from backends.http.answer import Answer
from backends.http.connection import Connection
from backends.http.dialling import dial
from backends.http.origin import Origin, head, origin
from backends.upstream import Connections
from gateway.core.errors import InternalError, WorkerUnreachable
from gateway.core.outbox import Outbox
from gateway.core.ports import Headers, WireRequest

_DIALS: Final = 64
"""Connections to one worker that are made at a time: more would only wait in its queue."""


class HttpUpstream:
    """An ``Upstream`` (see ``backends.upstream``) on asyncio's own transports.

    ``ca`` is a PEM file of those whose signature on a worker's certificate is trusted, in place of
    the system's. ``idle`` (seconds) is how long an unused connection may serve again: less than the
    five seconds after which common servers close it, since a request that meets that end is lost.
    Of each worker ``keep`` connections are kept at most, and the one used last serves first.
    """

    def __init__(self, *, ca: str | None = None, idle: float = 4.0, keep: int = 256) -> None:
        self._ca = ca
        self._idle = idle
        self._keep = keep
        self._tls: ssl.SSLContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox = Outbox(asyncio.get_running_loop)
        self._homes: dict[str, _Home] = {}
        """By their worker's URL."""
        self._made = self._failed = 0
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """See Upstream."""
        self._loop = asyncio.get_running_loop()

    def ask(self, url: str, request: WireRequest, own: Headers = ()) -> Answer | None:
        """See Upstream."""
        home = self._homes.get(url)
        if home is None:
            return None
        data = head(url, request, own) + request.body
        used = home.pop(self._idle)
        return None if used is None else used.ask(data)

    async def dial(
        self, url: str, request: WireRequest, connect_timeout: float, own: Headers = ()
    ) -> Answer:
        """See Upstream."""
        if self._loop is None:
            raise InternalError("the HTTP client was not started")
        data = head(url, request, own) + request.body
        home = self._homes.get(url) or self._home(url, self._loop)
        tls = self._context() if home.target.tls else None
        try:
            made = await home.dial(tls, connect_timeout)
        except WorkerUnreachable:
            self._failed += 1
            raise
        self._made += 1
        answer = made.ask(data)
        await _headed(answer)
        return answer

    async def open(
        self, url: str, request: WireRequest, connect_timeout: float, own: Headers = ()
    ) -> Answer:
        """See Upstream."""
        answer = self.ask(url, request, own)
        if answer is not None and await _headed(answer):
            return answer
        return await self.dial(url, request, connect_timeout, own)

    @property
    def connections(self) -> Connections:
        """See Connected."""
        counts = [home.counts for home in self._homes.values()]
        every, resting = (sum(each) for each in zip(*counts, strict=True)) if counts else (0, 0)
        return Connections(every, resting, self._made, self._failed)

    async def aclose(self) -> None:
        """See Upstream. Those in use are cut."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        homes = list(self._homes.values())
        self._homes.clear()
        self._loop = None
        await asyncio.gather(*(home.aclose() for home in homes))

    def _home(self, url: str, loop: asyncio.AbstractEventLoop) -> "_Home":
        made = self._homes[url] = _Home(origin(url), self._keep, loop, self._outbox)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._idle, self._sweep, loop)
        return made

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._ca)
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of what rested too long, and of workers that nobody asks any more."""
        self._sweeper = None
        before = loop.time() - self._idle
        for url, home in list(self._homes.items()):
            home.retire(before)
            if not home.busy:
                del self._homes[url]
        if self._homes:
            self._sweeper = loop.call_later(self._idle, self._sweep, loop)


async def _headed(answer: Answer) -> bool:
    """Wait for its head; what is cancelled is cut."""
    try:
        return await answer.head()
    except BaseException:
        answer.abort()
        raise


class _Home:
    """The connections of one worker."""

    def __init__(
        self, target: Origin, keep: int, loop: asyncio.AbstractEventLoop, outbox: Outbox
    ) -> None:
        self._every: set[Connection] = set()
        self._empty = asyncio.Event()
        self.target = target
        self._keep = keep
        self._loop = loop
        self._outbox = outbox
        self._resting: deque[Connection] = deque()
        self._dials = asyncio.Semaphore(_DIALS)
        self._dialling = 0

    @property
    def busy(self) -> bool:
        """Whether it has connections, or is making some."""
        return bool(self._every or self._dialling)

    @property
    def counts(self) -> tuple[int, int]:
        """How many connections there are, and how many of them rest."""
        return len(self._every), len(self._resting)

    def pop(self, idle: float) -> Connection | None:
        """The connection used last, unless it rested for ``idle`` seconds."""
        resting = self._resting
        if resting and resting[-1].since + idle > self._loop.time():
            return resting.pop()
        return None

    async def dial(self, tls: ssl.SSLContext | None, seconds: float) -> Connection:
        """A new connection. Raises WorkerUnreachable."""
        self._dialling += 1
        try:
            async with self._dials:
                made = await dial(self.target, tls, seconds, self._make)
        finally:
            self._dialling -= 1
        if made.connected:
            self._every.add(made)
        return made

    async def aclose(self) -> None:
        """End them all; those in use are cut."""
        while self._every:
            self._empty.clear()
            for connection in list(self._every):
                connection.cut()
            await self._empty.wait()

    def retire(self, before: float) -> None:
        """End what has rested since ``before``."""
        while self._resting and self._resting[0].since <= before:
            self._resting.popleft().cut()

    def _make(self) -> Connection:
        return Connection(self._loop, self._outbox, self._rest, self._end)

    def _rest(self, connection: Connection) -> None:
        if len(self._resting) >= self._keep:
            connection.cut()
            return
        connection.since = self._loop.time()
        self._resting.append(connection)

    def _end(self, connection: Connection) -> None:
        self._every.discard(connection)
        if not self._every:
            self._empty.set()
        if connection in self._resting:
            self._resting.remove(connection)
