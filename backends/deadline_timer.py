"""Many deadlines on one timer of the event loop.

A timer of the loop for each deadline would cost more than what it guards: most targets are removed
long before theirs. So the targets stand in a table, only those that are due soon are sorted, and
one timer of the loop waits for the first of these.
"""

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Final, Protocol

from protocols.core.interfaces import Clock

_SORT_WINDOW: Final = 1.0
"""Deadlines within so many seconds are sorted together."""
_STALL: Final = 0.05
_MAX_POSTPONEMENT: Final = 0.5
_MAX_TURN_TARGETS: Final = 64
"""Targets that are called in one turn of the event loop."""


class TimerHandle(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancel the call."""


class SupportsCallLater(Protocol):
    """An event loop, as far as the timer uses it."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> TimerHandle:
        """Call ``callback`` in ``delay`` seconds."""


class TimerTarget(Protocol):
    """Something with a deadline."""

    def on_deadline(self, now: float) -> None:
        """Called when a deadline has passed at ``now``."""


class DeadlineTimer:
    """Watches many deadlines with one timer of the event loop.

    A target's ``on_deadline`` is called once when its latest deadline passes; it may add the next
    one then. Most targets are removed long before their deadline, so only near ones are sorted.

    The event loop may have been stalled, by other work or by other processes: what has arrived
    meanwhile is not read yet, so that a peer looks silent that is not. If the timer fires more than
    ``_STALL`` seconds late, it therefore waits once as long as it was late, up to
    ``_MAX_POSTPONEMENT`` seconds.
    """

    __slots__ = (
        "_deadlines",
        "_expected_at",
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
        """The deadline of each target, by the clock."""
        self._upcoming: list[tuple[TimerTarget, float]] = []
        """The targets due before ``_sorted_until`` when it was set, the first of them last."""
        self._sorted_until = math.inf
        """From when on other targets may be due."""
        self._fires_at = math.inf
        """When the timer fires, by the clock."""
        self._expected_at = math.inf
        """When the timer can fire at the earliest; infinite once it was postponed."""
        self._timer: TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<DeadlineTimer {len(self._deadlines)} targets>"

    def add(self, target: TimerTarget, due: float) -> None:
        """Set the target's deadline, replacing an earlier one."""
        self._deadlines[target] = due
        if due < self._sorted_until:
            self._sorted_until = due
            if due < self._fires_at:
                self._schedule(due)

    def remove(self, target: TimerTarget) -> None:
        """Remove the target."""
        self._deadlines.pop(target, None)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._sorted_until, self._fires_at = None, math.inf, math.inf

    def _schedule(self, fires_at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = fires_at
        now = self.clock()
        self._expected_at = max(now, fires_at)
        self._timer = self._loop().call_later(fires_at - now, self._fire)

    def _fire(self) -> None:
        now = self.clock()
        late = now - self._expected_at
        if late > _STALL:
            self._expected_at = math.inf
            self._timer = self._loop().call_later(min(late, _MAX_POSTPONEMENT), self._fire)
            return
        if now >= self._sorted_until:
            self._sort_upcoming(now)
        deadlines, upcoming = self._deadlines, self._upcoming
        called = 0
        while upcoming and upcoming[-1][1] <= now and called < _MAX_TURN_TARGETS:
            target, due = upcoming.pop()
            if deadlines.get(target) == due:  # else it was removed or has a new deadline
                del deadlines[target]
                called += 1
                target.on_deadline(now)
        self._timer, self._fires_at = None, math.inf
        earliest = min(self._sorted_until, upcoming[-1][1]) if upcoming else self._sorted_until
        if earliest < math.inf:
            self._schedule(earliest)

    def _sort_upcoming(self, now: float) -> None:
        """Sort the targets that are due soon, or else the next one."""
        deadlines = self._deadlines
        self._sorted_until = until = max(
            now + _SORT_WINDOW, min(deadlines.values(), default=math.inf)
        )
        self._upcoming = sorted(
            (item for item in deadlines.items() if item[1] < until), key=itemgetter(1), reverse=True
        )
