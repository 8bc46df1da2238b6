"""Workers that answer with errors: some of the time, for a while, or on purpose (18, 19, 20)."""

import asyncio

import pytest

from tests.conftest import Serve
from tests.fakes import Reply
from tests.fault.fronts import (
    CHAT,
    Client,
    ask,
    assert_refused,
    before,
    both,
    every_client,
    good,
    raw,
    refused,
    reports,
    until,
)

FAILS = refused("500 Internal Server Error")


async def test_fault_18_a_worker_that_fails_at_times_is_left_by_its_rate(serve: Serve) -> None:
    """Three of ten requests fail, never five in a row: only the rate tells."""
    well = good(stream=False)
    ill = [FAILS, well, well, FAILS, well, well, FAILS, well, well, well]
    async with raw(*ill * 100) as bad, raw(well) as a, raw(well) as b:
        front = await before(serve, bad, a, b)
        answers = [await ask(front, CHAT, stream=False) for _ in range(1500)]
        states = [one.state for one in reports(front)]

    worked = sum(answer.status_code == 200 for answer in answers)
    assert worked >= 0.995 * len(answers)
    assert states == ["out", "up", "up"]
    assert bad.asked >= 20


def busy(seconds: int) -> Reply:
    return refused("429 Too Many Requests", retry_after=str(seconds))


@both
async def test_fault_19_a_busy_worker_gets_less_and_is_not_left(
    serve: Serve, *, stream: bool
) -> None:
    """Six requests at a time; one worker refuses each for which it has no place."""
    gate = asyncio.Event()
    waits: Reply = [gate, *good(stream=stream)]
    async with raw(waits, waits, busy(1)) as a, raw(waits) as b:
        front = await before(serve, a, b)
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(front, CHAT, stream=stream)) for _ in range(6)]
            await until(lambda: a.asked == 3)
            await until(lambda: b.asked == 4)
            limited = reports(front)
            gate.set()

    assert [task.result().status_code for task in asked] == [200] * 6
    assert [one.state for one in limited] == ["up", "up"]
    assert [one.error for one in limited] == ["429", ""]
    assert limited[0].limit == 2, "it is given no more than it took"
    assert limited[1].limit is None


@both
@every_client
async def test_fault_19_that_all_are_busy_is_told_with_the_shortest_wait(
    serve: Serve, client: Client, *, stream: bool
) -> None:
    async with raw(busy(9)) as a, raw(busy(4)) as b, raw(busy(7)) as c:
        front = await before(serve, a, b, c)
        answer = await ask(front, client, stream=stream)
        states = [one.state for one in reports(front)]

    assert_refused(answer, 429)
    assert answer.headers["retry-after"] == "4"
    assert [one.asked for one in (a, b, c)] == [1, 1, 1]
    assert states == ["up", "up", "up"]


async def test_fault_19_who_is_not_asked_is_not_counted_as_busy(serve: Serve) -> None:
    """One worker of two says so: the other makes up for it."""
    async with raw(busy(9)) as a, raw(good(stream=False)) as b:
        front = await before(serve, a, b)
        answers = [await ask(front, CHAT, stream=False) for _ in range(20)]

    assert {answer.status_code for answer in answers} == {200}
    assert b.asked == 20


PUSHBACK = [
    pytest.param(
        refused("503 Busy", b'{"error":{"message":"The server is overloaded"}}'), id="says so"
    ),
    pytest.param(refused("503 Busy", retry_after="3"), id="names a time"),
]


@every_client
@pytest.mark.parametrize("reply", PUSHBACK)
async def test_fault_20_a_worker_that_pushes_back_is_not_asked_again(
    serve: Serve, client: Client, reply: Reply
) -> None:
    async with raw(reply) as worker:
        front = await before(serve, worker, retries={"max": 5})
        answer = await ask(front, client, stream=True)
        [report] = reports(front)

    assert_refused(answer, 503)
    assert int(answer.headers["retry-after"]) >= 1
    assert worker.asked == 1
    assert (report.state, report.limit) == ("up", 1), "it is given less, and is not ill"


@pytest.mark.parametrize("reply", PUSHBACK)
async def test_fault_20_another_worker_makes_up_for_one_that_pushes_back(
    serve: Serve, reply: Reply
) -> None:
    async with raw(reply) as a, raw(good(stream=True)) as b:
        front = await before(serve, a, b)
        answer = await ask(front, CHAT, stream=True)

    assert answer.status_code == 200
    assert (a.asked, b.asked) == (1, 1)
