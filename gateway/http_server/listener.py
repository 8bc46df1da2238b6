"""The native HTTP/1.1 server: asyncio transports, parsed by httptools (llhttp)."""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from backends.aio import WriteBatcher
from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.connection import ClientConnection, HandleRequest
from gateway.http_server.overload import BodyBudget, ConnectionTracker, compute_check_interval
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

    def set_limits(self, limits: ServerLimitsConfig) -> None:
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

    @property
    def refused_by_reason(self) -> Mapping[str, int]:
        """Connections that were closed at a limit."""

    def stop_accepting(self) -> None:
        """Accept no more connections; open connections stay."""

    async def drain(self, seconds: float) -> None:
        """Stop accepting, close idle connections, wait ``seconds`` for running requests."""

    async def close(self) -> None:
        """Close the remaining connections at once."""


class NativeListener:
    """A ``Listener`` over asyncio transports."""

    def __init__(
        self,
        handle_request: HandleRequest,
        limits: ServerLimitsConfig,
        body_budget: BodyBudget | None = None,
    ) -> None:
        """``body_budget`` is shared by the listeners of a process."""
        self.handle_request = handle_request
        self.is_draining = False
        self.loop_time = 0.0
        self.body_budget = body_budget or BodyBudget()
        self.write_batcher = WriteBatcher(asyncio.get_running_loop)
        self._connections: dict[ClientConnection, None] = {}
        """Those that are past their TLS handshake."""
        self._tracker = ConnectionTracker(limits)
        self._sockets = ListenSockets(
            lambda: ClientConnection(self, asyncio.get_running_loop()), self._tracker
        )
        self.malformed_by_status = Counter[int]()
        """See ``Listener``."""
        self._active_requests = 0
        self._idle_event: asyncio.Event | None = None
        """Set when no request runs; created by the first waiter."""
        self._timer: asyncio.TimerHandle | None = None

    def set_limits(self, limits: ServerLimitsConfig) -> None:
        """Set the limits of new connections."""
        self._tracker.limits = limits

    @property
    def limits(self) -> ServerLimitsConfig:
        """The limits of new connections."""
        return self._tracker.limits

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
        self._timer = loop.call_later(
            compute_check_interval(self.limits), self._check_timeouts, loop
        )
        return bound

    @property
    def socket_fds(self) -> Sequence[int]:
        """File descriptors of the listening sockets."""
        return self._sockets.fds

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self._tracker.connections)

    @property
    def refused_by_reason(self) -> Mapping[str, int]:
        """Connections that were closed at a limit."""
        return self._tracker.refused_by_reason

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
        if self._timer is not None:
            self._timer.cancel()
        await self._sockets.wait_closed()
        await self._tracker.close()
        await self._wait_idle()

    # --- ConnectionOwner --------------------------------------------------------------------------

    def on_connection_open(self, connection: ClientConnection) -> bool:
        """See ``ConnectionOwner``."""
        self._connections[connection] = None
        return self._tracker.admit(connection)

    def on_connection_close(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        del self._connections[connection]
        self._tracker.receiving.pop(connection, None)
        self._tracker.release(connection)

    def on_request_start(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        idle = self._tracker.idle
        if connection in idle:
            del idle[connection]
        self._active_requests += 1

    def on_body_start(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        self._tracker.receiving[connection] = None

    def on_body_end(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        self._tracker.receiving.pop(connection, None)

    def on_body_overdue(self) -> None:
        """See ``ConnectionOwner``."""
        self._tracker.count_refused("slow_body")

    def on_request_end(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        if connection in self._connections:
            self._tracker.idle[connection] = None
        self._active_requests -= 1
        if self._idle_event is not None and not self._active_requests:
            self._idle_event.set()

    async def _wait_idle(self) -> None:
        """Wait until no request runs."""
        self._idle_event = self._idle_event or asyncio.Event()
        while self._active_requests:
            self._idle_event.clear()
            await self._idle_event.wait()

    def _check_timeouts(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the timeouts of all connections."""
        self.loop_time = loop.time()
        for connection in list(self._connections):
            connection.check_timeouts()
        self._timer = loop.call_later(
            compute_check_interval(self.limits), self._check_timeouts, loop
        )
