"""A client leaves: while it waits, before the first token, and mid-stream (30, 31 and 32).

How soon the worker sees it is kept beside the result, and bounded only so that a hang is found.
"""

import asyncio
from collections.abc import Callable

import pytest

from tests.conftest import Serve
from tests.fakes import CHUNKED, HANG, Reply, whole
from tests.fault.fronts import (
    SAYS,
    STREAM,
    Caller,
    Client,
    answer,
    ask,
    before,
    both,
    every_client,
    good,
    one_record,
    raw,
    reports,
    until,
    waiting,
)

Keep = Callable[[str, object], None]
HANGING = 2.0


@both
@every_client
async def test_fault_30_a_client_that_leaves_the_queue_asks_nobody(
    serve: Serve, client: Client, *, stream: bool
) -> None:
    gate = asyncio.Event()
    async with raw([gate, *good(stream=stream)], good(stream=stream)) as worker:
        front = await before(serve, worker, max_concurrency=1)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(ask(front, client, stream=stream))
            await worker.until_asked()
            caller = await Caller.ask(front, *client.way.call("m", stream=stream))
            await until(lambda: waiting(front) == 1)
            caller.leave()
            await until(lambda: waiting(front) == 0)
            gate.set()
        after = await ask(front, client, stream=stream)

    assert first.result().status_code == after.status_code == 200
    assert worker.asked == 2, "the one that left was not asked for"
    outcomes = sorted(record.outcome for record in front.records)
    assert outcomes == ["cancelled", "ok", "ok"]


BEFORE: dict[str, Reply] = {
    "before the head": [HANG],
    "before the body": [CHUNKED, HANG],
    "inside a whole answer": [whole(answer("Hello"))[:-9], HANG],
}


@both
@every_client
@pytest.mark.parametrize("reply", BEFORE.values(), ids=BEFORE)
async def test_fault_31_a_client_that_leaves_before_the_first_token_stops_the_worker(
    serve: Serve, client: Client, reply: Reply, record_property: Keep, *, stream: bool
) -> None:
    async with raw(reply) as worker:
        front = await before(serve, worker)
        caller = await Caller.ask(front, *client.way.call("m", stream=stream))
        await worker.until_asked()
        await asyncio.sleep(0.01)
        caller.leave()
        took = await worker.until_left(within=HANGING)
        record_property("milliseconds until the worker saw it", round(took * 1000, 1))
        record = await one_record(front)

    assert (record.outcome, record.tokens) == ("cancelled", 0)
    assert worker.asked == 1
    assert [one.state for one in reports(front)] == ["up"]


@every_client
async def test_fault_32_a_client_that_leaves_mid_stream_stops_the_worker(
    serve: Serve, client: Client, record_property: Keep
) -> None:
    """And what it got until then is recorded."""
    async with raw([SAYS, HANG]) as worker:
        front = await before(serve, worker)
        caller = await Caller.ask(front, *client.way.call("m", stream=True))
        await caller.hear(b"Hello")
        caller.leave()
        took = await worker.until_left(within=HANGING)
        record_property("milliseconds until the worker saw it", round(took * 1000, 1))
        record = await one_record(front)

    assert (record.outcome, record.tokens, record.status) == ("cancelled", 2, 200)
    assert worker.asked == 1
    assert [one.state for one in reports(front)] == ["up"]


@every_client
async def test_fault_32_of_many_clients_those_who_stay_notice_nothing(
    serve: Serve, client: Client
) -> None:
    """Ten leave, ten stay; each worker's answer ends with its own client."""
    gate = asyncio.Event()
    async with raw([SAYS, gate, STREAM.removeprefix(SAYS)]) as worker:
        front = await before(serve, worker)
        path, body = client.way.call("m", stream=True)
        callers = [await Caller.ask(front, path, body) for _ in range(20)]
        for caller in callers:
            await caller.hear(b"Hello")
        for caller in callers[::2]:
            caller.leave()
        await until(lambda: len(front.records) == 10)
        gate.set()
        ends = [await caller.hear(b"0\r\n\r\n") for caller in callers[1::2]]
        await until(lambda: len(front.records) == 20)
        for caller in callers[1::2]:
            caller.leave()

    assert all(client.told not in end for end in ends)
    assert [record.outcome for record in front.records] == ["cancelled"] * 10 + ["ok"] * 10
    assert [one.in_flight for one in reports(front)] == [0]
