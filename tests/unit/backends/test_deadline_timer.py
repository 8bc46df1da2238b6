"""Many deadlines share one timer."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.deadline_timer import _MAX_TURN_TARGETS, DeadlineTimer
from tests.support.fakes import FakeClock


class FakeTimer:
    """A timer that a test fires."""

    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due = due
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """A loop whose time a test advances, and which records its timers."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.timers: list[FakeTimer] = []

    def call_later(self, delay: float, callback: Callable[[], None], /) -> FakeTimer:
        self.timers.append(FakeTimer(self.clock() + delay, callback))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        """Advance the time and fire the timers that are due."""
        end = self.clock() + seconds
        while due := [one for one in self.timers if one.due <= end and not one.cancelled]:
            first = min(due, key=lambda one: one.due)
            self.timers.remove(first)
            self.clock.now = max(self.clock.now, first.due)
            first.call()
        self.clock.now = end

    def stall(self, seconds: float) -> None:
        """Advance the time, and fire the timers that are due only then."""
        self.clock.now += seconds
        self.advance(0)


class RecordingDeadline:
    """Records when it was checked."""

    def __init__(self) -> None:
        self.looks: list[float] = []

    def on_deadline(self, now: float) -> None:
        self.looks.append(now - 100)


def make_timer() -> tuple[FakeLoop, DeadlineTimer]:
    loop = FakeLoop()
    return loop, DeadlineTimer(loop.clock, lambda: loop)


def test_deadline_fires_at_its_last_set_time() -> None:
    loop, timer = make_timer()
    late, early, later = RecordingDeadline(), RecordingDeadline(), RecordingDeadline()
    timer.add(late, 130)
    timer.add(early, 110)
    timer.add(late, 120)
    timer.add(later, 120.25)
    timer.add(later, 120.75)

    loop.advance(100)

    assert (early.looks, late.looks, later.looks) == ([10], [20], [20.75])


def test_postponed_deadline_fires_at_the_later_time() -> None:
    loop, timer = make_timer()
    one, other = RecordingDeadline(), RecordingDeadline()
    timer.add(one, 110)
    timer.add(other, 110.5)
    loop.advance(10.25)
    timer.add(other, 150)

    loop.advance(100)

    assert (one.looks, other.looks) == ([10], [50])


class PeriodicDeadline(RecordingDeadline):
    """Returns its next time at each check."""

    def __init__(self, timer: DeadlineTimer, every: float) -> None:
        super().__init__()
        self._timer = timer
        self._every = every

    def on_deadline(self, now: float) -> None:
        super().on_deadline(now)
        self._timer.add(self, now + self._every)


@given(
    timers=st.lists(
        st.tuples(
            st.sampled_from([0, 0.25, 0.5, 1, 3, 30]),
            st.sampled_from([0.125, 0.25, 0.75, 1, 1.5, 20, 60]),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_periodic_deadlines_fire_on_time_independently(
    timers: list[tuple[float, float, bool]],
) -> None:
    loop, timer = make_timer()
    there: list[tuple[float, float, PeriodicDeadline]] = []
    for wait, every, stays in timers:
        loop.advance(wait)
        one = PeriodicDeadline(timer, every)
        timer.add(one, loop.clock() + every)
        if stays:
            there.append((loop.clock() - 100, every, one))
        else:
            timer.remove(one)
            assert one.looks == []
    loop.advance(61)

    end = loop.clock() - 100
    for since, every, one in there:
        assert one.looks == [since + n * every for n in range(1, int((end - since) // every) + 1)]


def test_one_timer_serves_all_deadlines() -> None:
    loop, timer = make_timer()
    for due in (130, 120, 140, 110):
        timer.add(RecordingDeadline(), due)
    assert len([one for one in loop.timers if not one.cancelled]) == 1

    loop.advance(100)
    assert [one for one in loop.timers if not one.cancelled] == []


def test_removed_deadline_does_not_fire() -> None:
    loop, timer = make_timer()
    gone, there = RecordingDeadline(), RecordingDeadline()
    timer.add(gone, 110)
    timer.add(there, 120)
    timer.remove(gone)
    timer.remove(gone)

    loop.advance(100)

    assert (gone.looks, there.looks) == ([], [20])


def test_removed_deadlines_are_freed() -> None:
    loop, timer = make_timer()
    stays = RecordingDeadline()
    timer.add(stays, 120)
    for _ in range(1000):
        one = RecordingDeadline()
        timer.add(one, 500)
        timer.remove(one)

    assert len(timer._deadlines) == 1

    loop.advance(50)
    assert stays.looks == [20]


def test_closed_timer_fires_no_deadline() -> None:
    loop, timer = make_timer()
    one = RecordingDeadline()
    timer.add(one, 110)
    timer.close()
    timer.close()

    loop.advance(100)

    assert one.looks == []


def test_timer_that_fires_late_waits_once_as_long_as_the_loop_was_stalled() -> None:
    loop, timer = make_timer()
    silent, answered = RecordingDeadline(), RecordingDeadline()
    timer.add(silent, 110)
    timer.add(answered, 110)

    loop.stall(10.3)
    timer.add(answered, 120)  # what arrived meanwhile is read now
    loop.advance(0.2)
    assert silent.looks == []

    loop.stall(0.4)
    assert silent.looks == [pytest.approx(10.9)]

    loop.advance(20)
    assert answered.looks == [20]


def test_deadlines_of_many_targets_fire_in_several_turns() -> None:
    loop, timer = make_timer()
    targets = [RecordingDeadline() for _ in range(2 * _MAX_TURN_TARGETS + 3)]
    for target in targets:
        timer.add(target, 110)
    loop.clock.now = 110
    fired = list[int]()

    for _ in range(3):
        loop.timers.pop(0).call()
        fired.append(sum(len(target.looks) for target in targets))

    assert fired == [_MAX_TURN_TARGETS, 2 * _MAX_TURN_TARGETS, len(targets)]


def test_deadline_that_has_passed_when_it_is_set_is_not_late() -> None:
    loop, timer = make_timer()
    target = RecordingDeadline()

    timer.add(target, 90)
    loop.advance(0)

    assert target.looks == [0]
