"""Timeouts of a silent worker: one deadline for each response, one timer for all."""

import asyncio
from collections.abc import Callable

import pytest

from backends.deadline_timer import DeadlineTimer
from backends.http.interfaces import UpstreamResponse
from backends.interfaces import Deadline
from backends.pool.attempt_timeouts import NO_TIMEOUT, AttemptTimeouts
from protocols.core.errors import DeadlineExceeded, StreamBroken, WorkerFailed
from tests.support.fakes import FakeClock

BROKEN = StreamBroken("it broke")


def get_loop_time() -> float:
    return asyncio.get_running_loop().time()


class CountingAttemptTimeouts(AttemptTimeouts):
    """Timeouts that count how often they abort their response."""

    times: int = 0

    def abort_response(self) -> None:
        self.times += 1


class TimeoutsTestBench:
    """Timeouts of a response, and how often they aborted it."""

    def __init__(
        self,
        timer: DeadlineTimer,
        *,
        first: float | None = None,
        idle: float = 30,
        total: float = 60,
    ) -> None:
        due = NO_TIMEOUT if first is None else timer.clock() + first
        self.watch = CountingAttemptTimeouts(timer, Deadline(timer.clock, total), due, idle)

    @property
    def times(self) -> int:
        return self.watch.times

    @property
    def why(self) -> str:
        cause = self.watch.get_cause(BROKEN)
        return cause.phase if isinstance(cause, DeadlineExceeded) else ""


async def test_each_attempt_is_aborted_once_at_its_own_timeout() -> None:
    timer = DeadlineTimer(get_loop_time, asyncio.get_running_loop)
    late = TimeoutsTestBench(timer, first=0.15)
    later = TimeoutsTestBench(timer, total=0.1)
    never = TimeoutsTestBench(timer)
    for one in (late, later, never):
        one.watch.wait_next()
    await asyncio.sleep(0.4)

    assert [one.why for one in (late, later, never)] == ["first_token", "total", ""]
    assert [one.times for one in (late, later, never)] == [1, 1, 0]

    timer.close()


async def test_received_data_postpones_the_idle_timeout() -> None:
    now = FakeClock()
    timer = DeadlineTimer(now, asyncio.get_running_loop)
    one = TimeoutsTestBench(timer, first=50.0, idle=20.0, total=1000.0)
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

    timer.close()


@pytest.mark.parametrize(
    "ends", [AttemptTimeouts.stop_wait, lambda watch: watch.deadline_timer.remove(watch)]
)
async def test_attempt_that_does_not_wait_is_not_aborted(
    ends: Callable[[AttemptTimeouts], None],
) -> None:
    timer = DeadlineTimer(get_loop_time, asyncio.get_running_loop)
    one, other = TimeoutsTestBench(timer, first=0.05), TimeoutsTestBench(timer, first=0.1)
    one.watch.wait_next()
    other.watch.wait_next()
    ends(one.watch)
    await asyncio.sleep(0.2)

    assert one.times == 0
    assert other.times == 1

    timer.close()


async def test_attempt_past_its_timeout_is_aborted_at_the_next_wait() -> None:
    timer = DeadlineTimer(get_loop_time, asyncio.get_running_loop)
    one = TimeoutsTestBench(timer, first=0.05)
    one.watch.wait_next()
    one.watch.stop_wait()
    await asyncio.sleep(0.1)
    one.watch.wait_next()
    await asyncio.sleep(0.05)

    assert one.why == "first_token"

    timer.close()


async def test_finished_attempts_leave_no_deadlines() -> None:
    timer = DeadlineTimer(get_loop_time, asyncio.get_running_loop)
    stays = TimeoutsTestBench(timer, first=0.2)
    stays.watch.wait_next()
    for _ in range(1000):
        one = TimeoutsTestBench(timer, first=20.0)
        one.watch.wait_next()
        one.watch.has_started = True
        one.watch.wait_next()
        timer.remove(one.watch)
        timer.remove(one.watch)

    assert len(timer._deadlines) == 1

    await asyncio.sleep(0.3)
    assert stays.why == "first_token"

    timer.close()


async def test_only_a_broken_stream_is_attributed_to_the_timeout() -> None:
    timer = DeadlineTimer(get_loop_time, asyncio.get_running_loop)
    one = TimeoutsTestBench(timer)
    assert one.watch.get_cause(BROKEN) is BROKEN

    one.watch.cancel_wait()
    failed = WorkerFailed("it failed")

    assert one.why == "first_token"
    assert one.watch.get_cause(failed) is failed
    assert one.times == 1


async def test_cancelled_attempt_opens_no_connection() -> None:
    timer = DeadlineTimer(get_loop_time, asyncio.get_running_loop)
    one = TimeoutsTestBench(timer)
    one.watch.start_wait(get_loop_time())
    one.watch.cancel_wait()

    with pytest.raises(DeadlineExceeded) as excinfo:
        await one.watch.wait_response(_fail_if_awaited())

    assert excinfo.value.phase == "first_token"

    timer.remove(one.watch)
    timer.close()


async def _fail_if_awaited() -> UpstreamResponse:
    raise AssertionError("no response was started")


async def test_start_after_the_total_timeout_raises_deadline_exceeded() -> None:
    now = FakeClock()
    timer = DeadlineTimer(now, asyncio.get_running_loop)
    one = TimeoutsTestBench(timer, first=5.0, total=50.0)

    with pytest.raises(DeadlineExceeded):
        one.watch.start_wait(now() + 50.0)

    one.watch.start_wait(now())
    one.watch.on_deadline(now() + 5.0)

    assert one.why == "first_token"

    timer.close()


async def test_wait_after_the_total_timeout_raises_deadline_exceeded() -> None:
    timer = DeadlineTimer(get_loop_time, asyncio.get_running_loop)
    one = TimeoutsTestBench(timer, total=0.0)

    with pytest.raises(DeadlineExceeded) as excinfo:
        one.watch.wait_next()
    assert excinfo.value.phase == "total"
