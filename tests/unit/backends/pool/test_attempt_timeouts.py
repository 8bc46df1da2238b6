"""How long a worker may be silent: a watch for each answer, and one timer for them all."""

import asyncio
from collections.abc import Callable

import pytest

from backends.aio import DeadlineTimer
from backends.http.interfaces import UpstreamResponse
from backends.interfaces import Deadline
from backends.pool.attempt import NO_TIMEOUT, AttemptTimeouts
from protocols.core.errors import DeadlineExceeded, StreamBroken, WorkerFailed
from tests.fakes import FakeClock

BROKEN = StreamBroken("it broke")


def clock() -> float:
    return asyncio.get_running_loop().time()


class Counted(AttemptTimeouts):
    """A watch that counts how often it cuts its answer off."""

    times = 0

    def abort_response(self) -> None:
        self.times += 1


class Cut:
    """A watch, and how often it cut its answer off."""

    def __init__(
        self,
        lookout: DeadlineTimer,
        *,
        first: float | None = None,
        idle: float = 30,
        total: float = 60,
    ) -> None:
        due = NO_TIMEOUT if first is None else lookout.clock() + first
        self.watch = Counted(lookout, Deadline(lookout.clock, total), due, idle)

    @property
    def times(self) -> int:
        return self.watch.times

    @property
    def why(self) -> str:
        cause = self.watch.get_cause(BROKEN)
        return cause.phase if isinstance(cause, DeadlineExceeded) else ""


async def test_each_is_cut_off_by_its_own_limit_and_only_once() -> None:
    lookout = DeadlineTimer(clock, asyncio.get_running_loop)
    late = Cut(lookout, first=0.15)
    later = Cut(lookout, total=0.1)
    never = Cut(lookout)
    for one in (late, later, never):
        one.watch.wait_next()
    await asyncio.sleep(0.4)

    assert [one.why for one in (late, later, never)] == ["first_token", "total", ""]
    assert [one.times for one in (late, later, never)] == [1, 1, 0]
    lookout.close()


async def test_what_is_heard_puts_it_off() -> None:
    now = FakeClock()
    lookout = DeadlineTimer(now, asyncio.get_running_loop)
    one = Cut(lookout, first=50.0, idle=20.0, total=1000.0)
    one.watch.wait_next()
    one.watch.has_started = True
    one.watch.wait_next()
    for _ in range(6):
        now.now += 15
        one.watch.record_read()
        one.watch.on_deadline(now())
    assert one.times == 0
    now.now += 19
    one.watch.on_deadline(now())
    assert one.times == 0
    now.now += 1
    one.watch.on_deadline(now())
    assert (one.times, one.why) == (1, "idle")
    lookout.close()


@pytest.mark.parametrize(
    "ends", [AttemptTimeouts.stop_wait, lambda watch: watch._deadline_timer.remove(watch)]
)
async def test_nobody_is_cut_off_who_does_not_wait(ends: Callable[[AttemptTimeouts], None]) -> None:
    lookout = DeadlineTimer(clock, asyncio.get_running_loop)
    one, other = Cut(lookout, first=0.05), Cut(lookout, first=0.1)
    one.watch.wait_next()
    other.watch.wait_next()
    ends(one.watch)
    await asyncio.sleep(0.2)

    assert one.times == 0
    assert other.times == 1
    lookout.close()


async def test_who_rested_over_its_limit_is_cut_off_when_it_waits_again() -> None:
    lookout = DeadlineTimer(clock, asyncio.get_running_loop)
    one = Cut(lookout, first=0.05)
    one.watch.wait_next()
    one.watch.stop_wait()
    await asyncio.sleep(0.1)
    one.watch.wait_next()
    await asyncio.sleep(0.05)

    assert one.why == "first_token"
    lookout.close()


async def test_those_that_are_over_are_let_go() -> None:
    lookout = DeadlineTimer(clock, asyncio.get_running_loop)
    stays = Cut(lookout, first=0.2)
    stays.watch.wait_next()
    for _ in range(1000):
        one = Cut(lookout, first=20.0)
        one.watch.wait_next()
        one.watch.has_started = True
        one.watch.wait_next()
        lookout.remove(one.watch)
        lookout.remove(one.watch)

    assert len(lookout._deadlines) == 1
    await asyncio.sleep(0.3)
    assert stays.why == "first_token"
    lookout.close()


async def test_a_limit_is_behind_a_break_and_behind_nothing_else() -> None:
    lookout = DeadlineTimer(clock, asyncio.get_running_loop)
    one = Cut(lookout)
    assert one.watch.get_cause(BROKEN) is BROKEN
    one.watch.cancel_wait()
    failed = WorkerFailed("it failed")

    assert one.why == "first_token"
    assert one.watch.get_cause(failed) is failed
    assert one.times == 1


async def test_no_connection_is_opened_for_who_was_given_up_before() -> None:
    lookout = DeadlineTimer(clock, asyncio.get_running_loop)
    one = Cut(lookout)
    one.watch.start_wait(clock())
    one.watch.cancel_wait()
    with pytest.raises(DeadlineExceeded) as caught:
        await one.watch.wait_response(_never())

    assert caught.value.phase == "first_token"
    lookout.remove(one.watch)
    lookout.close()


async def _never() -> UpstreamResponse:
    raise AssertionError("it is not begun")


async def test_who_starts_knows_the_time() -> None:
    now = FakeClock()
    lookout = DeadlineTimer(now, asyncio.get_running_loop)
    one = Cut(lookout, first=5.0, total=50.0)
    with pytest.raises(DeadlineExceeded):
        one.watch.start_wait(now() + 50.0)
    one.watch.start_wait(now())
    one.watch.on_deadline(now() + 5.0)

    assert one.why == "first_token"
    lookout.close()


async def test_nobody_waits_whose_time_is_up() -> None:
    lookout = DeadlineTimer(clock, asyncio.get_running_loop)
    one = Cut(lookout, total=0.0)
    with pytest.raises(DeadlineExceeded) as caught:
        one.watch.wait_next()
    assert caught.value.phase == "total"
