"""Many limits of time, with one timer."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from backends.aio import DeadlineTimer
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
        self.looks: list[float] = []

    def on_deadline(self, now: float) -> None:
        self.looks.append(now - 100)


def lookout() -> tuple[Loop, DeadlineTimer]:
    loop = Loop()
    return loop, DeadlineTimer(loop.clock, lambda: loop)


def test_each_is_looked_at_when_it_said_last() -> None:
    loop, made = lookout()
    late, early, later = One(), One(), One()
    made.add(late, 130)
    made.add(early, 110)
    made.add(late, 120)
    made.add(later, 120.25)
    made.add(later, 120.75)
    loop.go_on(100)

    assert (early.looks, late.looks, later.looks) == ([10], [20], [20.75])


def test_one_that_says_a_later_time_meanwhile_is_looked_at_then() -> None:
    loop, made = lookout()
    one, other = One(), One()
    made.add(one, 110)
    made.add(other, 110.5)
    loop.go_on(10.25)
    made.add(other, 150)
    loop.go_on(100)

    assert (one.looks, other.looks) == ([10], [50])


class Again(One):
    """Says each time when it is next."""

    def __init__(self, made: DeadlineTimer, every: float) -> None:
        super().__init__()
        self._made = made
        self._every = every

    def on_deadline(self, now: float) -> None:
        super().on_deadline(now)
        self._made.add(self, now + self._every)


@given(
    told=st.lists(
        st.tuples(
            st.sampled_from([0, 0.25, 0.5, 1, 3, 30]),
            st.sampled_from([0.125, 0.25, 0.75, 1, 1.5, 20, 60]),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_everyone_is_looked_at_in_time_whatever_the_others_say(
    told: list[tuple[float, float, bool]],
) -> None:
    loop, made = lookout()
    there: list[tuple[float, float, Again]] = []
    for wait, every, stays in told:
        loop.go_on(wait)
        one = Again(made, every)
        made.add(one, loop.clock() + every)
        if stays:
            there.append((loop.clock() - 100, every, one))
        else:
            made.remove(one)
            assert one.looks == []
    loop.go_on(61)

    end = loop.clock() - 100
    for since, every, one in there:
        assert one.looks == [since + n * every for n in range(1, int((end - since) // every) + 1)]


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
    made.remove(gone)
    made.remove(gone)
    loop.go_on(100)

    assert (gone.looks, there.looks) == ([], [20])


def test_who_is_over_is_not_held_for_long() -> None:
    loop, made = lookout()
    stays = One()
    made.add(stays, 120)
    for _ in range(1000):
        one = One()
        made.add(one, 500)
        made.remove(one)
    assert len(made._deadlines) == 1

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
