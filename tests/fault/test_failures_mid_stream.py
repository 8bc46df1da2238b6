"""A worker process is killed or frozen in the middle of its responses (4, 5, 6)."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.conftest import RunningGateway, Serve
from tests.fault.processes import WorkerProcess
from tests.fault.protocol_clients import (
    CLIENTS,
    TIMEOUTS,
    get_worker_reports,
    send_request,
    serve_gateway,
)
from tests.fault.streaming_request import StreamingRequest, wait_for_end, wait_for_word
from tests.support.waiting import wait_until

CHAT = CLIENTS[0]
OFTEN = {"interval": "100ms", "timeout": "2s", "fall": 2, "rise": 1, "slow_start": "0s"}
WORDS = 500


def assert_truncated(gateway: RunningGateway, hearings: list[StreamingRequest]) -> None:
    """Each client got an error in its protocol; its record has exactly what it received."""
    for one in hearings:
        assert one.has_error, (one.client.name, bytes(one.data))
        assert one.words == list(range(len(one.words)))
        assert 5 <= len(one.words) < WORDS
    assert [record.outcome for record in gateway.records] == ["truncated"] * len(hearings)
    word_counts = sorted(len(one.words) for one in hearings)
    assert sorted(record.tokens for record in gateway.records) == word_counts


@pytest.mark.fault(4)
async def test_worker_killed_mid_stream_ends_each_stream_with_an_error(
    serve: Serve,
) -> None:
    async with WorkerProcess(words=WORDS, pace=0.03) as worker:
        gateway = await serve_gateway(serve, worker.url)
        hearings = [StreamingRequest(gateway, client) for client in CLIENTS]
        await wait_for_word(hearings, 4)
        worker.kill()
        await wait_for_end(hearings)

        assert_truncated(gateway, hearings)
        assert {record.error for record in gateway.records} == {"StreamBroken"}

        [report] = get_worker_reports(gateway)
        assert (report.in_flight, report.error) == (0, "disconnect")
        assert report.state == "out", f"{len(hearings)} answers were cut"


@pytest.mark.fault(4)
async def test_later_requests_use_another_worker(serve: Serve) -> None:
    async with WorkerProcess(words=WORDS, pace=0.03) as bad, WorkerProcess() as good:
        gateway = await serve_gateway(serve, bad.url, good.url, health=OFTEN)
        hearing = StreamingRequest(gateway, CHAT)
        await wait_for_word([hearing], 4)
        bad.kill()
        await wait_for_end([hearing])
        after = [await send_request(gateway, CHAT, stream=False) for _ in range(20)]

        assert hearing.has_error
        assert {answer.status_code for answer in after} == {200}

        await wait_until(
            lambda: [one.state for one in get_worker_reports(gateway)] == ["out", "up"]
        )
        assert [one.in_flight for one in get_worker_reports(gateway)] == [0, 0]


def read_worker_log(log: Path) -> list[str]:
    """Return how requests ended by the worker's own log."""
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    return [line["what"] for line in lines if line["what"] != "received"]


@pytest.mark.fault(5)
async def test_stalled_worker_ends_streams_with_an_error_and_is_ejected(
    serve: Serve, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    limits = TIMEOUTS | {"idle": "2s"}
    async with WorkerProcess(words=WORDS, pace=0.03, log=log) as bad:
        gateway = await serve_gateway(serve, bad.url, timeouts=limits, health=OFTEN)
        hearings = [StreamingRequest(gateway, client) for client in CLIENTS]
        await wait_for_word(hearings, 4)
        bad.freeze()
        await wait_for_end(hearings)

        assert_truncated(gateway, hearings)
        assert {record.error for record in gateway.records} == {"DeadlineExceeded"}

        await wait_until(lambda: get_worker_reports(gateway)[0].state == "out")
        assert [one.in_flight for one in get_worker_reports(gateway)] == [0]

        bad.thaw()
        await wait_until(lambda: len(read_worker_log(log)) == len(CLIENTS))
        assert set(read_worker_log(log)) == {"cancelled"}, "the worker was ejected"


@pytest.mark.fault(5)
async def test_stalled_worker_gets_no_requests_before_resuming(serve: Serve) -> None:
    limits = TIMEOUTS | {"idle": "2s"}
    async with WorkerProcess(words=WORDS, pace=0.03) as bad, WorkerProcess() as good:
        gateway = await serve_gateway(serve, bad.url, good.url, timeouts=limits, health=OFTEN)
        hearing = StreamingRequest(gateway, CHAT)
        await wait_for_word([hearing], 4)
        bad.freeze()
        await wait_until(lambda: get_worker_reports(gateway)[0].state == "out")
        after = [await send_request(gateway, CHAT, stream=False) for _ in range(10)]
        await wait_for_end([hearing])
        bad.thaw()
        await wait_until(lambda: get_worker_reports(gateway)[0].state == "up")

    assert {answer.status_code for answer in after} == {200}
    assert hearing.has_error


HALTS = [
    pytest.param(0.5, "10s", id="half a second"),
    pytest.param(3.0, "30s", id="three seconds", marks=pytest.mark.slow),
]


@pytest.mark.fault(6)
@pytest.mark.parametrize(("seconds", "idle"), HALTS)
async def test_short_stall_does_not_break_streams(serve: Serve, seconds: float, idle: str) -> None:
    async with WorkerProcess(words=10, pace=0.03) as worker:
        gateway = await serve_gateway(serve, worker.url, timeouts=TIMEOUTS | {"idle": idle})
        hearings = [StreamingRequest(gateway, client) for client in CLIENTS]
        await wait_for_word(hearings, 4)
        worker.freeze()
        await asyncio.sleep(seconds)

        assert not any(one.task.done() for one in hearings)

        worker.thaw()
        await wait_for_end(hearings)

        for one in hearings:
            assert one.is_complete, (one.client.name, bytes(one.data))
            assert one.words == list(range(10))
        assert {record.outcome for record in gateway.records} == {"ok"}
        assert [(one.state, one.in_flight) for one in get_worker_reports(gateway)] == [("up", 0)]
