"""Many limits of time, with one timer for all of them: one for each would cost a request much more.

Pure: who makes a lookout hands it what finds the loop.
"""

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Final, Protocol

from gateway.core.context import Clock

_SORT_WINDOW: Final = 1.0
"""Those that are due within so many seconds are put in order together."""


class TimerHandle(Protocol):
    """What was to be called later."""

    def cancel(self) -> None:
        """Don't."""


class SupportsCallLater(Protocol):
    """What calls something later."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> TimerHandle:
        """Call it in so many seconds."""


class TimerTarget(Protocol):
    """What is looked at."""

    def on_deadline(self, now: float) -> None:
        """What it waits for may be late by ``now``."""


class DeadlineTimer:
    """Who looks whether any of many waits for too long.

    Each is looked at once when the limit runs out that it told of last, and says then when it is
    next. Nearly all are over long before that: only those whose time is near are put in order.
    """

    __slots__ = (
        "_deadlines",
        "_fires_at",
        "_loop",
        "_sorted_until",
        "_timer",
        "_upcoming",
        "clock",
    )

    def __init__(self, clock: Clock, loop: Callable[[], SupportsCallLater]) -> None:
        self.clock = clock
        self._loop = loop
        self._deadlines: dict[TimerTarget, float] = {}
        """When to look at each, by the clock."""
        self._upcoming: list[tuple[TimerTarget, float]] = []
        """Those that were due before ``_until`` when that was set: the first comes last."""
        self._sorted_until = math.inf
        """When others may be due."""
        self._fires_at = math.inf
        """When the timer fires, by the clock."""
        self._timer: TimerHandle | None = None

    def add(self, watched: TimerTarget, due: float) -> None:
        """Look at it then, and not when it said before."""
        self._deadlines[watched] = due
        if due < self._sorted_until:
            self._sorted_until = due
            if due < self._fires_at:
                self._schedule(due)

    def remove(self, watched: TimerTarget) -> None:
        """It is over."""
        self._deadlines.pop(watched, None)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._sorted_until, self._fires_at = None, math.inf, math.inf

    def _schedule(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = moment
        self._timer = self._loop().call_later(moment - self.clock(), self._fire)

    def _fire(self) -> None:
        now = self.clock()
        if now >= self._sorted_until:
            self._sort_upcoming(now)
        dues, soon = self._deadlines, self._upcoming
        while soon and soon[-1][1] <= now:
            watched, due = soon.pop()
            if dues.get(watched) == due:  # else it is over, or said another time since
                del dues[watched]
                watched.on_deadline(now)
        self._timer, self._fires_at = None, math.inf
        first = min(self._sorted_until, soon[-1][1]) if soon else self._sorted_until
        if first < math.inf:
            self._schedule(first)

    def _sort_upcoming(self, now: float) -> None:
        """Put those in order that are due soon; where nobody is, the next is waited for."""
        dues = self._deadlines
        self._sorted_until = until = max(now + _SORT_WINDOW, min(dues.values(), default=math.inf))
        self._upcoming = sorted(
            (one for one in dues.items() if one[1] < until), key=itemgetter(1), reverse=True
        )
