"""DNS names other workers, or fails to (15, 16): a whole gateway, and its clients' streams."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.conftest import RunningGateway, Serve
from tests.fault.nameserver import Fault, StubNameserver
from tests.fault.processes import WorkerProcess
from tests.fault.protocol_clients import (
    CLIENTS,
    build_pool_config,
    get_worker_reports,
    send_request,
    wait_until,
)
from tests.fault.streaming_request import StreamingRequest, wait_for_end, wait_for_word

CHAT = CLIENTS[0]


@pytest.fixture
async def stub() -> AsyncIterator[StubNameserver]:
    async with StubNameserver() as running:
        running.zone["A", "w.local"] = [(1, "127.0.0.1")]
        yield running


async def serve_dns_gateway(serve: Serve, stub: StubNameserver, port: str) -> RunningGateway:
    """A gateway that asks for its workers' addresses, for as long as they say at most."""
    discovery: Any = {
        "dns": f"w.local:{port}",
        "nameserver": stub.address,
        "refresh_interval": "1s",
    }
    return await serve(build_pool_config([discovery]))


def list_worker_addresses(front: RunningGateway) -> list[str]:
    return [one.url.rpartition(":")[0] for one in get_worker_reports(front)]


@pytest.mark.fault(15)
async def test_dns_change_moves_requests_and_lets_old_streams_finish(
    serve: Serve, stub: StubNameserver
) -> None:
    async with WorkerProcess(words=100, pace=0.03) as old:
        port = old.url.rpartition(":")[2]
        async with WorkerProcess(address=f"127.0.0.2:{port}", words=5) as new:
            front = await serve_dns_gateway(serve, stub, port)
            hearings = [StreamingRequest(front, client) for client in CLIENTS]
            await wait_for_word(hearings, 4)
            stub.zone["A", "w.local"] = [(1, "127.0.0.2")]
            await wait_until(lambda: list_worker_addresses(front) == ["http://127.0.0.2"])
            old_ones = [one.task.done() for one in hearings]
            answers = [await send_request(front, client, stream=True) for client in CLIENTS]
            await wait_for_end(hearings, within=10.0)

            assert new.url == get_worker_reports(front)[0].url
            assert not any(old_ones), "nothing was left to end well"
            for one in hearings:
                assert one.is_complete
                assert one.words == list(range(100))
            assert all(b"t4 " in answer.content for answer in answers)
            assert not any(b"t5 " in answer.content for answer in answers)
            assert {record.outcome for record in front.records} == {"ok"}
            assert [one.in_flight for one in get_worker_reports(front)] == [0]


@pytest.mark.fault(16)
@pytest.mark.parametrize("fault", ["servfail", "silence", "empty"])
async def test_dns_failure_keeps_the_workers_and_is_logged(
    serve: Serve, stub: StubNameserver, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    async with WorkerProcess() as worker:
        front = await serve_dns_gateway(serve, stub, worker.url.rpartition(":")[2])
        assert list_worker_addresses(front) == ["http://127.0.0.1"]
        with caplog.at_level(logging.WARNING, "interlingua"):
            stub.fault = fault
            await wait_until(
                lambda: any("w.local" in line for line in caplog.messages), seconds=20.0
            )
        answer = await send_request(front, CHAT, stream=False)

    assert answer.status_code == 200
    assert list_worker_addresses(front) == ["http://127.0.0.1"]
