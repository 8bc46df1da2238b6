"""The metrics of a pool."""

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from backends.deadline_timer import DeadlineTimer
from backends.http.interfaces import BodyConsumer, WorkerConfig
from backends.interfaces import Deadline, RequestContext, ignore_memory
from backends.pool.attempt_request import filter_headers
from backends.pool.attempt_timeouts import AttemptTimeouts
from backends.pool.load_balancing import RoundRobin
from backends.pool.metrics import PoolMetrics
from backends.pool.retry import RetryBudget, RetryState
from backends.pool.settings import QueueSettings, RetrySettings
from backends.pool.workers import PoolLimits, SelectionCriteria, WorkerPool
from protocols.core.errors import (
    DeadlineExceeded,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.interfaces import UpstreamRequest
from tests.support.fakes import FakeClock

DOWN = WorkerUnreachable("x")
BAD = WorkerFailed("x", status=502)
BUSY = RateLimitExceeded("x")


@pytest.mark.parametrize(
    ("errors", "least", "retries", "exhausted"),
    [
        ([DOWN, DOWN], 0, {"connect": 2}, 0),
        ([BAD], 1, {"502": 1}, 0),
        ([BUSY], 1, {"429": 1}, 0),
        ([BAD], 0, {}, 1),
        ([BAD, BAD], 9, {"502": 1}, 0),
        ([WorkerFailed("x")], 9, {}, 0),
    ],
)
def test_only_allowed_retries_are_counted(
    errors: list[GatewayError], least: int, retries: dict[str, int], exhausted: int
) -> None:
    tally = PoolMetrics()
    retry = RetryState(RetrySettings(), RetryBudget(0, least), metrics=tally)

    for error in errors:
        retry.allows_retry(error, 0.0, accepted=False)

    assert (dict(tally.retries), tally.exhausted) == (retries, exhausted)


def make_pool(clock: FakeClock, tally: PoolMetrics, count: int = 1, **queue: Any) -> WorkerPool:
    workers = [WorkerConfig(f"http://w{n}:1", max_concurrency=1) for n in range(count)]
    return WorkerPool(workers, RoundRobin(), PoolLimits(None, QueueSettings(**queue)), clock, tally)


async def test_queue_time_is_recorded_only_for_queued_requests() -> None:
    clock, tally = FakeClock(), PoolMetrics()
    pool = make_pool(clock, tally, max=1)
    deadline = Deadline(clock, 60)
    place = await pool.acquire(SelectionCriteria(set()), deadline)

    assert sum(tally.queue_times.counts) == 0

    waits = asyncio.create_task(pool.acquire(SelectionCriteria(set()), deadline, "r2"))
    await asyncio.sleep(0)
    assert pool.queued_request_ids == ["r2"]
    with pytest.raises(Overloaded):
        await pool.acquire(SelectionCriteria(set()), deadline)

    clock.now += 3
    pool.release(place)
    pool.release(await waits)

    assert tally.queue_times.total == 3
    assert pool.queued_request_ids == []
    assert tally.shed == {"queue_full": 1}

    pool.close_queue()


async def test_shed_requests_are_counted_by_reason() -> None:
    clock, tally = FakeClock(), PoolMetrics()
    pool = make_pool(clock, tally, wait=0.01)

    await pool.acquire(SelectionCriteria(set()), Deadline(clock, 60))

    with pytest.raises(DeadlineExceeded):
        await pool.acquire(SelectionCriteria(set()), Deadline(clock, 60))
    with pytest.raises(Overloaded):
        await make_pool(clock, tally, 0).acquire(SelectionCriteria(set()), Deadline(clock, 60))
    assert tally.shed == {"queue_wait": 1, "no_worker": 1}


@pytest.mark.parametrize("times", [1, 255, 256, 257, 600])
def test_slot_times_are_counted_in_batches_and_before_a_scrape(times: int) -> None:
    clock, tally = FakeClock(), PoolMetrics()
    pool = make_pool(clock, tally)
    duration = 0.0
    for number in range(times):
        place = pool.try_acquire(SelectionCriteria(set()), clock())
        assert place is not None
        seconds = 1.0 + number % 7
        clock.now += seconds
        pool.release(place)
        duration = duration + 0.1 * (seconds - duration) if number else seconds

    assert sum(tally.request_durations.counts) == times // 256 * 256

    pool.count_slot_times()
    assert sum(tally.request_durations.counts) == times
    assert tally.request_durations.total == sum(1.0 + number % 7 for number in range(times))
    assert pool._average_slot_time == pytest.approx(duration)


def test_pool_panics_below_the_healthy_threshold() -> None:
    clock = FakeClock()
    pool = make_pool(clock, PoolMetrics(), 4)

    assert not pool.in_panic

    for number, member in enumerate(pool.workers):
        for _ in range(20):
            member.health.record_failure(clock())
        assert pool.in_panic == (number >= 2), number


class FakeResponse:
    """A response with these durations of its reads."""

    status = 200
    headers: Mapping[str, str] = MappingProxyType({})
    complete = False

    def __init__(self, clock: FakeClock, delays: Sequence[float]) -> None:
        self._clock = clock
        self._delays = iter(delays)

    async def read(self) -> list[bytes]:
        self._clock.now += next(self._delays)
        return [b"x"]

    async def listen(self, take: BodyConsumer) -> bool:
        for seconds in self._delays:
            self._clock.now += seconds
            assert take([b"x"])
        return True

    def abort(self) -> None:
        raise AssertionError

    def release(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("delays", "longest"),
    [([5.0], 0.0), ([5.0, 0.1], 0.1), ([5.0, 0.1, 2.0, 0.2], 2.0), ([5.0, 0.1, 2.0], 2.0)],
)
async def test_longest_gap_excludes_the_wait_for_the_first_token(
    delays: list[float], longest: float
) -> None:
    clock = FakeClock()
    timer = DeadlineTimer(clock, asyncio.get_running_loop)
    watch = AttemptTimeouts(timer, Deadline(clock, 60), first_due=clock() + 30.0, idle_timeout=30.0)
    reads = FakeResponse(clock, delays)
    for _ in delays:
        watch.wait_next()
        await reads.read()
        watch.has_started = True
    watch.set_drain_deadline(1.0)

    timer.close()

    assert watch.longest_gap == pytest.approx(longest)


async def test_longest_gap_is_measured_for_a_consumer() -> None:
    clock = FakeClock()
    timer = DeadlineTimer(clock, asyncio.get_running_loop)
    watch = AttemptTimeouts(timer, Deadline(clock, 60), first_due=clock() + 30.0, idle_timeout=30.0)
    reads = FakeResponse(clock, [5.0, 0.1, 2.0, 0.2])

    def take(pieces: list[bytes]) -> bool:
        watch.record_read()
        return bool(pieces)

    watch.wait_next()
    await reads.read()
    watch.has_started = True
    watch.wait_next()
    await reads.listen(take)
    watch.set_drain_deadline(1.0)

    timer.close()

    assert watch.longest_gap == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("headers", "passed_on"),
    [
        ({"traceparent": "00-1-2-01"}, [("traceparent", "00-1-2-01")]),
        (
            {"traceparent": "00-1-2-01", "tracestate": "a=1, b=2"},
            [("traceparent", "00-1-2-01"), ("tracestate", "a=1, b=2")],
        ),
        ({"tracestate": "a=1\r\nx: y"}, []),
        ({"traceparent": "a b"}, []),
        ({}, []),
    ],
)
def test_trace_context_of_the_client_is_forwarded(
    headers: dict[str, str], passed_on: list[tuple[str, str]]
) -> None:
    context = RequestContext("r", Deadline(lambda: 0.0, 1), lambda: 0.0, ignore_memory, **headers)  # type: ignore[arg-type]
    _, own = filter_headers(UpstreamRequest("/", b"", ()), context)
    assert [*own] == [("x-request-id", "r"), *passed_on]


def test_unneeded_client_headers_are_not_forwarded() -> None:
    context = RequestContext("r", Deadline(lambda: 0.0, 1), lambda: 0.0, ignore_memory)
    headers = (("Content-Type", "text/plain"), ("X-Secret", "s"), ("req-id", "mine"))

    wire, own = filter_headers(UpstreamRequest("/", b"{}", headers, "PUT"), context)

    assert wire == UpstreamRequest("/", b"{}", (("Content-Type", "text/plain"),), "PUT")
    assert own == (("req-id", "mine"), ("x-request-id", "r"))
