"""Many limits of time, with one timer for all of them: one for each would cost a request much more.

Pure: who makes a lookout hands it what finds the loop.
"""

import itertools
import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from gateway.core.context import Clock

_SPARE: Final = 64
"""So many looks at what is over do no harm."""


class Timer(Protocol):
    """What was to be called later."""

    def cancel(self) -> None:
        """Don't."""


class Loop(Protocol):
    """What calls something later."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:
        """Call it in so many seconds."""


class Watched(Protocol):
    """What is looked at."""

    over: bool
    turns: int
    """How often it is yet to be looked at: for the lookout alone, and 0 at first."""

    def look(self, now: float) -> None:
        """What it waits for may be late by ``now``."""


class Lookout:
    """Who looks whether any of many waits for too long.

    Each is looked at when the first limit runs out that it told of, and says then when it is next.
    Those that are over are let go together, when they are the most.
    """

    __slots__ = ("_looks", "_loop", "_numbers", "_over", "_timer", "_turns", "clock")

    def __init__(self, clock: Clock, loop: Callable[[], Loop]) -> None:
        self.clock = clock
        self._loop = loop
        self._turns: list[tuple[float, int, Watched]] = []
        """A heap: when to look, a number that tells two such moments apart, and at whom."""
        self._numbers = itertools.count()
        self._over = 0
        """How many of them are of what is over."""
        self._looks = math.inf
        """When the timer fires, by the clock."""
        self._timer: Timer | None = None

    def add(self, watched: Watched, due: float) -> None:
        """Look at it then."""
        watched.turns += 1
        heappush(self._turns, (due, next(self._numbers), watched))
        if due < self._looks:
            self._look_at(due)

    def drop(self, watched: Watched) -> None:
        """It is over."""
        self._over += watched.turns
        if self._over > _SPARE and 2 * self._over > len(self._turns):
            self._turns[:] = [turn for turn in self._turns if not turn[2].over]
            heapify(self._turns)
            self._over = 0

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._looks = None, math.inf

    def _look_at(self, moment: float) -> None:
        self.close()
        self._looks = moment
        self._timer = self._loop().call_later(moment - self.clock(), self._look)

    def _look(self) -> None:
        now, turns = self.clock(), self._turns
        while turns and (turns[0][0] <= now or turns[0][2].over):
            _, _, watched = heappop(turns)
            watched.turns -= 1
            if watched.over:
                self._over -= 1
            else:
                watched.look(now)
        self._timer, self._looks = None, math.inf
        if turns:
            self._look_at(turns[0][0])
