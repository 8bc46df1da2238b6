"""The native front: HTTP/1.1 over asyncio's own transports, parsed by httptools (llhttp)."""

import asyncio
import ssl
from typing import Final

from msgspec.structs import replace

from gateway.front import Serve
from gateway.front.certified import outer
from gateway.front.connection import Connection, Limits

_LOOK: Final = 1.0
"""Seconds between looks at who takes too long."""


class Front:
    """A ``gateway.front.Front`` of our own."""

    def __init__(self, serve: Serve, *, header_limit: int, connections: int) -> None:
        self.serve = serve
        self.leaving = False
        self.now = 0.0
        self.limits = Limits()
        self.limit(header_limit=header_limit, connections=connections)
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._gone = asyncio.Event()
        self._looking: asyncio.TimerHandle | None = None

    def limit(self, *, header_limit: int, connections: int) -> None:
        """What new connections are held to, and how many there may be."""
        self.limits = replace(self.limits, header=header_limit, connections=connections)

    def trust(self, tls: ssl.SSLContext | None) -> None:
        """With which certificate new connections are met; None where they are plain."""
        self._tls = tls

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        reuse_port: bool = False,
    ) -> int:
        """Bind; gives the port, which the system chooses for 0.

        With ``reuse_port`` other processes may listen there too.
        """
        self.trust(tls)
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        self._server = await loop.create_server(
            lambda: Connection(self, loop),
            host or None,
            port,
            ssl=None if tls is None else outer(lambda: self._tls),
            backlog=1024,
            reuse_port=reuse_port,
        )
        self._looking = loop.call_later(_LOOK, self._look, loop)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def drain(self, seconds: float) -> None:
        """Take no more connections, and wait for the exchanges that run, so long at most."""
        self.leaving = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            if connection.resting:
                connection.end()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Cut what is left."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            self._server.close()
        while self._connections:
            self._gone.clear()
            for connection in list(self._connections):
                connection.cut()
            await self._gone.wait()
        await self._idle.wait()

    # --- see gateway.front.connection.Owner -----------------------------------------------------

    def opened(self, connection: Connection) -> bool:
        """See Owner."""
        self._connections.add(connection)
        return len(self._connections) <= self.limits.connections

    def closed(self, connection: Connection) -> None:
        """See Owner."""
        self._connections.discard(connection)
        if not self._connections:
            self._gone.set()

    def began(self) -> None:
        """See Owner."""
        self._busy += 1
        self._idle.clear()

    def ended(self) -> None:
        """See Owner."""
        self._busy -= 1
        if not self._busy:
            self._idle.set()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of those who take too long."""
        self.now = loop.time()
        for connection in list(self._connections):
            connection.look()
        self._looking = loop.call_later(_LOOK, self._look, loop)
