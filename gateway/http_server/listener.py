"""The native HTTP/1.1 server: asyncio transports, parsed by httptools (llhttp)."""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from backends.aio import WriteBatcher
from gateway.http_server.connection import ClientConnection, ConnectionLimits, HandleRequest
from gateway.http_server.sockets import ListenSockets

# The listener interface, and its implementations by configured name.

LISTENER_CLASSES: Final[Mapping[str, str]] = {
    "native": "gateway.http_server.listener:NativeListener",
    "aiohttp": "gateway.http_server.aiohttp_listener:AiohttpListener",
}
"""``module:class`` by configured name; imported on first use."""


class Listener(Protocol):
    """One listening address.

    ``handle_request`` runs for each request in a task, which is cancelled if the client
    disconnects. It can be replaced at any time; running requests keep the old one.
    """

    handle_request: HandleRequest
    is_draining: bool
    """Whether each response closes its connection."""

    def set_limits(self, limits: ConnectionLimits) -> None:
        """Set the limits of new connections."""

    def set_tls_context(self, tls: ssl.SSLContext | None) -> None:
        """Set the certificate of new connections; None without TLS."""

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        reuse_port: bool = False,
        given: Sequence[socket.socket] = (),
    ) -> int:
        """Bind; returns the port, which the system chooses for 0.

        With ``reuse_port``, other processes may bind it too. If sockets are ``given``, they are
        used and nothing is bound.
        """

    @property
    def socket_fds(self) -> Sequence[int]:
        """File descriptors of the listening sockets."""

    @property
    def connections(self) -> int:
        """Open client connections."""

    @property
    def malformed_by_status(self) -> Mapping[int, int]:
        """Inputs that are not valid requests, by the status of the response."""

    def stop_accepting(self) -> None:
        """Accept no more connections; open connections stay."""

    async def drain(self, seconds: float) -> None:
        """Stop accepting, close idle connections, wait ``seconds`` for running requests."""

    async def close(self) -> None:
        """Close the remaining connections at once."""


class NativeListener:
    """A ``Listener`` over asyncio transports.

    At the connection limit, a new connection replaces the one that is idle longest. Connections
    beyond the limit per address are closed at once.
    """

    def __init__(self, handle_request: HandleRequest, limits: ConnectionLimits) -> None:
        self.handle_request = handle_request
        self.is_draining = False
        self.loop_time = 0.0
        self.limits = limits
        self.write_batcher = WriteBatcher(asyncio.get_running_loop)
        self._connections: dict[ClientConnection, None] = {}
        self._connections_per_address: dict[str, int] = {}
        """Open connections by client address."""
        self._idle_connections: dict[ClientConnection, None] = {}
        """Connections without a request, the one that is idle longest first."""
        self._sockets = ListenSockets(lambda: ClientConnection(self, asyncio.get_running_loop()))
        self.malformed_by_status = Counter[int]()
        """See ``Listener``."""
        self._active_requests = 0
        self._idle_event: asyncio.Event | None = None
        """Set when no request runs; created by the first waiter."""
        self._is_closed = False
        """Whether connections that were accepted before closing are rejected."""
        self._all_closed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def set_limits(self, limits: ConnectionLimits) -> None:
        """Set the limits of new connections."""
        self.limits = limits

    def set_tls_context(self, tls: ssl.SSLContext | None) -> None:
        """Set the certificate of new connections; None without TLS."""
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
        """See ``Listener``."""
        loop = asyncio.get_running_loop()
        self.loop_time = loop.time()
        bound = await self._sockets.listen(host, port, tls, reuse_port=reuse_port, given=given)
        self._timer = loop.call_later(self.limits.check_interval, self._check_timeouts, loop)
        return bound

    @property
    def socket_fds(self) -> Sequence[int]:
        """File descriptors of the listening sockets."""
        return self._sockets.fds

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self._connections)

    def stop_accepting(self) -> None:
        """Accept no more connections; open connections stay."""
        self._sockets.stop_accepting()

    async def drain(self, seconds: float) -> None:
        """Stop accepting, close idle connections, wait ``seconds`` for running requests."""
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
        """Close the remaining connections at once."""
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

    # --- ConnectionOwner --------------------------------------------------------------------------

    def on_connection_open(self, connection: ClientConnection) -> bool:
        """See ``ConnectionOwner``."""
        limits, at = self.limits, connection.peer
        here = self._connections_per_address[at] = self._connections_per_address.get(at, 0) + 1
        room = not self._is_closed and (
            limits.max_per_address is None or here <= limits.max_per_address
        )
        room = room and (len(self._connections) < limits.max_connections or self._evict_idle())
        self._connections[connection] = self._idle_connections[connection] = None
        return room

    def on_connection_close(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        del self._connections[connection]
        self._idle_connections.pop(connection, None)
        self._connections_per_address[connection.peer] -= 1
        if not self._connections_per_address[connection.peer]:
            del self._connections_per_address[connection.peer]
        if not self._connections:
            self._all_closed.set()

    def on_request_start(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        if connection in self._idle_connections:
            del self._idle_connections[connection]
        self._active_requests += 1

    def on_request_end(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        if connection in self._connections:
            self._idle_connections[connection] = None
        self._active_requests -= 1
        if self._idle_event is not None and not self._active_requests:
            self._idle_event.set()

    async def _wait_idle(self) -> None:
        """Wait until no request runs."""
        self._idle_event = self._idle_event or asyncio.Event()
        while self._active_requests:
            self._idle_event.clear()
            await self._idle_event.wait()

    def _evict_idle(self) -> bool:
        """Close the connection that is idle longest; returns whether there is one."""
        for one in self._idle_connections:
            del self._idle_connections[one]
            one.abort()
            return True
        return False

    def _check_timeouts(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the timeouts of all connections."""
        self.loop_time = loop.time()
        for connection in list(self._connections):
            connection.check_timeouts()
        self._timer = loop.call_later(self.limits.check_interval, self._check_timeouts, loop)
