"""Many limits of time, with one timer."""

from collections.abc import Callable

from gateway.core.lookout import Lookout
from tests.fakes import FakeClock


class Timer:
    """One that a test lets fire."""

    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due = due
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Goes on when a test says so, and tells which timers there were."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.timers: list[Timer] = []

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:
        self.timers.append(Timer(self.clock() + delay, callback))
        return self.timers[-1]

    def go_on(self, seconds: float) -> None:
        """So far, with all that fires on the way."""
        end = self.clock() + seconds
        while due := [one for one in self.timers if one.due <= end and not one.cancelled]:
            first = min(due, key=lambda one: one.due)
            self.timers.remove(first)
            self.clock.now = first.due
            first.call()
        self.clock.now = end


class One:
    """Notes when it was looked at."""

    def __init__(self) -> None:
        self.over = False
        self.turns = 0
        self.looks: list[float] = []

    def look(self, now: float) -> None:
        self.looks.append(now - 100)


def lookout() -> tuple[Loop, Lookout]:
    loop = Loop()
    return loop, Lookout(loop.clock, lambda: loop)


def test_each_is_looked_at_when_it_said() -> None:
    loop, made = lookout()
    late, early = One(), One()
    made.add(late, 130)
    made.add(early, 110)
    made.add(late, 120)
    assert (late.turns, early.turns) == (2, 1)
    loop.go_on(100)

    assert (early.looks, late.looks) == ([10], [20, 30])
    assert (late.turns, early.turns) == (0, 0)


def test_there_is_one_timer_and_none_when_nobody_waits() -> None:
    loop, made = lookout()
    for due in (130, 120, 140, 110):
        made.add(One(), due)
    assert len([one for one in loop.timers if not one.cancelled]) == 1

    loop.go_on(100)
    assert [one for one in loop.timers if not one.cancelled] == []


def test_who_is_over_is_not_looked_at() -> None:
    loop, made = lookout()
    gone, there = One(), One()
    made.add(gone, 110)
    made.add(there, 120)
    gone.over = True
    made.drop(gone)
    loop.go_on(100)

    assert (gone.looks, there.looks) == ([], [20])


def test_who_is_over_is_not_held_for_long() -> None:
    loop, made = lookout()
    stays = One()
    made.add(stays, 120)
    for _ in range(1000):
        one = One()
        made.add(one, 500)
        one.over = True
        made.drop(one)
    assert len(made._turns) < 100

    loop.go_on(50)
    assert stays.looks == [20]


def test_one_that_closed_looks_no_more() -> None:
    loop, made = lookout()
    one = One()
    made.add(one, 110)
    made.close()
    made.close()
    loop.go_on(100)

    assert one.looks == []
