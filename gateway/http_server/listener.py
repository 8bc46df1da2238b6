"""The native front: HTTP/1.1 over asyncio's own transports, parsed by httptools (llhttp)."""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from backends.aio import WriteBatcher
from gateway.http_server.connection import ClientConnection, ConnectionLimits, HandleRequest
from gateway.http_server.sockets import ListenSockets

# What turns sockets into requests and sinks (``gateway.pipeline.http``). One line per front.

LISTENER_CLASSES: Final[Mapping[str, str]] = {
    "native": "gateway.http_server.listener:NativeListener",
    "aiohttp": "gateway.http_server.aiohttp_listener:AiohttpListener",
}
"""By the name that a listener's configuration gives; each is imported where it is used."""


class Listener(Protocol):
    """One listening address.

    ``serve`` is called for each request, in a task that is cancelled when the client leaves. It may
    be put in another's place at any time: a request that runs keeps the one that it began with.
    """

    handle_request: HandleRequest
    is_draining: bool
    """Whether each answer is the last of its connection."""

    def set_limits(self, limits: ConnectionLimits) -> None:
        """What new connections are held to, and how many there may be."""

    def set_tls_context(self, tls: ssl.SSLContext | None) -> None:
        """With which certificate new connections are met; None where they are plain."""

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        reuse_port: bool = False,
        given: Sequence[socket.socket] = (),
    ) -> int:
        """Bind; gives the port, which the system chooses for 0.

        With ``reuse_port`` other processes may listen there too. Sockets that are ``given`` listen
        already, and nothing is bound.
        """

    @property
    def socket_fds(self) -> Sequence[int]:
        """The descriptors of its listening sockets."""

    @property
    def connections(self) -> int:
        """How many clients have now."""

    @property
    def malformed_by_status(self) -> Mapping[int, int]:
        """How often what came could not be read as a request, by the status that said so."""

    def stop_accepting(self) -> None:
        """Take no more connections. Those that are there go on."""

    async def drain(self, seconds: float) -> None:
        """Leave and shut, end what rests, and wait for what runs, so long at most."""

    async def close(self) -> None:
        """Cut what is left."""


class NativeListener:
    """A ``gateway.http_server.listener.Listener`` of our own.

    Where all connections are taken, the one that has waited longest for a request makes room for
    a new one. Past an address's own number a connection is closed at once.
    """

    def __init__(self, serve: HandleRequest, limits: ConnectionLimits) -> None:
        self.handle_request = serve
        self.is_draining = False
        self.loop_time = 0.0
        self.limits = limits
        self.write_batcher = WriteBatcher(asyncio.get_running_loop)
        self._connections: dict[ClientConnection, None] = {}
        self._connections_per_address: dict[str, int] = {}
        """How many connections each has."""
        self._idle_connections: dict[ClientConnection, None] = {}
        """Those that wait for a request; who has waited longest stands first."""
        self._sockets = ListenSockets(lambda: ClientConnection(self, asyncio.get_running_loop()))
        self.malformed_by_status = Counter[int]()
        """See ``gateway.http_server.listener.Listener``."""
        self._active_requests = 0
        self._idle_event: asyncio.Event | None = None
        """That nothing is served, once somebody waits for it."""
        self._is_closed = False
        """It meets nobody any more, whoever was let in before its door was shut."""
        self._all_closed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def set_limits(self, limits: ConnectionLimits) -> None:
        """What new connections are held to, and how many there may be."""
        self.limits = limits

    def set_tls_context(self, tls: ssl.SSLContext | None) -> None:
        """With which certificate new connections are met; None where they are plain."""
        self._sockets.set_tls_context(tls)

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        reuse_port: bool = False,
        given: Sequence[socket.socket] = (),
    ) -> int:
        """See ``gateway.http_server.listener.Listener``."""
        loop = asyncio.get_running_loop()
        self.loop_time = loop.time()
        bound = await self._sockets.listen(host, port, tls, reuse_port=reuse_port, given=given)
        self._timer = loop.call_later(self.limits.check_interval, self._check_timeouts, loop)
        return bound

    @property
    def socket_fds(self) -> Sequence[int]:
        """The descriptors of its listening sockets."""
        return self._sockets.fds

    @property
    def connections(self) -> int:
        """How many clients have now."""
        return len(self._connections)

    def stop_accepting(self) -> None:
        """Take no more connections. Those that are there go on."""
        self._sockets.stop_accepting()

    async def drain(self, seconds: float) -> None:
        """Leave and shut, end what rests, and wait for what runs, so long at most."""
        self.is_draining = True
        await self._sockets.wait_closed()
        for connection in list(self._connections):
            if connection.is_idle:
                connection.close()
        try:
            async with asyncio.timeout(seconds):
                await self._wait_idle()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Cut what is left."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._sockets.wait_closed()
        while self._connections:
            self._all_closed.clear()
            for connection in list(self._connections):
                connection.abort()
            await self._all_closed.wait()
        await self._wait_idle()

    # --- see gateway.http_server.connection.ConnectionOwner -----------------------------------------------------

    def on_connection_open(self, connection: ClientConnection) -> bool:
        """See Owner."""
        limits, at = self.limits, connection.peer
        here = self._connections_per_address[at] = self._connections_per_address.get(at, 0) + 1
        room = not self._is_closed and (
            limits.max_per_address is None or here <= limits.max_per_address
        )
        room = room and (len(self._connections) < limits.max_connections or self._evict_idle())
        self._connections[connection] = self._idle_connections[connection] = None
        return room

    def on_connection_close(self, connection: ClientConnection) -> None:
        """See Owner."""
        del self._connections[connection]
        self._idle_connections.pop(connection, None)
        self._connections_per_address[connection.peer] -= 1
        if not self._connections_per_address[connection.peer]:
            del self._connections_per_address[connection.peer]
        if not self._connections:
            self._all_closed.set()

    def on_request_start(self, connection: ClientConnection) -> None:
        """See Owner."""
        if connection in self._idle_connections:
            del self._idle_connections[connection]
        self._active_requests += 1

    def on_request_end(self, connection: ClientConnection) -> None:
        """See Owner."""
        if connection in self._connections:
            self._idle_connections[connection] = None
        self._active_requests -= 1
        if self._idle_event is not None and not self._active_requests:
            self._idle_event.set()

    async def _wait_idle(self) -> None:
        """Wait until nothing is served."""
        self._idle_event = self._idle_event or asyncio.Event()
        while self._active_requests:
            self._idle_event.clear()
            await self._idle_event.wait()

    def _evict_idle(self) -> bool:
        """Let the one go that has waited longest for a request; whether there is one."""
        for one in self._idle_connections:
            del self._idle_connections[one]
            one.abort()
            return True
        return False

    def _check_timeouts(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of those who take too long."""
        self.loop_time = loop.time()
        for connection in list(self._connections):
            connection.check_timeouts()
        self._timer = loop.call_later(self.limits.check_interval, self._check_timeouts, loop)
