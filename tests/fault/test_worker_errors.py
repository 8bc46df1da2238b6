"""Workers answer with errors: sometimes, for a while, or deliberately (18, 19, 20)."""

import asyncio

import pytest

from tests.conftest import Serve
from tests.fault.protocol_clients import (
    CHAT,
    Client,
    assert_error_response,
    build_error_reply,
    build_good_reply,
    create_raw_worker,
    every_client,
    get_worker_reports,
    send_request,
    serve_gateway,
    stream_or_unary,
)
from tests.support.fakes import Reply
from tests.support.waiting import wait_until

FAILS = build_error_reply("500 Internal Server Error")


@pytest.mark.fault(18)
async def test_intermittently_failing_worker_is_ejected_by_failure_rate(
    serve: Serve,
) -> None:
    """Three of ten requests fail, never five in a row: only the rate exceeds its limit."""
    well = build_good_reply(stream=False)
    ill = [FAILS, well, well, FAILS, well, well, FAILS, well, well, well]
    async with (
        create_raw_worker(*ill * 100) as bad,
        create_raw_worker(well) as a,
        create_raw_worker(well) as b,
    ):
        gateway = await serve_gateway(serve, bad, a, b)
        answers = [await send_request(gateway, CHAT, stream=False) for _ in range(1500)]
        states = [one.state for one in get_worker_reports(gateway)]

    worked = sum(answer.status_code == 200 for answer in answers)
    assert worked >= 0.995 * len(answers)
    assert states == ["out", "up", "up"]
    assert bad.request_count >= 20


def build_busy_reply(seconds: int) -> Reply:
    return build_error_reply("429 Too Many Requests", retry_after=str(seconds))


@pytest.mark.fault(19)
@stream_or_unary
async def test_busy_worker_gets_a_lower_concurrency_limit_and_is_not_ejected(
    serve: Serve, *, stream: bool
) -> None:
    """Six requests at a time; one worker rejects each request above its capacity."""
    gate = asyncio.Event()
    waits: Reply = [gate, *build_good_reply(stream=stream)]

    async with (
        create_raw_worker(waits, waits, build_busy_reply(1)) as a,
        create_raw_worker(waits) as b,
    ):
        gateway = await serve_gateway(serve, a, b)
        async with asyncio.TaskGroup() as tasks:
            requests = [
                tasks.create_task(send_request(gateway, CHAT, stream=stream)) for _ in range(6)
            ]
            await wait_until(lambda: a.request_count == 3)
            await wait_until(lambda: b.request_count == 4)
            limited = get_worker_reports(gateway)
            gate.set()

    assert [task.result().status_code for task in requests] == [200] * 6
    assert [one.state for one in limited] == ["up", "up"]
    assert [one.error for one in limited] == ["429", ""]
    assert limited[0].limit == 2, "the limit does not exceed what the worker accepted"
    assert limited[1].limit is None


@pytest.mark.fault(19)
@stream_or_unary
@every_client
async def test_all_workers_busy_returns_429_with_the_shortest_retry_after(
    serve: Serve, client: Client, *, stream: bool
) -> None:
    async with (
        create_raw_worker(build_busy_reply(9)) as a,
        create_raw_worker(build_busy_reply(4)) as b,
        create_raw_worker(build_busy_reply(7)) as c,
    ):
        gateway = await serve_gateway(serve, a, b, c)
        response = await send_request(gateway, client, stream=stream)
        states = [one.state for one in get_worker_reports(gateway)]

    assert_error_response(response, 429)
    assert response.headers["retry-after"] == "4"
    assert [one.request_count for one in (a, b, c)] == [1, 1, 1]
    assert states == ["up", "up", "up"]


@pytest.mark.fault(19)
@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
async def test_single_worker_gets_requests_during_its_pause_and_names_its_end(
    serve: Serve, status: str
) -> None:
    """It may refuse large requests only, and knows better than the gateway how long."""
    replies = [build_error_reply(status, retry_after=seconds) for seconds in ("30", "29")]
    async with create_raw_worker(*replies, build_good_reply(stream=False)) as worker:
        gateway = await serve_gateway(serve, worker)
        answers = [await send_request(gateway, CHAT, stream=False) for _ in range(3)]

    assert [one.status_code for one in answers] == [int(status[:3])] * 2 + [200]
    assert [one.headers.get("retry-after") for one in answers] == ["30", "29", None]


@pytest.mark.fault(19)
async def test_free_worker_serves_requests_while_another_is_busy(serve: Serve) -> None:
    """One of two workers is busy; the other serves its share."""
    async with (
        create_raw_worker(build_busy_reply(9)) as a,
        create_raw_worker(build_good_reply(stream=False)) as b,
    ):
        gateway = await serve_gateway(serve, a, b)
        answers = [await send_request(gateway, CHAT, stream=False) for _ in range(20)]

    assert {answer.status_code for answer in answers} == {200}
    assert b.request_count == 20


PUSHBACK = [
    pytest.param(
        build_error_reply("503 Busy", b'{"error":{"message":"The server is overloaded"}}'),
        id="says so",
    ),
    pytest.param(build_error_reply("503 Busy", retry_after="3"), id="names a time"),
]


@pytest.mark.fault(20)
@every_client
@pytest.mark.parametrize("reply", PUSHBACK)
async def test_overloaded_worker_is_not_retried(serve: Serve, client: Client, reply: Reply) -> None:
    async with create_raw_worker(reply) as worker:
        gateway = await serve_gateway(serve, worker, retries={"max": 5})
        response = await send_request(gateway, client, stream=True)
        [report] = get_worker_reports(gateway)

    assert_error_response(response, 503)
    assert int(response.headers["retry-after"]) >= 1
    assert worker.request_count == 1
    assert (report.state, report.limit) == ("up", 1), (
        "the worker gets fewer requests and is not ejected"
    )


@pytest.mark.fault(20)
@pytest.mark.parametrize("reply", PUSHBACK)
async def test_overloaded_worker_is_replaced_by_another_worker(serve: Serve, reply: Reply) -> None:
    async with create_raw_worker(reply) as a, create_raw_worker(build_good_reply(stream=True)) as b:
        gateway = await serve_gateway(serve, a, b)
        response = await send_request(gateway, CHAT, stream=True)

    assert response.status_code == 200
    assert (a.request_count, b.request_count) == (1, 1)
