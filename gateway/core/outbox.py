"""What is written to many connections in one turn of the loop, sent together. Pure.

A write wakes who waits for it, which takes the sender longer than the write itself. Where many end
at one place, as clients behind a proxy do, and a pool's connections to a worker, it is woken once.
"""

from collections.abc import Callable
from typing import Final, Protocol

_MAX_BATCH: Final = 16
"""Writes that wait at a time: the first waits for as long as the others are made."""
_UNBATCHED_WRITES: Final = 8
"""Writes that are not held back after a turn that had only one: it would be another turn for each.
"""


class Transport(Protocol):
    """One connection's way out."""

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""

    def write(self, data: bytes) -> None:
        """Send it."""


class SupportsCallSoon(Protocol):
    """What has turns."""

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call it in the next one."""


class WriteBatcher:
    """Holds back what is written until the turn's end, and keeps its order.

    Whoever does anything else with a transport that was written to calls ``flush`` before.
    """

    __slots__ = ("_flush_scheduled", "_loop", "_pending", "_unbatched_left")

    def __init__(self, loop: Callable[[], SupportsCallSoon]) -> None:
        """``loop`` gives the one that runs."""
        self._loop = loop
        self._pending: list[tuple[Transport, bytes]] = []
        self._unbatched_left = 0
        """Writes that are sent at once, while none waits."""
        self._flush_scheduled = False
        """The turn's end will be told."""

    def send(self, transport: Transport, data: bytes) -> None:
        """Write this. To one that is closing by then it is not sent."""
        if self._unbatched_left:
            self._unbatched_left -= 1
            transport.write(data)
            return
        waiting = self._pending
        waiting.append((transport, data))
        if len(waiting) >= _MAX_BATCH:
            self.flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop().call_soon(self._end_turn)

    def flush(self) -> None:
        """Send what waits."""
        waiting, self._pending = self._pending, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)

    def _end_turn(self) -> None:
        """The turn is over."""
        self._flush_scheduled = False
        if len(self._pending) == 1:
            self._unbatched_left = _UNBATCHED_WRITES
        self.flush()
