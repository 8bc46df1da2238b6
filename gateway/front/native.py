"""The native front: HTTP/1.1 over asyncio's own transports, parsed by httptools (llhttp)."""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Sequence

from gateway.core.outbox import Outbox
from gateway.door import Door
from gateway.front import Serve
from gateway.front.connection import Connection
from gateway.front.limits import Limits


class Front:
    """A ``gateway.front.Front`` of our own.

    Where all connections are taken, the one that has waited longest for a request makes room for
    a new one. Past an address's own number a connection is closed at once.
    """

    def __init__(self, serve: Serve, limits: Limits) -> None:
        self.serve = serve
        self.leaving = False
        self.now = 0.0
        self.limits = limits
        self.outbox = Outbox(asyncio.get_running_loop)
        self._connections: dict[Connection, None] = {}
        self._addresses: dict[str, int] = {}
        """How many connections each has."""
        self._waiting: dict[Connection, None] = {}
        """Those that wait for a request; who has waited longest stands first."""
        self._door = Door(lambda: Connection(self, asyncio.get_running_loop()))
        self.refused = Counter[int]()
        """See ``gateway.front.Front``."""
        self._busy = 0
        self._idle: asyncio.Event | None = None
        """That nothing is served, once somebody waits for it."""
        self._closed = False
        """It meets nobody any more, whoever was let in before its door was shut."""
        self._gone = asyncio.Event()
        self._looking: asyncio.TimerHandle | None = None

    def limit(self, limits: Limits) -> None:
        """What new connections are held to, and how many there may be."""
        self.limits = limits

    def trust(self, tls: ssl.SSLContext | None) -> None:
        """With which certificate new connections are met; None where they are plain."""
        self._door.trust(tls)

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        reuse_port: bool = False,
        given: Sequence[socket.socket] = (),
    ) -> int:
        """See ``gateway.front.Front``."""
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        bound = await self._door.open(host, port, tls, reuse_port=reuse_port, given=given)
        self._looking = loop.call_later(self.limits.grain, self._look, loop)
        return bound

    @property
    def listening(self) -> Sequence[int]:
        """The descriptors of its listening sockets."""
        return self._door.descriptors

    @property
    def connections(self) -> int:
        """How many clients have now."""
        return len(self._connections)

    def shut(self) -> None:
        """Take no more connections. Those that are there go on."""
        self._door.shut()

    async def drain(self, seconds: float) -> None:
        """Leave and shut, end what rests, and wait for what runs, so long at most."""
        self.leaving = True
        await self._door.closed()
        for connection in list(self._connections):
            if connection.resting:
                connection.end()
        try:
            async with asyncio.timeout(seconds):
                await self._rest()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Cut what is left."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        await self._door.closed()
        while self._connections:
            self._gone.clear()
            for connection in list(self._connections):
                connection.cut()
            await self._gone.wait()
        await self._rest()

    # --- see gateway.front.connection.Owner -----------------------------------------------------

    def opened(self, connection: Connection) -> bool:
        """See Owner."""
        limits, at = self.limits, connection.peer
        here = self._addresses[at] = self._addresses.get(at, 0) + 1
        room = not self._closed and (limits.per_address is None or here <= limits.per_address)
        room = room and (len(self._connections) < limits.connections or self._make_room())
        self._connections[connection] = self._waiting[connection] = None
        return room

    def closed(self, connection: Connection) -> None:
        """See Owner."""
        del self._connections[connection]
        self._waiting.pop(connection, None)
        self._addresses[connection.peer] -= 1
        if not self._addresses[connection.peer]:
            del self._addresses[connection.peer]
        if not self._connections:
            self._gone.set()

    def began(self, connection: Connection) -> None:
        """See Owner."""
        if connection in self._waiting:
            del self._waiting[connection]
        self._busy += 1

    def ended(self, connection: Connection) -> None:
        """See Owner."""
        if connection in self._connections:
            self._waiting[connection] = None
        self._busy -= 1
        if self._idle is not None and not self._busy:
            self._idle.set()

    async def _rest(self) -> None:
        """Wait until nothing is served."""
        self._idle = self._idle or asyncio.Event()
        while self._busy:
            self._idle.clear()
            await self._idle.wait()

    def _make_room(self) -> bool:
        """Let the one go that has waited longest for a request; whether there is one."""
        for one in self._waiting:
            del self._waiting[one]
            one.cut()
            return True
        return False

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of those who take too long."""
        self.now = loop.time()
        for connection in list(self._connections):
            connection.look()
        self._looking = loop.call_later(self.limits.grain, self._look, loop)
