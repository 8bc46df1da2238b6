"""DNS returns other workers, or fails (15, 16), with a real gateway and streams of clients."""

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
)
from tests.fault.streaming_request import StreamingRequest, wait_for_end, wait_for_word
from tests.support.waiting import wait_until

CHAT = CLIENTS[0]


@pytest.fixture
async def stub() -> AsyncIterator[StubNameserver]:
    async with StubNameserver() as running:
        running.zone["A", "w.local"] = [(1, "127.0.0.1")]
        yield running


async def serve_dns_gateway(serve: Serve, stub: StubNameserver, port: str) -> RunningGateway:
    """Start a gateway that resolves its workers' names, at the latest when their TTL ends."""
    discovery: Any = {
        "dns": f"w.local:{port}",
        "nameserver": stub.address,
        "refresh_interval": "1s",
    }
    return await serve(build_pool_config([discovery]))


def list_worker_addresses(gateway: RunningGateway) -> list[str]:
    return [one.url.rpartition(":")[0] for one in get_worker_reports(gateway)]


@pytest.mark.fault(15)
async def test_dns_change_moves_requests_and_lets_old_streams_finish(
    serve: Serve, stub: StubNameserver
) -> None:
    async with WorkerProcess(words=100, pace=0.03) as old:
        port = old.url.rpartition(":")[2]
        async with WorkerProcess(address=f"127.0.0.2:{port}", words=5) as new:
            gateway = await serve_dns_gateway(serve, stub, port)
            hearings = [StreamingRequest(gateway, client) for client in CLIENTS]
            await wait_for_word(hearings, 4)
            stub.zone["A", "w.local"] = [(1, "127.0.0.2")]
            await wait_until(lambda: list_worker_addresses(gateway) == ["http://127.0.0.2"])
            old_ones = [one.task.done() for one in hearings]
            answers = [await send_request(gateway, client, stream=True) for client in CLIENTS]

            await wait_for_end(hearings)

            assert new.url == get_worker_reports(gateway)[0].url
            assert not any(old_ones), "no stream was running"
            for one in hearings:
                assert one.is_complete
                assert one.words == list(range(100))
            assert all(b"t4 " in answer.content for answer in answers)
            assert not any(b"t5 " in answer.content for answer in answers)
            assert {record.outcome for record in gateway.records} == {"ok"}
            assert [one.in_flight for one in get_worker_reports(gateway)] == [0]


@pytest.mark.fault(16)
@pytest.mark.parametrize("fault", ["servfail", "silence", "empty"])
async def test_dns_failure_keeps_the_workers_and_is_logged(
    serve: Serve, stub: StubNameserver, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    async with WorkerProcess() as worker:
        gateway = await serve_dns_gateway(serve, stub, worker.url.rpartition(":")[2])
        assert list_worker_addresses(gateway) == ["http://127.0.0.1"]

        with caplog.at_level(logging.WARNING, "interlingua"):
            stub.fault = fault
            await wait_until(
                lambda: any("w.local" in line for line in caplog.messages), seconds=20.0
            )
        response = await send_request(gateway, CHAT, stream=False)

    assert response.status_code == 200
    assert list_worker_addresses(gateway) == ["http://127.0.0.1"]
