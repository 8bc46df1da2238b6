"""Write batching: the writes of one turn of the event loop, sent together.

A write wakes the reader at the other end, which costs the sender more than the write itself. Where
many connections end in one process (clients behind a proxy, a pool's connections to a worker),
batching wakes that process once. After a turn with a single write, the next few are sent at once.
"""

from collections.abc import Callable
from typing import Final, Protocol

_MAX_BATCH: Final = 16
"""The largest batch, since the first write waits for the others."""
_UNBATCHED_WRITES: Final = 8
"""Writes that are sent at once after a turn with a single write."""


class Transport(Protocol):
    """A transport, as far as the batcher uses it."""

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""

    def write(self, data: bytes) -> None:
        """Send ``data``."""


class SupportsCallSoon(Protocol):
    """An event loop, as far as the batcher uses it."""

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call ``callback`` in the next turn."""


class WriteBatcher:
    """Buffers writes until the end of the loop's turn, in order.

    Call ``flush`` before any other operation on a transport that was written to.
    """

    __slots__ = ("_call_soon", "_flush_scheduled", "_loop", "_pending", "_unbatched_left")

    def __init__(self, loop: Callable[[], SupportsCallSoon]) -> None:
        """``loop`` returns the running event loop."""
        self._loop = loop
        self._call_soon: Callable[[Callable[[], None]], object] | None = None
        """Of the event loop, once it is known: asking for it takes a system call."""
        self._pending: list[tuple[Transport, bytes]] = []
        self._unbatched_left = 0
        """How many more writes are sent at once."""
        self._flush_scheduled = False
        """Whether ``_end_turn`` is scheduled."""

    def __repr__(self) -> str:
        return f"<WriteBatcher {len(self._pending)} writes pending>"

    def send(self, transport: Transport, data: bytes) -> None:
        """Write ``data``; dropped if the transport is closing by then."""
        if self._unbatched_left:
            self._unbatched_left -= 1
            transport.write(data)
            return
        writes = self._pending
        writes.append((transport, data))
        if len(writes) >= _MAX_BATCH:
            self.flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            if self._call_soon is None:
                self._call_soon = self._loop().call_soon
            self._call_soon(self._end_turn)

    def flush(self) -> None:
        """Send the buffered writes."""
        writes, self._pending = self._pending, []
        for transport, data in writes:
            if not transport.is_closing():
                transport.write(data)

    def _end_turn(self) -> None:
        """Called at the end of the turn."""
        self._flush_scheduled = False
        if len(self._pending) == 1:
            self._unbatched_left = _UNBATCHED_WRITES
        self.flush()
