"""Workers are restarted one after another under load, and no request is lost (fault 7).

    python -m tests.fault.rolling_restart --runs 5 --rate 200

In each round every worker is restarted once, alternately in one of two ways:

    gracefully  it fails its probes, closes connections after their responses, and exits later
    abruptly    it stops listening and closes idle connections; running responses finish
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import aiohttp
import click
from msgspec import Struct
from msgspec.structs import replace

from backends.pool.pool import PoolBackend
from gateway.config.loader import load_text
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway, build_services
from tests.fault.history import History, read_logs
from tests.fault.load_generator import LoadGenerator
from tests.fault.load_runs import run_repeatedly
from tests.fault.processes import WorkerProcess
from tests.fault.protocol_clients import build_pool_config, get_pool
from tests.support.waiting import wait_until

HEALTH = {"interval": "100ms", "timeout": "1s", "fall": 1, "rise": 1, "slow_start": "0s"}
GRACE = 0.5
PACE = 0.02
BETWEEN = 0.2
"""Seconds between two restarts."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RollingRestartRun(Struct, frozen=True):
    """The result of a run. ``rate`` is the measured rate in requests per second."""

    history: History
    rate: float
    restarts: int

    @property
    def done(self) -> str:
        """See ``tests.fault.load_runs.LoadRun``."""
        return f"{self.restarts} restarts"

    @property
    def failed(self) -> bool:
        """See ``tests.fault.load_runs.LoadRun``."""
        return bool(self.lost)

    @property
    def lost(self) -> int:
        """Incomplete requests whose clients stayed connected."""
        ends = self.history.ends()
        return len(self.history.observations) - ends["complete"] - ends["left"]


@asynccontextmanager
async def run_gateway(
    text: str, records: list[RequestRecord]
) -> AsyncIterator[tuple[Gateway, int]]:
    """Run a gateway with this configuration; yield it and its port."""
    services = replace(build_services(), observe_request=records.append)
    app = Gateway(load_text(text, "rolling.yaml", env=os.environ), services)
    [url, *_] = await app.start()
    try:
        yield app, int(url.rpartition(":")[2])
    finally:
        await app.stop()


async def run_rolling_restarts(
    folder: Path,
    *,
    rounds: int = 3,
    rate: float = 200.0,
    workers: int = 3,
    disconnect_every: int = 0,
) -> RollingRestartRun:
    """Restart each worker once in each round, under load.

    One of every ``disconnect_every`` clients disconnects in the middle; 0: none.
    """
    logs = [folder / f"worker{number}.log" for number in range(workers)]
    records: list[RequestRecord] = []
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(WorkerProcess(pace=PACE, grace=GRACE, log=log))
            for log in logs
        ]
        for one in processes:
            await _wait_until_healthy(one)
        text = build_pool_config([one.url for one in processes], policy="least_load", health=HEALTH)
        app, port = await stack.enter_async_context(run_gateway(text, records))
        load = await stack.enter_async_context(
            LoadGenerator(port, disconnect_every=disconnect_every)
        )
        pool = get_pool(app)
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(rate, over))
            try:
                for number in range(rounds):
                    await _restart_each_worker(processes, pool, number)
            finally:
                over.set()
        await wait_until(lambda: len(records) >= len(load.observations))
        for one in processes:
            one.process.send_signal(signal.SIGINT)
            await one.ended()
    return RollingRestartRun(
        History(load.observations, records, read_logs(logs)), load.rate, rounds * workers
    )


async def _restart_each_worker(
    workers: Sequence[WorkerProcess], pool: PoolBackend, number: int
) -> None:
    for place, one in enumerate(workers):
        one.process.send_signal(STOP_SIGNALS[(number + place) % 2])
        status = await one.ended()
        assert status == 0, f"the worker exited with {status}"
        await one.start()
        await _wait_until_healthy(one)
        await wait_until(lambda: all(it.state == "up" for it in pool.report_workers()))
        await asyncio.sleep(BETWEEN)


async def _wait_until_healthy(one: WorkerProcess) -> None:
    """Wait until the process answers; its socket listens earlier."""
    async with aiohttp.ClientSession() as session, session.get(f"{one.url}/health") as response:
        assert response.status == HTTPStatus.OK


@click.command()
@click.option("--runs", default=5, show_default=True)
@click.option("--rate", default=200.0, show_default=True, help="Requests a second.")
@click.option("--rounds", default=3, show_default=True, help="Restarts of each worker in a run.")
def main(runs: int, rate: float, rounds: int) -> None:
    """Restart workers under load and print what was lost. Exits with 1 if anything was."""
    run_repeatedly(runs, lambda folder: run_rolling_restarts(folder, rounds=rounds, rate=rate))


if __name__ == "__main__":
    main()
