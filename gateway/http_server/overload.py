"""Overload protection: limits of connections, and of the time of bodies.

Their memory is limited by ``gateway.memory``.
"""

import asyncio
import ipaddress
import logging
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Final, Protocol

from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.turn_slices import iterate_in_turns
from protocols.core.units import get_client_network

log = logging.getLogger("interlingua")


BODY_RATE_GRACE: Final = 20.0
"""Seconds before the minimum rate of a request body applies."""


def compute_check_interval(limits: ServerLimitsConfig) -> float:
    """Seconds between timeout checks; a timeout fires at most two intervals late."""
    return min(1.0, limits.header_timeout / 4, limits.body_timeout / 4, limits.idle_timeout / 4)


def is_body_overdue(limits: ServerLimitsConfig, elapsed: float, size: int) -> bool:
    """Whether ``size`` bytes of a body are too few after ``elapsed`` seconds."""
    allowed = BODY_RATE_GRACE + size / limits.min_body_rate
    return elapsed > min(allowed, limits.body_total_timeout)


_LOG_INTERVAL: Final = 1.0
"""Seconds between two log lines about refused connections."""
_EVICTION_CANDIDATES: Final = 64
"""How many of those that wait longest are compared for the slowest one."""


class TrackedConnection(Protocol):
    """A connection that counts towards the limits."""

    peer: str
    """The client's address."""

    def abort(self) -> None:
        """Close at once, and release the memory that is held for the client."""


class WaitingConnection(TrackedConnection, Protocol):
    """A connection that waits for its client, which sends a body or does not read a response."""

    def get_rate(self) -> float | None:
        """Bytes per second that the client sends or reads; None if that is not known yet."""


class TrustedProxies:
    """The networks of proxies that may say who their client is."""

    def __init__(self, networks: Sequence[str] = ()) -> None:
        self._networks = [ipaddress.ip_network(one) for one in networks]

    def __bool__(self) -> bool:
        return bool(self._networks)

    def has(self, address: str) -> bool:
        """Whether this is the address of a trusted proxy."""
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:  # a Unix socket
            return False
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self._networks)


class ConnectionTracker:
    """Counts the connections of one listener, and refuses those beyond its limits.

    At the connection limit, a new connection replaces the one that is idle longest, or else the one
    whose client sends a body, or reads a response, the slowest.
    """

    def __init__(self, limits: ServerLimitsConfig) -> None:
        self.limits = limits
        self.trusted = TrustedProxies()
        """The proxies, whose connections are not limited by address."""
        self.connections: dict[TrackedConnection, str | bytes] = {}
        """Open connections and their networks."""
        self.idle: dict[TrackedConnection, None] = {}
        """Connections without a request, the one that is idle longest first."""
        self.waiting: dict[WaitingConnection, None] = {}
        """Connections that wait for their client, the one that waits longest first."""
        self.refused_by_reason = Counter[str]()
        """Connections that were closed at a limit."""
        self._per_network: dict[str | bytes, int] = {}
        self._unlogged = Counter[str]()
        self._log_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        """Whether connections that were accepted before closing are rejected."""
        self._all_closed = asyncio.Event()

    def __repr__(self) -> str:
        return (
            f"<ConnectionTracker {len(self.connections)} connections, {len(self.idle)} idle,"
            f" {len(self.waiting)} waiting for their client>"
        )

    def admit(self, connection: TrackedConnection) -> bool:
        """Count a connection; returns False if it must be closed. ``release`` it in any case."""
        limits, network = self.limits, get_client_network(connection.peer)
        count = self._per_network[network] = self._per_network.get(network, 0) + 1
        max_count = limits.connections_per_address
        if max_count is None and not _is_loopback(connection.peer):
            max_count = max(limits.connections // 2, 1)
        if self.trusted and self.trusted.has(connection.peer):
            max_count = None
        is_admitted = not self._is_closed
        if is_admitted and max_count is not None and count > max_count:
            is_admitted = False
            self.count_refused("address")
        elif is_admitted and len(self.connections) >= limits.connections:
            is_admitted = self._evict_connection()
        self.connections[connection] = network
        if is_admitted:
            self.idle[connection] = None
        return is_admitted

    def release(self, connection: TrackedConnection) -> None:
        """Remove a closed connection."""
        network = self.connections.pop(connection)
        self.idle.pop(connection, None)
        self._per_network[network] -= 1
        if not self._per_network[network]:
            del self._per_network[network]
        if not self.connections:
            self._all_closed.set()

    def count_refused(self, reason: str) -> None:
        """Count a connection that is closed at a limit; logged once per second."""
        self.refused_by_reason[reason] += 1
        self._unlogged[reason] += 1
        if self._log_timer is None:
            loop = asyncio.get_running_loop()
            self._log_timer = loop.call_later(_LOG_INTERVAL, self._log_refused)

    async def close(self) -> None:
        """Close all connections at once, also those that are still being accepted."""
        self._is_closed = True
        while self.connections:
            self._all_closed.clear()
            async for connection in iterate_in_turns(self.connections):
                if connection in self.connections:
                    connection.abort()
            await self._all_closed.wait()
        if self._log_timer is not None:
            self._log_timer.cancel()
            self._log_refused()

    def _evict_connection(self) -> bool:
        """Close one connection for a new one; returns whether there is one to close."""
        if self.close_idle_longest():
            return True
        if (slowest := self._find_slowest()) is None:
            self.count_refused("connections")
            return False
        self._close_waiting(slowest[1], "slow_evicted")
        return True

    @property
    def min_rate(self) -> float:
        """See ``gateway.memory.ClosableConnections``."""
        return self.limits.min_body_rate

    def get_slowest_rate(self) -> float | None:
        """See ``gateway.memory.ClosableConnections``."""
        slowest = self._find_slowest()
        return None if slowest is None else slowest[0]

    def close_slowest(self) -> None:
        """See ``gateway.memory.ClosableConnections``."""
        if (slowest := self._find_slowest()) is not None:
            self._close_waiting(slowest[1], "memory_evicted")

    def close_idle_longest(self) -> bool:
        """See ``gateway.memory.ClosableConnections``."""
        if (idle := next(iter(self.idle), None)) is None:
            return False
        del self.idle[idle]
        self.count_refused("idle_evicted")
        idle.abort()
        return True

    def _find_slowest(self) -> tuple[float, WaitingConnection] | None:
        """The slowest of those that wait longest, and its rate."""
        oldest = islice(self.waiting, _EVICTION_CANDIDATES)
        rates = ((connection.get_rate(), connection) for connection in oldest)
        measured = [(rate, connection) for rate, connection in rates if rate is not None]
        return min(measured, key=lambda pair: pair[0]) if measured else None

    def _close_waiting(self, connection: WaitingConnection, reason: str) -> None:
        del self.waiting[connection]
        self.count_refused(reason)
        connection.abort()

    def _log_refused(self) -> None:
        self._log_timer = None
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(self._unlogged.items()))
        self._unlogged.clear()
        log.warning("connections closed at a limit within %g s: %s", _LOG_INTERVAL, counts)


def get_peer_address(transport: asyncio.BaseTransport) -> str:
    """The client's address; "" for a Unix socket."""
    peer = transport.get_extra_info("peername")
    return peer[0] if isinstance(peer, tuple) else ""


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address in ("::1", "")
