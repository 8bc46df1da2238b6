"""What was measured of late, as one number. Pure: the moment is a parameter, in seconds."""

import math
from collections import deque
from typing import Final

_WINDOW_SLOTS: Final = 10


class PeakEwma:
    """A mean of seconds in which the latest count most, and a rise counts at once.

    A worker that grows slow must be seen from its first slow answer, and one that grows fast may
    take its time: a larger value replaces the mean, a smaller one only pulls at it. ``memory`` is
    how long (seconds) a value keeps a third of its worth. With nothing new the mean fades to
    nothing, so that a worker which nobody asks any more gets another chance.
    """

    def __init__(self, memory: float = 10.0) -> None:
        self._decay_seconds = memory
        self._mean: float | None = None
        self._updated_at = 0.0

    def add(self, now: float, seconds: float) -> None:
        """One more value."""
        if self._mean is None or seconds >= self._mean:
            self._mean = seconds
        else:
            kept = self._decay_mean(now)
            self._mean = self._mean * kept + seconds * (1.0 - kept)
        self._updated_at = now

    def get_value(self, now: float) -> float | None:
        """The mean, faded by the time since the last value; None when there was none."""
        return None if self._mean is None else self._mean * self._decay_mean(now)

    def _decay_mean(self, now: float) -> float:
        return math.exp((self._updated_at - now) / self._decay_seconds)


class SlidingWindowCounter:
    """How often something happened in the last ``window`` seconds, give or take a tenth of them."""

    __slots__ = (
        "_current_slot",
        "_earlier_slots",
        "_slot_end",
        "_slot_number",
        "_slot_seconds",
        "_slots",
    )

    def __init__(self, window: float) -> None:
        self._slot_seconds = window / _WINDOW_SLOTS
        self._slots: deque[tuple[float, int]] = deque()
        """The number and the count of each that is over and not yet too old."""
        self._earlier_slots = 0
        """How often in these."""
        self._slot_number = 0.0
        self._current_slot = 0
        """How often in the slot that lasts."""
        self._slot_end = -math.inf
        """When that is over."""

    def add(self, now: float) -> None:
        """It happened once more."""
        if now >= self._slot_end:
            self._advance_slot(now)
        self._current_slot += 1

    def count(self, now: float) -> int:
        """How often."""
        if now >= self._slot_end:
            self._advance_slot(now)
        return self._earlier_slots + self._current_slot

    def clear(self) -> None:
        """Nothing has happened."""
        self._slots.clear()
        self._earlier_slots = self._current_slot = 0

    def _advance_slot(self, now: float) -> None:
        """Begin the slot that ``now`` is in, and let go of those that are too old."""
        if self._current_slot:
            self._slots.append((self._slot_number, self._current_slot))
        self._earlier_slots += self._current_slot
        self._current_slot = 0
        self._slot_number = now // self._slot_seconds
        self._slot_end = (self._slot_number + 1) * self._slot_seconds
        while self._slots and self._slots[0][0] <= self._slot_number - _WINDOW_SLOTS:
            self._earlier_slots -= self._slots.popleft()[1]
