"""What was measured of late, as one number. Pure: the moment is a parameter, in seconds."""

import math
from collections import deque
from typing import Final

from msgspec import Struct

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


class _Slot(Struct):
    number: float
    count: int


class Recent:
    """How often something happened in the last ``window`` seconds, give or take a tenth of them."""

    def __init__(self, window: float) -> None:
        self._span = window / _SLOTS
        self._slots: deque[_Slot] = deque()
        self._count = 0

    def add(self, now: float) -> None:
        """It happened once more."""
        slots = self._slots
        if slots and slots[-1].number == now // self._span:
            slots[-1].count += 1
        else:
            slots.append(_Slot(self._forget(now), 1))
        self._count += 1

    def count(self, now: float) -> int:
        """How often."""
        self._forget(now)
        return self._count

    def clear(self) -> None:
        """Nothing has happened."""
        self._slots.clear()
        self._count = 0

    def _forget(self, now: float) -> float:
        """Let go of what is too old; gives the number of the slot that ``now`` is in."""
        number = now // self._span
        while self._slots and self._slots[0].number <= number - _SLOTS:
            self._count -= self._slots.popleft().count
        return number
