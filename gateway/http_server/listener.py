"""The native HTTP/1.1 server over asyncio transports."""

import asyncio
from collections import Counter
from typing import Final

from backends.write_batching import WriteBatcher
from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.connection import ClientConnection, HandleRequest
from gateway.http_server.overload import ConnectionTracker, compute_check_interval
from gateway.http_server.sockets import ListenSockets
from gateway.http_server.turn_slices import TurnGate, TurnQueue, iterate_in_turns
from gateway.memory import MemoryBudget

_MAX_TURN_CHECKS: Final = 500
"""Connections whose timeouts are checked in one turn of the event loop."""


class Listener(ListenSockets):
    """One listening address.

    ``handle_request`` runs for each request in a task, which is cancelled if the client
    disconnects. It can be replaced at any time; running requests keep the old one.
    ``memory`` is shared by the listeners of a process.
    """

    def __init__(
        self,
        handle_request: HandleRequest,
        limits: ServerLimitsConfig,
        memory: MemoryBudget | None = None,
    ) -> None:
        memory = memory or MemoryBudget()
        super().__init__(self._build_connection, ConnectionTracker(limits), memory)
        self.handle_request = handle_request
        self.is_draining = False
        """Whether each response closes its connection."""
        self.memory = memory
        self.memory.listeners.add(self._tracker)
        self._active_requests = 0
        self._idle_event: asyncio.Event | None = None
        """Set when no request runs; created by the first waiter."""
        self._closed_event = asyncio.Event()
        """Set when a connection is closed."""
        self.loop_time = 0.0
        self.write_batcher = WriteBatcher(asyncio.get_running_loop)
        self.cancellations = TurnQueue()
        self.stream_turns = TurnGate()
        self.malformed_by_status = Counter[int]()
        """Inputs that are not valid requests, by the status of the response."""
        self._connections: dict[ClientConnection, None] = {}
        """Those that are past their TLS handshake."""
        self._timer: asyncio.Handle | None = None
        """Of the next check of timeouts, or of its next slice."""

    def __repr__(self) -> str:
        return f"<Listener {self._active_requests} requests running, {self._tracker!r}>"

    @property
    def limits(self) -> ServerLimitsConfig:
        """The limits of new connections."""
        return self._tracker.limits

    def set_limits(self, limits: ServerLimitsConfig) -> None:
        """Set the limits of new connections."""
        self._tracker.limits = limits

    async def drain(self, seconds: float) -> None:
        """Stop accepting, close idle connections, wait ``seconds`` for running requests.

        Also for clients that still read their responses.
        """
        self.is_draining = True
        await self.close_sockets()
        await self.close_idle()
        try:
            async with asyncio.timeout(seconds):
                await self._wait_idle()
                await self._wait_sent()
        except TimeoutError:
            pass

    async def close_idle(self) -> None:
        """Close the connections without a request."""
        async for connection in iterate_in_turns(self._connections):
            if connection.is_idle:
                connection.close()

    async def close(self) -> None:
        """Close the remaining connections at once."""
        if self._timer is not None:
            self._timer.cancel()
        await self.close_sockets()
        await self._tracker.close()
        self.memory.listeners.discard(self._tracker)
        await self._wait_idle()

    async def _wait_idle(self) -> None:
        """Wait until no request runs."""
        self._idle_event = self._idle_event or asyncio.Event()
        while self._active_requests:
            self._idle_event.clear()
            await self._idle_event.wait()

    async def _wait_sent(self) -> None:
        """Wait until the clients have read what was written to them."""
        while any(connection.is_sending for connection in self._connections):
            self._closed_event.clear()
            await self._closed_event.wait()

    def _on_listen(self, loop: asyncio.AbstractEventLoop) -> None:
        self._check_timeouts(loop)

    def _build_connection(self) -> ClientConnection:
        return ClientConnection(self, asyncio.get_running_loop())

    # --- ConnectionOwner --------------------------------------------------------------------------

    def on_connection_open(self, connection: ClientConnection) -> bool:
        """See ``ConnectionOwner``."""
        self._connections[connection] = None
        return self._tracker.admit(connection)

    def on_connection_close(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        del self._connections[connection]
        self._tracker.waiting.pop(connection, None)
        self._tracker.release(connection)
        self._closed_event.set()

    def on_request_start(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        self._tracker.idle.pop(connection, None)
        self._active_requests += 1

    def on_body_start(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        self._tracker.waiting[connection] = None

    def on_body_end(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        self._tracker.waiting.pop(connection, None)

    def on_body_overdue(self) -> None:
        """See ``ConnectionOwner``."""
        self._tracker.count_refused("slow_body")

    def on_writing_paused(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        self._tracker.waiting[connection] = None

    def on_writing_resumed(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        self._tracker.waiting.pop(connection, None)

    def on_request_end(self, connection: ClientConnection) -> None:
        """See ``ConnectionOwner``."""
        if connection in self._connections:
            self._tracker.idle[connection] = None
        self._active_requests -= 1
        if self._idle_event is not None and not self._active_requests:
            self._idle_event.set()

    def _check_timeouts(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the timeouts of all connections."""
        self.loop_time = loop.time()
        self._check_slice(loop, list(self._connections))

    def _check_slice(
        self, loop: asyncio.AbstractEventLoop, unchecked: list[ClientConnection]
    ) -> None:
        """Check some connections, and the others in the next turns."""
        for connection in unchecked[-_MAX_TURN_CHECKS:]:
            connection.check_timeouts()
        del unchecked[-_MAX_TURN_CHECKS:]
        if unchecked:
            self._timer = loop.call_soon(self._check_slice, loop, unchecked)
            return
        self._timer = loop.call_later(
            compute_check_interval(self.limits), self._check_timeouts, loop
        )
