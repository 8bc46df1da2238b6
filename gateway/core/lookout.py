"""Many limits of time, with one timer for all of them: one for each would cost a request much more.

Pure: who makes a lookout hands it what finds the loop.
"""

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Final, Protocol

from gateway.core.context import Clock

_SPAN: Final = 1.0
"""Those that are due within so many seconds are put in order together."""


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

    def look(self, now: float) -> None:
        """What it waits for may be late by ``now``."""


class Lookout:
    """Who looks whether any of many waits for too long.

    Each is looked at once when the limit runs out that it told of last, and says then when it is
    next. Nearly all are over long before that: only those whose time is near are put in order.
    """

    __slots__ = ("_dues", "_looks", "_loop", "_soon", "_timer", "_until", "clock")

    def __init__(self, clock: Clock, loop: Callable[[], Loop]) -> None:
        self.clock = clock
        self._loop = loop
        self._dues: dict[Watched, float] = {}
        """When to look at each, by the clock."""
        self._soon: list[tuple[Watched, float]] = []
        """Those that were due before ``_until`` when that was set: the first comes last."""
        self._until = math.inf
        """When others may be due."""
        self._looks = math.inf
        """When the timer fires, by the clock."""
        self._timer: Timer | None = None

    def add(self, watched: Watched, due: float) -> None:
        """Look at it then, and not when it said before."""
        self._dues[watched] = due
        if due < self._until:
            self._until = due
            if due < self._looks:
                self._look_at(due)

    def drop(self, watched: Watched) -> None:
        """It is over."""
        self._dues.pop(watched, None)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._until, self._looks = None, math.inf, math.inf

    def _look_at(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks = moment
        self._timer = self._loop().call_later(moment - self.clock(), self._look)

    def _look(self) -> None:
        now = self.clock()
        if now >= self._until:
            self._order(now)
        dues, soon = self._dues, self._soon
        while soon and soon[-1][1] <= now:
            watched, due = soon.pop()
            if dues.get(watched) == due:  # else it is over, or said another time since
                del dues[watched]
                watched.look(now)
        self._timer, self._looks = None, math.inf
        first = min(self._until, soon[-1][1]) if soon else self._until
        if first < math.inf:
            self._look_at(first)

    def _order(self, now: float) -> None:
        """Put those in order that are due soon; where nobody is, the next is waited for."""
        dues = self._dues
        self._until = until = max(now + _SPAN, min(dues.values(), default=math.inf))
        self._soon = sorted(
            (one for one in dues.items() if one[1] < until), key=itemgetter(1), reverse=True
        )
