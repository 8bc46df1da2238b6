"""Who may be asked, by a clock that the test moves."""

import asyncio

import pytest

from backends.pool.policy import RoundRobin
from backends.pool.retry import Retry
from backends.pool.roster import Member, Roster
from backends.upstream import Queue, Worker
from gateway.core.context import Deadline
from gateway.core.errors import (
    DeadlineExceeded,
    GatewayError,
    Overloaded,
    RateLimited,
    StreamBroken,
    WorkerFailed,
    WorkerUnreachable,
)


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def roster(
    clock: FakeClock, workers: int = 2, places: int | None = None, queue: Queue | None = None
) -> Roster:
    made = [Worker(f"http://w{i}:1", max_concurrency=places) for i in range(workers)]
    return Roster(made, RoundRobin(), queue or Queue(), clock)


def soon(clock: FakeClock) -> Deadline:
    return Deadline(clock, 60)


def test_a_pool_needs_a_worker() -> None:
    with pytest.raises(ValueError, match="at least one"):
        roster(FakeClock(), workers=0)


def test_absences_grow_to_half_a_minute() -> None:
    member, now, waits = Member(0, Worker("http://w:1")), 0.0, []
    for _ in range(9):
        member.missed(now, "refused")
        waits.append(member.absent_until - now)
        now = member.absent_until

    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_many_requests_missed_together_are_one_absence() -> None:
    member = Member(0, Worker("http://w:1"))
    for _ in range(50):
        member.missed(10.0, "refused")

    assert (member.absences, member.absent_until) == (1, 10.5)


async def test_an_absent_worker_is_left_alone_and_then_tried_by_one() -> None:
    clock = FakeClock()
    pool = roster(clock)
    first = await pool.take(soon(clock))
    pool.give_back(first)
    first.missed(clock.now, "refused")

    others = [await pool.take(soon(clock)) for _ in range(4)]
    clock.now += 0.5
    after = [await pool.take(soon(clock)) for _ in range(4)]

    assert all(member is not first for member in others)
    assert sum(member is first for member in after) == 1
    first.met()
    assert first in [await pool.take(soon(clock)) for _ in range(2)]


async def test_when_all_are_absent_all_may_be_asked() -> None:
    clock = FakeClock()
    pool = roster(clock)
    for _ in range(2):
        member = await pool.take(soon(clock))
        member.missed(clock.now, "refused")
        pool.give_back(member)

    assert not pool.ready
    assert {(await pool.take(soon(clock))).key for _ in range(2)} == {0, 1}
    clock.now += 0.5
    assert pool.ready


async def test_a_place_is_never_at_a_worker_that_was_tried() -> None:
    clock = FakeClock()
    pool = roster(clock, workers=3)

    assert {(await pool.take(soon(clock), {0, 2})).key for _ in range(4)} == {1}
    assert pool.left({0, 2})
    assert not pool.left({0, 1, 2})


async def test_a_place_that_comes_free_goes_to_whoever_may_have_it() -> None:
    """The first in the queue has tried this worker already: the second gets the place."""
    clock = FakeClock()
    pool = roster(clock, workers=2, places=1)
    a, b = [await pool.take(soon(clock)) for _ in range(2)]
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(pool.take(soon(clock), {a.key}))
        second = tasks.create_task(pool.take(soon(clock)))
        await asyncio.sleep(0)
        assert pool.waiting == 2

        pool.give_back(a)
        await asyncio.sleep(0)
        assert (first.done(), second.done()) == (False, True)
        pool.give_back(b)

    assert (first.result(), second.result()) == (b, a)


async def test_a_place_given_to_one_who_just_left_goes_on() -> None:
    clock = FakeClock()
    pool = roster(clock, workers=1, places=1)
    member = await pool.take(soon(clock))
    gone = asyncio.get_running_loop().create_task(pool.take(soon(clock)))
    next_one = asyncio.get_running_loop().create_task(pool.take(soon(clock)))
    await asyncio.sleep(0)

    pool.give_back(member)
    gone.cancel()

    assert await next_one is member
    assert (member.in_flight, pool.waiting) == (1, 0)


async def test_the_queue_has_an_end_in_number_and_in_time() -> None:
    clock = FakeClock()
    pool = roster(clock, workers=1, places=1, queue=Queue(max=1, wait=0.02))
    await pool.take(soon(clock))
    waiting = asyncio.get_running_loop().create_task(pool.take(soon(clock)))
    await asyncio.sleep(0)

    with pytest.raises(Overloaded):
        await pool.take(soon(clock))
    with pytest.raises(DeadlineExceeded) as caught:
        await waiting

    assert caught.value.which == "queue"
    assert pool.waiting == 0


@pytest.mark.parametrize(
    ("errors", "answers"),
    [
        ([WorkerUnreachable("x")] * 3, [True, True, True]),
        ([StreamBroken("x"), StreamBroken("x")], [True, False]),
        ([DeadlineExceeded("x", which="first_token"), StreamBroken("x")], [True, False]),
        ([StreamBroken("x"), WorkerUnreachable("x"), StreamBroken("x")], [True, True, False]),
        ([DeadlineExceeded("x", which="idle")], [False]),
        ([DeadlineExceeded("x")], [False]),
        ([WorkerFailed("x", status=503)], [False]),
        ([RateLimited("x")], [False]),
        ([Overloaded("x")], [False]),
    ],
)
def test_what_may_be_tried_again(errors: list[GatewayError], answers: list[bool]) -> None:
    retry = Retry()

    assert [retry.again(error) for error in errors] == answers
