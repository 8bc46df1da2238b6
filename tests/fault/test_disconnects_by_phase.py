"""A client disconnects in the queue, before the first token, and in the stream (30 to 32).

The time until the worker notices is recorded beside the result, and limited only to detect a hang.
"""

import asyncio
from collections.abc import Callable

import pytest

from tests.conftest import Serve
from tests.fault.protocol_clients import (
    STARTED_STREAM,
    STREAM,
    Client,
    RawClient,
    build_good_reply,
    build_response_body,
    create_raw_worker,
    every_client,
    get_queue_length,
    get_single_record,
    get_worker_reports,
    send_request,
    serve_gateway,
    stream_or_unary,
)
from tests.support.fakes import CHUNKED, HANG, Reply, make_reply
from tests.support.waiting import wait_until

Keep = Callable[[str, object], None]


@pytest.mark.fault(30)
@stream_or_unary
@every_client
async def test_client_disconnect_in_the_queue_sends_no_upstream_request(
    serve: Serve, client: Client, *, stream: bool
) -> None:
    gate = asyncio.Event()
    async with create_raw_worker(
        [gate, *build_good_reply(stream=stream)], build_good_reply(stream=stream)
    ) as worker:
        gateway = await serve_gateway(serve, worker, max_concurrency=1)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(send_request(gateway, client, stream=stream))
            await worker.wait_for_request()
            caller = await RawClient.connect(gateway, *client.protocol.call("m", stream=stream))
            await wait_until(lambda: get_queue_length(gateway) == 1)
            caller.close()
            await wait_until(lambda: get_queue_length(gateway) == 0)
            gate.set()
        after = await send_request(gateway, client, stream=stream)

    assert first.result().status_code == after.status_code == 200
    assert worker.request_count == 2, "the cancelled request was sent to the worker"

    outcomes = sorted(record.outcome for record in gateway.records)
    assert outcomes == ["cancelled", "ok", "ok"]


BEFORE: dict[str, Reply] = {
    "before the head": [HANG],
    "before the body": [CHUNKED, HANG],
    "inside a unary response": [make_reply(build_response_body("Hello"))[:-9], HANG],
}


@pytest.mark.fault(31)
@stream_or_unary
@every_client
@pytest.mark.parametrize("reply", BEFORE.values(), ids=BEFORE)
async def test_client_disconnect_before_the_first_token_cancels_the_worker(
    serve: Serve, client: Client, reply: Reply, record_property: Keep, *, stream: bool
) -> None:
    async with create_raw_worker(reply) as worker:
        gateway = await serve_gateway(serve, worker)
        caller = await RawClient.connect(gateway, *client.protocol.call("m", stream=stream))
        await worker.wait_for_request()
        await asyncio.sleep(0.01)
        caller.close()
        took = await worker.wait_for_disconnect()
        record_property("milliseconds until the worker saw it", round(took * 1000, 1))
        record = await get_single_record(gateway)

    assert (record.outcome, record.tokens) == ("cancelled", 0)
    assert worker.request_count == 1
    assert [one.state for one in get_worker_reports(gateway)] == ["up"]


@pytest.mark.fault(32)
@every_client
async def test_client_disconnect_mid_stream_cancels_the_worker(
    serve: Serve, client: Client, record_property: Keep
) -> None:
    """The record has the text that the client received."""
    async with create_raw_worker([STARTED_STREAM, HANG]) as worker:
        gateway = await serve_gateway(serve, worker)
        caller = await RawClient.connect(gateway, *client.protocol.call("m", stream=True))
        await caller.read_until(b"Hello")
        caller.close()
        took = await worker.wait_for_disconnect()
        record_property("milliseconds until the worker saw it", round(took * 1000, 1))
        record = await get_single_record(gateway)

    assert (record.outcome, record.tokens, record.status) == ("cancelled", 2, 200)
    assert worker.request_count == 1
    assert [one.state for one in get_worker_reports(gateway)] == ["up"]


@pytest.mark.fault(32)
@every_client
async def test_client_disconnects_do_not_affect_other_clients(serve: Serve, client: Client) -> None:
    """Ten clients disconnect and ten stay; each worker response ends with its own client."""
    gate = asyncio.Event()
    async with create_raw_worker(
        [STARTED_STREAM, gate, STREAM.removeprefix(STARTED_STREAM)]
    ) as worker:
        gateway = await serve_gateway(serve, worker)
        path, body = client.protocol.call("m", stream=True)
        callers = [await RawClient.connect(gateway, path, body) for _ in range(20)]
        for caller in callers:
            await caller.read_until(b"Hello")
        for caller in callers[::2]:
            caller.close()
        await wait_until(lambda: len(gateway.records) == 10)
        gate.set()
        ends = [await caller.read_until(b"0\r\n\r\n") for caller in callers[1::2]]
        await wait_until(lambda: len(gateway.records) == 20)
        for caller in callers[1::2]:
            caller.close()

    assert all(client.error_text not in end for end in ends)
    assert [record.outcome for record in gateway.records] == ["cancelled"] * 10 + ["ok"] * 10
    assert [one.in_flight for one in get_worker_reports(gateway)] == [0]
