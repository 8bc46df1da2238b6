"""A gateway is upgraded in place repeatedly under load, and no request is lost (fault 49).

    python -m tests.fault.upgrade --runs 5 --rate 200

Each time a new process takes over the listeners, and the old one exits when its requests are done.
Clients of every protocol send requests on kept and on new connections.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import click
import msgspec
from msgspec import Struct

from tests.fault.gateway_process import GatewayProcess
from tests.fault.history import History, read_logs
from tests.fault.load_generator import LoadGenerator
from tests.fault.load_runs import run_repeatedly
from tests.fault.processes import WorkerProcess
from tests.fault.protocol_clients import build_pool_config
from tests.support.waiting import wait_until

PACE = 0.05
"""Seconds between words: a response takes a quarter of a second."""
BETWEEN = 0.5
"""Seconds between two upgrades."""


class UpgradeRun(Struct, frozen=True):
    """The result of a run. ``rate`` is the measured rate in requests per second."""

    history: History
    rate: float
    upgrades: int
    codes: Sequence[int]
    """The exit codes of the replaced processes."""

    @property
    def done(self) -> str:
        """See ``tests.fault.load_runs.LoadRun``."""
        return f"{self.upgrades} upgrades"

    @property
    def failed(self) -> bool:
        """See ``tests.fault.load_runs.LoadRun``."""
        return bool(self.lost or any(self.codes))

    @property
    def lost(self) -> int:
        """Requests that are not complete."""
        return len(self.history.observations) - self.history.ends()["complete"]


class GatewayChain:
    """A gateway and its successors."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        self.file = folder / "gateway.yaml"
        self.file.write_text(text)
        self.gateways: list[GatewayProcess] = []

    async def start(self) -> GatewayProcess:
        """Start the next gateway, which takes over the listeners."""
        home = Path(tempfile.mkdtemp(dir=self._folder))
        options = ("--handover", str(self._folder / "handover"))
        process = GatewayProcess(home, "", *options, file=self.file)
        await process.__aenter__()
        self.gateways.append(process)
        return process

    async def close(self) -> None:
        """Stop the last gateway; every process must have exited with 0."""
        for one in self.gateways[:-1]:
            await _wait_for_exit(one)
        for one in self.gateways:
            await one.__aexit__(None, None, None)


async def run_upgrades(folder: Path, *, upgrades: int = 3, rate: float = 200.0) -> UpgradeRun:
    """Upgrade a gateway repeatedly under load."""
    logs = [folder / f"worker{number}.log" for number in range(2)]
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(WorkerProcess(pace=PACE, log=log)) for log in logs
        ]
        text = build_pool_config(
            [one.url for one in workers], limits={"shutdown_delay": "1s", "drain_timeout": "20s"}
        )
        line = GatewayChain(folder, msgspec.json.format(text))
        stack.push_async_callback(line.close)
        old = await line.start()
        load = await stack.enter_async_context(LoadGenerator(old.port))
        over = asyncio.Event()
        codes = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(rate, over))
            try:
                for _ in range(upgrades):
                    await asyncio.sleep(BETWEEN)
                    new = await line.start()
                    assert new.port == old.port
                    codes.append(await _wait_for_exit(old))
                    old = new
            finally:
                over.set()
        whole = len(load.observations)
        await wait_until(lambda: sum(len(one.read_records()) for one in line.gateways) >= whole)
        records = [record for one in line.gateways for record in one.read_records()]
    return UpgradeRun(
        History(load.observations, records, read_logs(logs)), load.rate, upgrades, codes
    )


async def _wait_for_exit(gateway: GatewayProcess) -> int:
    await wait_until(lambda: gateway.process.poll() is not None)
    return gateway.process.returncode


@click.command()
@click.option("--runs", default=5, show_default=True)
@click.option("--rate", default=200.0, show_default=True, help="Requests a second.")
@click.option("--upgrades", default=3, show_default=True, help="In each run.")
def main(runs: int, rate: float, upgrades: int) -> None:
    """Upgrade a gateway under load and print what was lost. Exits with 1 if anything was."""
    run_repeatedly(runs, lambda folder: run_upgrades(folder, upgrades=upgrades, rate=rate))


if __name__ == "__main__":
    main()
