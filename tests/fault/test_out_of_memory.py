"""A worker exceeds its memory limit, and the kernel kills it (8)."""

import signal

import pytest

from tests.conftest import Serve
from tests.fault.network_namespace import limit_memory
from tests.fault.processes import WorkerProcess
from tests.fault.protocol_clients import (
    CLIENTS,
    get_worker_reports,
    send_request,
    serve_gateway,
)
from tests.fault.streaming_request import StreamingRequest, wait_for_end
from tests.support.waiting import wait_until

CHAT = CLIENTS[0]
HEALTH = {"interval": "60s", "slow_start": "30s"}
BREAKER = {"consecutive_failures": 1, "open_for": "300ms"}


@pytest.mark.fault(8)
async def test_oom_killed_worker_breaks_streams_with_an_error_and_slow_starts(
    serve: Serve,
) -> None:
    with limit_memory(64 << 20) as settle:
        async with WorkerProcess(words=50, pace=0.01, settle=settle) as worker:
            gateway = await serve_gateway(serve, worker.url, health=HEALTH, breaker=BREAKER)
            hearings = [StreamingRequest(gateway, client, "greedy") for client in CLIENTS]
            assert await worker.ended() == -signal.SIGKILL

            await wait_for_end(hearings)

            for one in hearings:
                assert one.has_error, (one.client.name, bytes(one.data))
                assert one.words == list(range(len(one.words)))
                assert 5 <= len(one.words) < 50

            word_counts = sorted(len(one.words) for one in hearings)
            assert sorted(record.tokens for record in gateway.records) == word_counts
            assert {record.outcome for record in gateway.records} == {"truncated"}

            [report] = get_worker_reports(gateway)
            assert (report.state, report.error, report.in_flight) == ("out", "disconnect", 0)

            await worker.start()
            await wait_until(lambda: get_worker_reports(gateway)[0].state == "trial")
            response = await send_request(gateway, CHAT, stream=False)

    assert response.status_code == 200

    [report] = get_worker_reports(gateway)
    assert report.state == "up"
    assert 0.1 <= report.weight < 0.5, "its share grows slowly"
