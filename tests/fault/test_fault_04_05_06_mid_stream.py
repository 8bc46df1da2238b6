"""A worker dies or halts in the middle of its answers (4, 5, 6): a process, and its signals."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.conftest import Running, Serve
from tests.fault.fronts import CLIENTS, TIMEOUTS, ask, before, reports, until
from tests.fault.hearing import Hearing, all_heard, all_over
from tests.fault.processes import WorkerProcess

CHAT = CLIENTS[0]
OFTEN = {"interval": "100ms", "timeout": "300ms", "fall": 2, "rise": 1, "slow_start": "0s"}
WORDS = 50


def assert_broken_off(front: Running, hearings: list[Hearing]) -> None:
    """Each client was told in its dialect, and what it got was recorded, no more and no less."""
    for one in hearings:
        assert one.is_told, (one.client.name, bytes(one.data))
        assert one.words == list(range(len(one.words)))
        assert 5 <= len(one.words) < WORDS
    assert [record.outcome for record in front.records] == ["truncated"] * len(hearings)
    heard = sorted(len(one.words) for one in hearings)
    assert sorted(record.tokens for record in front.records) == heard


async def test_fault_04_a_worker_killed_mid_stream_is_told(serve: Serve) -> None:
    async with WorkerProcess(words=WORDS, pace=0.03) as worker:
        front = await before(serve, worker.url)
        hearings = [Hearing(front, client) for client in CLIENTS]
        await all_heard(hearings, 4)
        worker.kill()
        await all_over(hearings, within=1.0)

        assert_broken_off(front, hearings)
        assert {record.error for record in front.records} == {"StreamBroken"}
        [report] = reports(front)
        assert (report.in_flight, report.error) == (0, "disconnect")
        assert report.state == "out", f"{len(hearings)} answers were cut"


async def test_fault_04_another_worker_answers_those_that_come_after(serve: Serve) -> None:
    async with WorkerProcess(words=WORDS, pace=0.03) as bad, WorkerProcess() as good:
        front = await before(serve, bad.url, good.url, health=OFTEN | {"timeout": "2s"})
        hearing = Hearing(front, CHAT)
        await all_heard([hearing], 4)
        bad.kill()
        await all_over([hearing], within=1.0)
        after = [await ask(front, CHAT, stream=False) for _ in range(20)]

        assert hearing.is_told
        assert {answer.status_code for answer in after} == {200}
        await until(lambda: [one.state for one in reports(front)] == ["out", "up"])
        assert [one.in_flight for one in reports(front)] == [0, 0]


def told_by(log: Path) -> list[str]:
    """How requests ended, by the worker's own log."""
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    return [line["what"] for line in lines if line["what"] != "asked"]


async def test_fault_05_a_worker_that_halts_mid_stream_is_told_and_left(
    serve: Serve, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    limits = TIMEOUTS | {"idle": "500ms"}
    async with WorkerProcess(words=WORDS, pace=0.03, log=log) as bad:
        front = await before(serve, bad.url, timeouts=limits, health=OFTEN)
        hearings = [Hearing(front, client) for client in CLIENTS]
        await all_heard(hearings, 4)
        bad.freeze()
        await all_over(hearings, within=5.0)

        assert_broken_off(front, hearings)
        assert {record.error for record in front.records} == {"DeadlineExceeded"}
        await until(lambda: reports(front)[0].state == "out")
        assert [one.in_flight for one in reports(front)] == [0]

        bad.thaw()
        await until(lambda: len(told_by(log)) == len(CLIENTS))
        assert set(told_by(log)) == {"cancelled"}, "it was not left alone with them"


async def test_fault_05_its_requests_go_elsewhere_until_it_goes_on(serve: Serve) -> None:
    limits = TIMEOUTS | {"idle": "500ms"}
    async with WorkerProcess(words=WORDS, pace=0.03) as bad, WorkerProcess() as good:
        front = await before(serve, bad.url, good.url, timeouts=limits, health=OFTEN)
        hearing = Hearing(front, CHAT)
        await all_heard([hearing], 4)
        bad.freeze()
        await until(lambda: reports(front)[0].state == "out")
        after = [await ask(front, CHAT, stream=False) for _ in range(10)]
        await all_over([hearing], within=5.0)
        bad.thaw()
        await until(lambda: reports(front)[0].state == "up")

    assert {answer.status_code for answer in after} == {200}
    assert hearing.is_told


HALTS = [
    pytest.param(0.5, "2s", id="half a second"),
    pytest.param(3.0, "30s", id="three seconds", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("seconds", "idle"), HALTS)
async def test_fault_06_a_worker_that_halts_for_a_moment_does_no_harm(
    serve: Serve, seconds: float, idle: str
) -> None:
    async with WorkerProcess(words=10, pace=0.03) as worker:
        front = await before(serve, worker.url, timeouts=TIMEOUTS | {"idle": idle})
        hearings = [Hearing(front, client) for client in CLIENTS]
        await all_heard(hearings, 4)
        worker.freeze()
        await asyncio.sleep(seconds)
        assert not any(one.task.done() for one in hearings)
        worker.thaw()
        await all_over(hearings, within=5.0)

        for one in hearings:
            assert one.is_complete, (one.client.name, bytes(one.data))
            assert one.words == list(range(10))
        assert {record.outcome for record in front.records} == {"ok"}
        assert [(one.state, one.in_flight) for one in reports(front)] == [("up", 0)]
