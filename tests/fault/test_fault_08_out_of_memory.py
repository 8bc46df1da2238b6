"""A worker takes more memory than it may have, and the kernel kills it (8)."""

import signal

from tests.conftest import Serve
from tests.fault.elsewhere import little_memory
from tests.fault.fronts import CLIENTS, ask, before, reports, until
from tests.fault.hearing import Hearing, all_over
from tests.fault.processes import WorkerProcess

CHAT = CLIENTS[0]
HEALTH = {"interval": "60s", "slow_start": "30s"}
BREAKER = {"consecutive_failures": 1, "open_for": "300ms"}


async def test_fault_08_a_worker_killed_for_its_memory_is_told_and_comes_back_slowly(
    serve: Serve,
) -> None:
    with little_memory(64 << 20) as settle:
        async with WorkerProcess(words=50, pace=0.01, settle=settle) as worker:
            front = await before(serve, worker.url, health=HEALTH, breaker=BREAKER)
            hearings = [Hearing(front, client, "greedy") for client in CLIENTS]
            assert await worker.ended() == -signal.SIGKILL
            await all_over(hearings, within=1.0)

            for one in hearings:
                assert one.is_told, (one.client.name, bytes(one.data))
                assert one.words == list(range(len(one.words)))
                assert 5 <= len(one.words) < 50
            heard = sorted(len(one.words) for one in hearings)
            assert sorted(record.tokens for record in front.records) == heard
            assert {record.outcome for record in front.records} == {"truncated"}
            [report] = reports(front)
            assert (report.state, report.error, report.in_flight) == ("out", "disconnect", 0)

            await worker.start()
            await until(lambda: reports(front)[0].state == "trial")
            answer = await ask(front, CHAT, stream=False)

    assert answer.status_code == 200
    [report] = reports(front)
    assert report.state == "up"
    assert 0.1 <= report.weight < 0.5, "its share grows slowly"
