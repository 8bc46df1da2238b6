"""The memory that a process holds for its clients: one budget for whatever holds it.

Bodies of requests and the stored responses that they refer to, responses of workers until they are
complete, responses that their clients do not read, recordings until they are written, and
connections take from it. At its end the connections that make the least progress are closed, and
what finds no room all the same is refused.
"""

from collections import Counter
from typing import TYPE_CHECKING, Final, Literal, Protocol

from msgspec import Struct

from protocols.core.errors import MemoryExhausted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MemoryUse = Literal["bodies", "responses", "recordings", "connections"]
"""What memory is held for. ``bodies`` also are what they refer to, and what is sent on of them;
``responses`` are those that workers have not completed and those that clients have not read."""

_MAX_CLOSED: Final = 64
"""How many connections are closed at most to make room once."""
_IDLE_PART: Final = 4
"""Idle connections are closed if all connections hold more than this part of the budget."""


class MemoryStatus(Struct, frozen=True):
    """The budget in bytes, for the admin API."""

    limit: int
    used: int
    uses: dict[str, int]
    """What is used for bodies, responses, recordings and connections."""
    refused: int
    """How often there was no room."""
    closed: int
    """Connections that were closed to make room."""


def merge_memory(statuses: "Sequence[MemoryStatus]") -> MemoryStatus:
    """The budgets of several processes together."""
    uses = Counter[str]()
    for one in statuses:
        uses.update(one.uses)
    return MemoryStatus(
        limit=sum(one.limit for one in statuses),
        used=sum(one.used for one in statuses),
        uses=dict(uses),
        refused=sum(one.refused for one in statuses),
        closed=sum(one.closed for one in statuses),
    )


class ClosableConnections(Protocol):
    """The connections of one listener."""

    @property
    def min_rate(self) -> float:
        """Bytes per second from which on a client is not slow."""

    def get_slowest_rate(self) -> float | None:
        """Bytes per second of the slowest client; None if none is known to be slow."""

    def close_slowest(self) -> None:
        """Close the connection of the slowest client, and release its memory at once."""

    def close_idle_longest(self) -> bool:
        """Close the connection that is idle longest, and release its memory at once.

        Returns whether there was one.
        """


class MemoryBudget:
    """What all listeners of a process hold together. Used by the event loop's thread only."""

    def __init__(self, limit: int = 512 << 20) -> None:
        """``limit`` may be changed at any time."""
        self.limit = limit
        self.listeners = set[ClosableConnections]()
        """Whose connections may be closed."""
        self.measure_waiting: Callable[[], int] | None = None
        """Returns the bytes of recordings that wait to be written, which another thread does."""
        self._uses: dict[MemoryUse, int] = dict.fromkeys(
            ("bodies", "responses", "recordings", "connections"), 0
        )
        self._taken = 0
        self._refused = self._closed = 0

    def __repr__(self) -> str:
        return f"<MemoryBudget {self.used} of {self.limit} bytes>"

    @property
    def used(self) -> int:
        """The bytes in use."""
        waiting = self.measure_waiting
        return self._taken if waiting is None else self._taken + waiting()

    def get_use(self, use: MemoryUse) -> int:
        """The bytes in use for one purpose."""
        waiting = self.measure_waiting if use == "recordings" else None
        return self._uses[use] if waiting is None else self._uses[use] + waiting()

    def has_room(self, size: int) -> bool:
        """Whether ``size`` more bytes fit."""
        return self.used + size <= self.limit

    def try_take(self, use: MemoryUse, size: int) -> bool:
        """Take so many bytes, if there is room or slow connections can be closed for it."""
        waiting = self.measure_waiting
        used = self._taken if waiting is None else self.used
        if used + size > self.limit and not self._make_room(size):
            self._refused += 1
            return False
        self._taken += size
        self._uses[use] += size
        return True

    def reserve(self, use: MemoryUse, size: int) -> None:
        """Take so many bytes; give them back if negative. Raises MemoryExhausted if positive."""
        if size <= 0:  # beyond the limit, too: a reload may have lowered it
            self.release(use, -size)
        elif not self.try_take(use, size):
            raise build_memory_overload()

    def release(self, use: MemoryUse, size: int) -> None:
        """Give back so many bytes that were taken."""
        self._taken -= size
        self._uses[use] -= size

    def ensure_room(self, size: int) -> None:
        """Make room for bytes that a client has announced, which takes none of it yet.

        Only clients that are slow are closed for an announcement. Raises MemoryExhausted.
        """
        if self.used + size > self.limit and not self._make_room(size, only_slow=True):
            self._refused += 1
            raise build_memory_overload()

    def record_held(self, use: MemoryUse, size: int) -> None:
        """Count bytes that are held already, or no longer if negative.

        Beyond the limit, slow connections are closed.
        """
        self._taken += size
        self._uses[use] += size
        if size > 0 and self.used > self.limit:
            self._make_room(0)

    def get_status(self) -> MemoryStatus:
        """The budget now."""
        uses: dict[str, int] = {use: self.get_use(use) for use in self._uses}
        return MemoryStatus(self.limit, self.used, uses, self._refused, self._closed)

    def _make_room(self, size: int, *, only_slow: bool = False) -> bool:
        """Close slow connections until so many bytes fit; returns whether they do."""
        for _ in range(_MAX_CLOSED):
            if self.has_room(size):
                return True
            # A connection that sends a body just now may still be counted as idle.
            if not self._close_slowest(may_be_idle=not size, only_slow=only_slow):
                return False
            self._closed += 1
        return self.has_room(size)

    def _close_slowest(self, *, may_be_idle: bool, only_slow: bool) -> bool:
        """Close one connection; returns whether there was one to close.

        A client that is not slow comes last.
        """
        rates = ((one.get_slowest_rate(), one) for one in self.listeners)
        known = [(rate, one) for rate, one in rates if rate is not None]
        slow = [(rate, one) for rate, one in known if rate < one.min_rate]
        closes_idle = may_be_idle and self._uses["connections"] * _IDLE_PART > self.limit
        if not slow and closes_idle and any(one.close_idle_longest() for one in self.listeners):
            return True
        candidates = slow if only_slow else slow or known
        if not candidates:
            return False
        min(candidates, key=lambda pair: pair[0])[1].close_slowest()
        return True


def build_memory_overload() -> MemoryExhausted:
    """The error of a request that does not fit into the budget."""
    return MemoryExhausted(
        "the gateway has no memory for more requests at the moment (limits.memory)"
    )


class ResponseAccount:
    """What a request in the background holds of a worker's response."""

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._held = 0

    def reserve(self, size: int) -> None:
        """Take so many bytes; give them back if negative. Raises MemoryExhausted."""
        self._memory.reserve("responses", size)
        self._held += size

    def release(self) -> None:
        """Give everything back."""
        self.reserve(-self._held)
