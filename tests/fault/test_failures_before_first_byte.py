"""A worker fails before its first byte (1, 2, 3): another answers, and no client gets an error."""

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import RunningGateway, Serve
from tests.fault.processes import WorkerProcess
from tests.fault.protocol_clients import (
    CLIENTS,
    TIMEOUTS,
    Client,
    build_good_reply,
    create_raw_worker,
    every_client,
    get_worker_reports,
    is_complete,
    send_request,
    serve_gateway,
    stream_or_unary,
)
from tests.fault.worker_process import format_word
from tests.support.fakes import HANG
from tests.support.waiting import wait_until

OFTEN = {"interval": "100ms", "timeout": "2s", "fall": 3}


@pytest.fixture
def refusing_url() -> Iterator[str]:
    """The URL of a port that is reserved but not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


async def send_requests(gateway: RunningGateway, times: int, at_once: int) -> list[httpx.Response]:
    """Send requests of every protocol in turn, streamed and unary, some at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> httpx.Response:
        async with places:
            client = CLIENTS[number % len(CLIENTS)]
            return await send_request(gateway, client, stream=number % 2 == 0)

    return await asyncio.gather(*(one(number) for number in range(times)))


def assert_all_complete(answers: list[httpx.Response], words: int) -> None:
    assert Counter(answer.status_code for answer in answers) == {200: len(answers)}
    for number, response in enumerate(answers):
        assert format_word(words - 1).encode() in response.content
        assert number % 2 or is_complete(response, CLIENTS[number % len(CLIENTS)])


@pytest.mark.fault(1)
async def test_connection_refused_is_retried_without_client_errors(
    serve: Serve, refusing_url: str
) -> None:
    async with WorkerProcess() as a, WorkerProcess() as b:
        gateway = await serve_gateway(serve, refusing_url, a.url, b.url, health=OFTEN)
        answers = await send_requests(gateway, 500, at_once=20)
        await wait_until(
            lambda: [one.state for one in get_worker_reports(gateway)] == ["out", "up", "up"]
        )
        dead = get_worker_reports(gateway)[0]

    assert_all_complete(answers, words=5)
    assert (dead.error, dead.in_flight) == ("connect", 0)
    assert {record.outcome for record in gateway.records} == {"ok"}


@pytest.mark.fault(1)
async def test_health_check_ejects_a_worker_that_refuses_connections(
    serve: Serve, refusing_url: str
) -> None:
    async with create_raw_worker(build_good_reply(stream=False)) as well:
        gateway = await serve_gateway(serve, refusing_url, well, health=OFTEN)
        await wait_until(lambda: get_worker_reports(gateway)[0].state == "out")

    assert get_worker_reports(gateway)[1].error == ""


@pytest.mark.fault(2)
@every_client
async def test_first_token_timeout_is_retried_on_another_worker(
    serve: Serve, client: Client
) -> None:
    limits = TIMEOUTS | {"first_token": "200ms"}
    async with (
        create_raw_worker([HANG]) as silent,
        create_raw_worker(build_good_reply(stream=True)) as well,
    ):
        gateway = await serve_gateway(serve, silent, well, timeouts=limits)
        response = await send_request(gateway, client, stream=True)

        await silent.wait_for_disconnect()

        assert is_complete(response, client)
        assert b"Hello" in response.content
        assert (silent.request_count, well.request_count) == (1, 1)
        assert [one.in_flight for one in get_worker_reports(gateway)] == [0, 0]
        assert get_worker_reports(gateway)[0].error == "first_token"


@pytest.mark.fault(2)
@stream_or_unary
async def test_timed_out_request_releases_its_concurrency_slot(
    serve: Serve, *, stream: bool
) -> None:
    """The worker has one slot; after the request timed out, the next one gets it."""
    limits = TIMEOUTS | {"first_token": "200ms", "total": "400ms"}
    health = {"interval": "60s"}

    async with create_raw_worker([HANG], build_good_reply(stream=stream)) as worker:
        gateway = await serve_gateway(
            serve, worker, timeouts=limits, health=health, max_concurrency=1
        )
        hung = await send_request(gateway, CLIENTS[0], stream=stream)
        await worker.wait_for_disconnect()
        response = await send_request(gateway, CLIENTS[0], stream=stream)

    assert hung.status_code == 504
    assert response.status_code == 200
    assert b"Hello" in response.content
    assert [one.in_flight for one in get_worker_reports(gateway)] == [0]


@pytest.mark.fault(2)
async def test_worker_that_never_responds_is_ejected_by_the_circuit_breaker(
    serve: Serve,
) -> None:
    limits = TIMEOUTS | {"first_token": "100ms"}
    async with (
        create_raw_worker([HANG]) as silent,
        create_raw_worker(build_good_reply(stream=True)) as well,
    ):
        gateway = await serve_gateway(
            serve, silent, well, timeouts=limits, breaker={"consecutive_failures": 3}
        )
        answers = [await send_request(gateway, CLIENTS[0], stream=True) for _ in range(10)]

    assert {answer.status_code for answer in answers} == {200}
    assert silent.request_count == 3
    assert [one.state for one in get_worker_reports(gateway)] == ["out", "up"]


@pytest.mark.fault(3)
async def test_worker_killed_before_its_first_byte_causes_no_client_errors(
    serve: Serve,
) -> None:
    """The worker is killed under load, with at least ten running requests.

    A fifth of the recent requests may be retried, so some are sent before.
    """
    async with WorkerProcess(first=0.3) as bad, WorkerProcess(first=0.3) as well:
        gateway = await serve_gateway(serve, bad.url, well.url, health=OFTEN)
        begun = await send_requests(gateway, 100, at_once=50)
        loaded = asyncio.get_running_loop().create_task(send_requests(gateway, 100, at_once=40))
        await wait_until(lambda: get_worker_reports(gateway)[0].in_flight >= 10)
        await asyncio.sleep(0.03)
        killed_at_work_on = get_worker_reports(gateway)[0].in_flight
        bad.kill()
        answers = await loaded
        await wait_until(
            lambda: [one.state for one in get_worker_reports(gateway)] == ["out", "up"]
        )

    assert killed_at_work_on > 0
    assert_all_complete(begun, words=5)
    assert_all_complete(answers, words=5)
    assert [one.in_flight for one in get_worker_reports(gateway)] == [0, 0]
    assert {record.outcome for record in gateway.records} == {"ok"}
