"""A client leaves: while it waits, before the first token, and mid-stream (30, 31 and 32).

How soon the worker sees it is kept beside the result, and bounded only so that a hang is found.
"""

import asyncio
from collections.abc import Callable

import pytest

from tests.conftest import Serve
from tests.fault.protocol_clients import (
    SAYS,
    STREAM,
    Client,
    RawClient,
    both,
    build_good_reply,
    build_response_body,
    create_raw_worker,
    every_client,
    get_queue_length,
    get_single_record,
    get_worker_reports,
    send_request,
    serve_gateway,
    wait_until,
)
from tests.support.fakes import CHUNKED, HANG, Reply, make_reply

Keep = Callable[[str, object], None]
HANGING = 2.0


@pytest.mark.fault(30)
@both
@every_client
async def test_client_disconnect_in_the_queue_sends_no_upstream_request(
    serve: Serve, client: Client, *, stream: bool
) -> None:
    gate = asyncio.Event()
    async with create_raw_worker(
        [gate, *build_good_reply(stream=stream)], build_good_reply(stream=stream)
    ) as worker:
        front = await serve_gateway(serve, worker, max_concurrency=1)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(send_request(front, client, stream=stream))
            await worker.wait_for_request()
            caller = await RawClient.ask(front, *client.way.call("m", stream=stream))
            await wait_until(lambda: get_queue_length(front) == 1)
            caller.leave()
            await wait_until(lambda: get_queue_length(front) == 0)
            gate.set()
        after = await send_request(front, client, stream=stream)

    assert first.result().status_code == after.status_code == 200
    assert worker.request_count == 2, "the one that left was not asked for"
    outcomes = sorted(record.outcome for record in front.records)
    assert outcomes == ["cancelled", "ok", "ok"]


BEFORE: dict[str, Reply] = {
    "before the head": [HANG],
    "before the body": [CHUNKED, HANG],
    "inside a whole answer": [make_reply(build_response_body("Hello"))[:-9], HANG],
}


@pytest.mark.fault(31)
@both
@every_client
@pytest.mark.parametrize("reply", BEFORE.values(), ids=BEFORE)
async def test_client_disconnect_before_the_first_token_cancels_the_worker(
    serve: Serve, client: Client, reply: Reply, record_property: Keep, *, stream: bool
) -> None:
    async with create_raw_worker(reply) as worker:
        front = await serve_gateway(serve, worker)
        caller = await RawClient.ask(front, *client.way.call("m", stream=stream))
        await worker.wait_for_request()
        await asyncio.sleep(0.01)
        caller.leave()
        took = await worker.wait_for_disconnect(within=HANGING)
        record_property("milliseconds until the worker saw it", round(took * 1000, 1))
        record = await get_single_record(front)

    assert (record.outcome, record.tokens) == ("cancelled", 0)
    assert worker.request_count == 1
    assert [one.state for one in get_worker_reports(front)] == ["up"]


@pytest.mark.fault(32)
@every_client
async def test_client_disconnect_mid_stream_cancels_the_worker(
    serve: Serve, client: Client, record_property: Keep
) -> None:
    """And what it got until then is recorded."""
    async with create_raw_worker([SAYS, HANG]) as worker:
        front = await serve_gateway(serve, worker)
        caller = await RawClient.ask(front, *client.way.call("m", stream=True))
        await caller.hear(b"Hello")
        caller.leave()
        took = await worker.wait_for_disconnect(within=HANGING)
        record_property("milliseconds until the worker saw it", round(took * 1000, 1))
        record = await get_single_record(front)

    assert (record.outcome, record.tokens, record.status) == ("cancelled", 2, 200)
    assert worker.request_count == 1
    assert [one.state for one in get_worker_reports(front)] == ["up"]


@pytest.mark.fault(32)
@every_client
async def test_client_disconnects_do_not_affect_other_clients(serve: Serve, client: Client) -> None:
    """Ten leave, ten stay; each worker's answer ends with its own client."""
    gate = asyncio.Event()
    async with create_raw_worker([SAYS, gate, STREAM.removeprefix(SAYS)]) as worker:
        front = await serve_gateway(serve, worker)
        path, body = client.way.call("m", stream=True)
        callers = [await RawClient.ask(front, path, body) for _ in range(20)]
        for caller in callers:
            await caller.hear(b"Hello")
        for caller in callers[::2]:
            caller.leave()
        await wait_until(lambda: len(front.records) == 10)
        gate.set()
        ends = [await caller.hear(b"0\r\n\r\n") for caller in callers[1::2]]
        await wait_until(lambda: len(front.records) == 20)
        for caller in callers[1::2]:
            caller.leave()

    assert all(client.error_text not in end for end in ends)
    assert [record.outcome for record in front.records] == ["cancelled"] * 10 + ["ok"] * 10
    assert [one.in_flight for one in get_worker_reports(front)] == [0]
