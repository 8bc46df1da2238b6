"""A writer thread with a bounded queue. Adding an item never blocks."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

ItemT = TypeVar("ItemT")

_BATCH_DELAY: Final = 0.05
"""Seconds to wait for more items before a batch is written."""
_MAX_BATCH: Final = 1000


class BackgroundWriter(Generic[ItemT]):
    """Writes items in batches, in order."""

    def __init__(
        self,
        name: str,
        max_waiting: int,
        write: Callable[[Sequence[ItemT]], int],
        batch_delay: float = _BATCH_DELAY,
        max_idle: float | None = None,
    ) -> None:
        """Queue at most ``max_waiting`` items. ``write`` returns how many of a batch it dropped.

        With ``max_idle`` it gets an empty batch before the thread waits for items, and again after
        so many seconds without any.
        """
        self._max_idle = max_idle
        self._batch_delay = batch_delay
        self._rejected = 0
        self._abandoned = 0
        """Changed by the writer thread only; ``_rejected`` by all other threads."""
        self.closing = threading.Event()
        """Set once items that cannot be written now must be dropped."""
        self._max_waiting = max_waiting
        self._write = write
        self._waiting = deque[ItemT]()
        self._idle = False
        """Whether the thread waits for ``_wake``."""
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._write_batches, name=name, daemon=True)

    def __repr__(self) -> str:
        name = self._thread.name
        return f"<BackgroundWriter {name}, {len(self._waiting)} waiting, {self.dropped} dropped>"

    @property
    def dropped(self) -> int:
        """Items not written: the queue was full, or ``write`` dropped them."""
        return self._rejected + self._abandoned

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def enqueue(self, item: ItemT) -> None:
        """Queue an item if there is room; thread-safe. The item must not change afterwards."""
        if len(self._waiting) >= self._max_waiting:
            self._rejected += 1
            return
        self._waiting.append(item)
        if self._idle:
            self._idle = False
            self._wake.set()

    def close(self, within: float) -> bool:
        """Write the queued items within ``within`` seconds and stop; False if some are left."""
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
                batch = range(min(_MAX_BATCH, len(self._waiting)))
                self._abandoned += self._write([self._waiting.popleft() for _ in batch])

    def _wait_for_items(self) -> None:
        """Block until an item arrives, the writer closes or the longest idle time is over."""
        if self._max_idle is not None:
            self._abandoned += self._write(())
        self._idle = True
        # Checked after the flag is set: a later item sets the event. So does closing.
        if not self._waiting and not self.closing.is_set():
            self._wake.wait(self._max_idle)
        self._idle = False
        self._wake.clear()
