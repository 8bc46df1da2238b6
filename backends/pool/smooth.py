"""What was measured of late, as one number. Pure: the moment is a parameter, in seconds."""

import math
from collections import deque
from typing import Final

_SLOTS: Final = 10


class Smoothed:
    """A mean of seconds in which the latest count most, and a rise counts at once.

    A worker that grows slow must be seen from its first slow answer, and one that grows fast may
    take its time: a larger value replaces the mean, a smaller one only pulls at it. ``memory`` is
    how long (seconds) a value keeps a third of its worth. With nothing new the mean fades to
    nothing, so that a worker which nobody asks any more gets another chance.
    """

    def __init__(self, memory: float = 10.0) -> None:
        self._memory = memory
        self._mean: float | None = None
        self._at = 0.0

    def add(self, now: float, seconds: float) -> None:
        """One more value."""
        if self._mean is None or seconds >= self._mean:
            self._mean = seconds
        else:
            kept = self._kept(now)
            self._mean = self._mean * kept + seconds * (1.0 - kept)
        self._at = now

    def value(self, now: float) -> float | None:
        """The mean, faded by the time since the last value; None when there was none."""
        return None if self._mean is None else self._mean * self._kept(now)

    def _kept(self, now: float) -> float:
        return math.exp((self._at - now) / self._memory)


class Recent:
    """How often something happened in the last ``window`` seconds, give or take a tenth of them."""

    __slots__ = ("_before", "_latest", "_number", "_slots", "_span", "_until")

    def __init__(self, window: float) -> None:
        self._span = window / _SLOTS
        self._slots: deque[tuple[float, int]] = deque()
        """The number and the count of each that is over and not yet too old."""
        self._before = 0
        """How often in these."""
        self._number = 0.0
        self._latest = 0
        """How often in the slot that lasts."""
        self._until = -math.inf
        """When that is over."""

    def add(self, now: float) -> None:
        """It happened once more."""
        if now >= self._until:
            self._turn(now)
        self._latest += 1

    def count(self, now: float) -> int:
        """How often."""
        if now >= self._until:
            self._turn(now)
        return self._before + self._latest

    def clear(self) -> None:
        """Nothing has happened."""
        self._slots.clear()
        self._before = self._latest = 0

    def _turn(self, now: float) -> None:
        """Begin the slot that ``now`` is in, and let go of those that are too old."""
        if self._latest:
            self._slots.append((self._number, self._latest))
        self._before += self._latest
        self._latest = 0
        self._number = now // self._span
        self._until = (self._number + 1) * self._span
        while self._slots and self._slots[0][0] <= self._number - _SLOTS:
            self._before -= self._slots.popleft()[1]
