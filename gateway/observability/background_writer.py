"""A thread that writes what it is given. Whoever gives it something never waits."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

ItemT = TypeVar("ItemT")

_BATCH_DELAY: Final = 0.05
"""Seconds from the first of a batch until it is written, and from one batch to the next: what comes
meanwhile goes with it, and wakes nobody."""
_MAX_BATCH: Final = 1000


class BackgroundWriter(Generic[ItemT]):
    """Writes in batches, in the order in which things came."""

    def __init__(
        self,
        name: str,
        most: int,
        write: Callable[[Sequence[ItemT]], int],
        linger: float = _BATCH_DELAY,
    ) -> None:
        """So many may wait at ``most``. ``write`` gives how many of a batch it had to give up."""
        self._batch_delay = linger
        self._rejected = 0
        self._abandoned = 0
        """Only the thread changes it, as all others do what was refused."""
        self.closing = threading.Event()
        """What can't be written now must be given up."""
        self._max_waiting = most
        self._write = write
        self._waiting = deque[ItemT]()
        self._idle = False
        """The thread sleeps until it is woken."""
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._write_batches, name=name, daemon=True)

    @property
    def dropped(self) -> int:
        """How many were not written: there was no room for them, or they were given up."""
        return self._rejected + self._abandoned

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def enqueue(self, item: ItemT) -> None:
        """Have this written, if there is room. From any thread; it must not change any more."""
        if len(self._waiting) >= self._max_waiting:
            self._rejected += 1
            return
        self._waiting.append(item)
        if self._idle:
            self._idle = False
            self._wake.set()

    def close(self, within: float) -> bool:
        """Write what waits, for so many seconds at most, and end; False if it was not all."""
        self.closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(within)
        return not self._thread.is_alive()

    def _write_batches(self) -> None:
        while not self.closing.wait(self._batch_delay) or self._waiting:
            if not self._waiting:
                self._wait_for_items()
                continue
            while self._waiting:
                some = range(min(_MAX_BATCH, len(self._waiting)))
                self._abandoned += self._write([self._waiting.popleft() for _ in some])

    def _wait_for_items(self) -> None:
        """Until something comes, or the end."""
        self._idle = True
        if not self._waiting:  # looked at after the flag was set: what comes later wakes it
            self._wake.wait()
        self._idle = False
        self._wake.clear()
