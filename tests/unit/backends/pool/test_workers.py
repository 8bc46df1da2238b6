"""Slots of workers and the queue for them, with a clock that a test sets."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from backends.http.interfaces import WorkerConfig
from backends.interfaces import Deadline
from backends.pool.load_balancing import RoundRobin
from backends.pool.settings import CircuitBreakerSettings, QueueSettings
from backends.pool.workers import (
    BACKGROUND_PRIORITY,
    PoolLimits,
    SelectionCriteria,
    WorkerPool,
    WorkerSlot,
)
from protocols.core.errors import (
    DeadlineExceeded,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    WorkerUnreachable,
)
from tests.support.fakes import FakeClock


def make_configs(count: int, places: int | None = None) -> list[WorkerConfig]:
    return [WorkerConfig(f"http://w{i}:1", max_concurrency=places) for i in range(count)]


def make_pool(
    clock: FakeClock, count: int = 2, places: int | None = None, **limits: Any
) -> WorkerPool:
    return WorkerPool(make_configs(count, places), RoundRobin(), PoolLimits(**limits), clock)


class SlotClient:
    """Takes slots of one set of workers."""

    def __init__(self, pool: WorkerPool, clock: FakeClock) -> None:
        self._pool = pool
        self._clock = clock

    async def take(
        self, tried: set[int] | None = None, priority: int = 128, model: str = ""
    ) -> WorkerSlot:
        criteria = SelectionCriteria(tried or set(), priority=priority, model=model)
        return await self._pool.acquire(criteria, Deadline(self._clock, 60))

    def later(
        self, tried: set[int] | None = None, priority: int = 128, model: str = ""
    ) -> asyncio.Task[WorkerSlot]:
        return asyncio.get_running_loop().create_task(self.take(tried, priority, model))


async def run_pending_tasks() -> None:
    """Run every task until it waits."""
    for _ in range(3):
        await asyncio.sleep(0)


UNREACHABLE = WorkerUnreachable("refused")

# --- health ---------------------------------------------------------------------------------------


async def test_pool_without_workers_is_overloaded() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=0)

    assert not pool.ready
    with pytest.raises(Overloaded, match="no worker"):
        await SlotClient(pool, clock).take()


async def test_unreachable_worker_is_probed_by_one_request_after_its_backoff() -> None:
    clock = FakeClock()
    pool = make_pool(clock)
    ask = SlotClient(pool, clock)
    first = await ask.take()
    first.worker.record_failure(UNREACHABLE)
    pool.release(first)

    others = [await ask.take() for _ in range(4)]
    clock.now += 0.5
    after = [await ask.take() for _ in range(4)]

    assert all(place.worker is not first.worker for place in others)
    assert sum(place.worker is first.worker for place in after) == 1

    first.worker.record_connected()
    assert first.worker in [(await ask.take()).worker for _ in range(2)]


async def test_all_workers_are_selected_if_all_are_unreachable() -> None:
    clock = FakeClock()
    pool = make_pool(clock)
    ask = SlotClient(pool, clock)
    for _ in range(2):
        place = await ask.take()
        place.worker.record_failure(UNREACHABLE)
        pool.release(place)

    assert not pool.ready
    assert {(await ask.take()).worker.key for _ in range(2)} == {0, 1}

    clock.now += 0.5
    assert pool.ready


async def test_queued_request_gets_a_worker_after_its_backoff() -> None:
    clock = FakeClock()
    pool = make_pool(clock, places=1)
    ask = SlotClient(pool, clock)
    busy, lost = await ask.take(), await ask.take()
    lost.worker.record_failure(UNREACHABLE)
    pool.release(lost)
    waiting = ask.later()
    await run_pending_tasks()

    clock.now += 0.5

    assert (await waiting).worker is lost.worker
    assert busy.worker.in_flight == 1


async def test_rate_limit_response_lowers_the_concurrency_of_a_worker() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, queue=QueueSettings(max=0))
    ask = SlotClient(pool, clock)
    places = [await ask.take() for _ in range(10)]

    places[0].worker.record_failure(RateLimitExceeded("busy", retry_after=1.0))
    for place in places[:4]:
        pool.release(place)

    assert (await ask.take()).worker.limit == 7
    with pytest.raises(Overloaded):
        await ask.take()


async def test_model_at_its_limit_blocks_no_other_model() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1)
    ask = SlotClient(pool, clock)
    [worker] = pool.workers
    first = await ask.take(model="a")
    worker.record_failure(RateLimitExceeded("busy", retry_after=30.0), model="a")
    waiting = [ask.later(model="a"), ask.later(model="b")]
    await run_pending_tasks()

    assert [one.done() for one in waiting] == [False, True]
    other = ask.later(model="b")
    pool.release(await waiting[1])
    await run_pending_tasks()
    assert (waiting[0].done(), other.done()) == (False, True)
    pool.release(first)
    assert (await waiting[0]).model == "a"


# --- queue ----------------------------------------------------------------------------------------


async def test_tried_worker_is_not_selected_again() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=3)
    ask = SlotClient(pool, clock)

    assert {(await ask.take({0, 2})).worker.key for _ in range(4)} == {1}
    assert [one.key for one in pool.select_available(SelectionCriteria({0, 2}))] == [1]
    assert not pool.select_available(SelectionCriteria({0, 1, 2}))


async def test_free_slot_is_assigned_to_the_first_eligible_queued_request() -> None:
    """The first in the queue has tried this worker already, so the second gets the slot."""
    clock = FakeClock()
    pool = make_pool(clock, places=1)
    ask = SlotClient(pool, clock)
    a, b = await ask.take(), await ask.take()
    first = ask.later({a.worker.key})
    second = ask.later()
    await run_pending_tasks()

    assert pool.queue_length == 2

    pool.release(a)
    await run_pending_tasks()
    assert (first.done(), second.done()) == (False, True)

    pool.release(b)

    assert ((await first).worker, (await second).worker) == (b.worker, a.worker)


async def test_queue_is_fifo_within_a_priority() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=1)
    ask = SlotClient(pool, clock)
    place = await ask.take()
    order: list[int] = []

    async def one(number: int, priority: int) -> None:
        mine = await ask.take(priority=priority)
        order.append(number)
        pool.release(mine)

    async with asyncio.TaskGroup() as tasks:
        for number, priority in enumerate([128, 200, 128, 0, 200, 127]):
            tasks.create_task(one(number, priority))
            await run_pending_tasks()
        pool.release(place)

    assert order == [3, 5, 0, 2, 1, 4]


async def test_new_request_does_not_overtake_queued_requests() -> None:
    """The slot became free without a notification; the first queued request still gets it."""
    clock = FakeClock()
    pool = make_pool(clock, places=1)
    ask = SlotClient(pool, clock)
    await ask.take()
    lost = await ask.take()
    lost.worker.record_failure(UNREACHABLE)
    pool.release(lost)
    waiting = ask.later()
    await run_pending_tasks()
    clock.now += 0.5

    newcomer = ask.later()
    await run_pending_tasks()

    assert (waiting.done(), newcomer.done()) == (True, False)

    newcomer.cancel()


async def cancel_then_release(
    pool: WorkerPool, place: WorkerSlot, gone: asyncio.Task[WorkerSlot]
) -> None:
    gone.cancel()
    pool.release(place)


async def release_then_cancel(
    pool: WorkerPool, place: WorkerSlot, gone: asyncio.Task[WorkerSlot]
) -> None:
    pool.release(place)
    gone.cancel()


@pytest.mark.parametrize("how", [cancel_then_release, release_then_cancel])
async def test_slot_of_a_cancelled_request_is_assigned_to_the_next_in_queue(
    how: Callable[[WorkerPool, WorkerSlot, asyncio.Task[WorkerSlot]], Awaitable[None]],
) -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=1)
    ask = SlotClient(pool, clock)
    place = await ask.take()
    gone = ask.later()
    next_one = ask.later()
    await run_pending_tasks()

    await how(pool, place, gone)

    assert (await next_one).worker is place.worker
    assert gone.cancelled()
    assert (place.worker.in_flight, pool.queue_length) == (1, 0)


async def test_queue_length_and_wait_are_limited() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=1, queue=QueueSettings(max=1, wait=0.02))
    ask = SlotClient(pool, clock)
    await ask.take()
    waiting = ask.later()
    await run_pending_tasks()

    with pytest.raises(Overloaded):
        await ask.take()
    with pytest.raises(DeadlineExceeded) as excinfo:
        await waiting

    assert excinfo.value.phase == "queue"
    assert excinfo.value.retry_after == 1.0
    assert pool.queue_length == 0


async def test_higher_priority_request_replaces_the_last_in_a_full_queue() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=1, queue=QueueSettings(max=2))
    ask = SlotClient(pool, clock)
    place = await ask.take()
    normal, low = ask.later(), ask.later(priority=200)
    await run_pending_tasks()

    with pytest.raises(Overloaded):
        await ask.take(priority=200)

    high = ask.later(priority=0)
    await run_pending_tasks()

    with pytest.raises(Overloaded):
        await low

    pool.release(place)
    pool.release(await high)
    assert (await normal).worker is place.worker


async def test_replaced_request_can_be_cancelled_at_the_same_time() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=1, queue=QueueSettings(max=1))
    ask = SlotClient(pool, clock)
    place = await ask.take()
    low = ask.later(priority=200)
    await run_pending_tasks()

    high = ask.later(priority=0)
    low.cancel()
    await run_pending_tasks()

    pool.release(place)

    assert (await high).worker is place.worker
    assert low.cancelled()


async def test_overloaded_error_estimates_retry_after() -> None:
    """Requests take 10 s, 2 at a time; with 3 in the queue the next starts after about 20 s."""
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=2, queue=QueueSettings(max=3))
    ask = SlotClient(pool, clock)
    places = [await ask.take() for _ in range(2)]
    clock.now += 10.0
    pool.release(places[0])
    await ask.take()
    waiting = [ask.later() for _ in range(3)]
    await run_pending_tasks()

    with pytest.raises(Overloaded) as excinfo:
        await ask.take()

    assert excinfo.value.retry_after == 20.0

    for task in waiting:
        task.cancel()


async def test_closing_the_pool_rejects_queued_requests() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=1)
    ask = SlotClient(pool, clock)
    await ask.take()
    waiting, gone = ask.later(), ask.later()
    await run_pending_tasks()

    gone.cancel()
    pool.close_queue()

    with pytest.raises(Overloaded, match="shutting down"):
        await waiting
    assert pool.queue_length == 0


# --- limits and changes of the set ----------------------------------------------------------------


async def test_pool_concurrency_limit_is_applied() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=3, places=2, max_concurrency=4)
    ask = SlotClient(pool, clock)
    places = [await ask.take() for _ in range(4)]
    waiting = ask.later()
    await run_pending_tasks()

    assert not waiting.done()

    pool.release(places[0])

    assert (await waiting).worker.in_flight <= 2


async def test_lower_of_reported_and_configured_limit_applies() -> None:
    clock = FakeClock()
    pool = WorkerPool(
        [WorkerConfig("http://a:1", max_concurrency=2), WorkerConfig("http://b:1")],
        RoundRobin(),
        PoolLimits(),
        clock,
    )
    for member in pool.workers:
        member.model_limits["m"] = 3

    assert [member.limit for member in pool.workers] == [2, 3]


async def test_replaced_worker_with_the_same_url_keeps_its_state() -> None:
    clock = FakeClock()
    pool = make_pool(clock)
    ask = SlotClient(pool, clock)
    place = await ask.take()
    workers = list(pool.workers)

    pool.replace_workers(
        [WorkerConfig("http://new:1"), WorkerConfig("http://w0:1", weight=3, max_concurrency=1)]
    )

    assert [one.config.url for one in pool.workers] == ["http://new:1", "http://w0:1"]
    assert pool.workers[1] is workers[0] is place.worker
    assert (workers[0].weight, workers[0].has_room()) == (3, False)
    assert pool.workers[0].key not in {one.key for one in workers}


async def test_removed_worker_finishes_requests_and_gets_no_new_ones() -> None:
    clock = FakeClock()
    pool = make_pool(clock)
    ask = SlotClient(pool, clock)
    a, b = await ask.take(), await ask.take()

    pool.replace_workers([b.worker.config])

    assert {(await ask.take()).worker for _ in range(4)} == {b.worker}

    pool.release(a)
    assert a.worker.in_flight == 0

    pool.replace_workers(make_configs(2))
    assert a.worker not in pool.workers


async def test_readded_worker_keeps_its_in_flight_requests() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=1)
    ask = SlotClient(pool, clock)
    place = await ask.take()

    pool.replace_workers([WorkerConfig("http://other:1")])
    pool.replace_workers(make_configs(1, places=1))

    assert list(pool.workers) == [place.worker]
    assert not place.worker.has_room()


async def test_added_worker_serves_queued_requests() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=1)
    ask = SlotClient(pool, clock)
    await ask.take()
    waiting = ask.later()
    await run_pending_tasks()

    pool.replace_workers(make_configs(2, places=1))

    assert (await waiting).worker is pool.workers[1]


def test_workers_with_equal_urls_are_merged() -> None:
    pool = WorkerPool(
        [WorkerConfig("http://a:1", weight=1), WorkerConfig("http://a:1", weight=5)],
        RoundRobin(),
        PoolLimits(),
        FakeClock(),
    )

    assert [one.config.weight for one in pool.workers] == [5]


async def test_worker_report_contains_state_and_limits() -> None:
    clock = FakeClock()
    pool = make_pool(
        clock, places=4, breaker=CircuitBreakerSettings(consecutive_failures=2, open_for=15.0)
    )
    ask = SlotClient(pool, clock)
    place = await ask.take()
    place.worker.latency_average.add(clock.now, 0.25)
    for _ in range(2):
        place.worker.record_failure(StreamBroken("cut"))
    clock.now += 5.0

    bad, good = pool.report_workers()

    assert (bad.url, bad.state, bad.in_flight, bad.limit) == ("http://w0:1", "out", 1, 4)
    assert (bad.back_in, bad.error) == (10.0, "disconnect")
    assert bad.latency == 0.25, "the measured time, which does not decay"
    assert (bad.out_reason, good.out_reason) == ("ejected", "")
    assert (good.state, good.in_flight, good.back_in, good.error) == ("up", 0, None, "")
    assert (good.latency, good.weight) == (None, 1)


# --- shadow requests ------------------------------------------------------------------------------


class ShadowClient:
    """Takes a slot and returns it when notified."""

    def __init__(self, pool: WorkerPool, clock: FakeClock, tried: set[int] | None = None) -> None:
        self._pool = pool
        self._criteria = SelectionCriteria(
            tried or set(), priority=BACKGROUND_PRIORITY, preempt=self._leave
        )
        self._deadline = Deadline(clock, 60)
        self._place: WorkerSlot | None = None
        self.left = 0

    async def come(self) -> WorkerSlot:
        self._place = await self._pool.acquire(self._criteria, self._deadline)
        return self._place

    def _leave(self) -> None:
        assert self._place is not None
        self.left += 1
        self._pool.release(self._place)


@pytest.mark.parametrize("room", [0, 3])
async def test_shadow_request_is_preempted_by_a_client_request(room: int) -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=2, queue=QueueSettings(max=room))
    guests = [ShadowClient(pool, clock), ShadowClient(pool, clock)]
    for guest in guests:
        await guest.come()

    first, second = [await SlotClient(pool, clock).take() for _ in range(2)]

    assert [guest.left for guest in guests] == [1, 1]
    assert first.worker.in_flight == second.worker.in_flight == 2

    late = SlotClient(pool, clock).later()
    await run_pending_tasks()
    assert late.done() is (room == 0)

    pool.release(first)
    assert isinstance((await asyncio.gather(late, return_exceptions=True))[0], WorkerSlot) is (
        room > 0
    )


async def test_shadow_request_has_the_lowest_priority_and_preempts_nothing() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=1, queue=QueueSettings(max=5))
    held = await SlotClient(pool, clock).take()
    guest = asyncio.get_running_loop().create_task(ShadowClient(pool, clock).come())
    await run_pending_tasks()
    client = SlotClient(pool, clock).later(priority=255)
    await run_pending_tasks()

    pool.release(held)
    place = await client
    assert not guest.done()

    pool.release(place)
    there = ShadowClient(pool, clock)
    other = asyncio.get_running_loop().create_task(there.come())
    await guest
    await run_pending_tasks()

    assert not other.done()

    other.cancel()


async def test_shadow_request_is_not_preempted_if_its_slot_is_unusable() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=1, queue=QueueSettings(max=5, wait=0.01))
    guest = ShadowClient(pool, clock)

    place = await guest.come()

    with pytest.raises(DeadlineExceeded):
        await SlotClient(pool, clock).take({place.worker.key})
    assert guest.left == 0


async def test_finished_shadow_request_is_not_preempted() -> None:
    clock = FakeClock()
    pool = make_pool(clock, count=1, places=1, queue=QueueSettings(max=0))
    guest = ShadowClient(pool, clock)
    pool.release(await guest.come())

    await SlotClient(pool, clock).take()

    with pytest.raises(Overloaded, match="busy"):
        await SlotClient(pool, clock).take()
    assert guest.left == 0
