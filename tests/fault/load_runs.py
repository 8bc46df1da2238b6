"""Repeats runs under load and prints one line for each: shared code of such commands."""

import asyncio
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, Protocol

import click

from tests.fault.history import History


class LoadRun(Protocol):
    """The result of a run. ``rate`` is the measured rate in requests per second."""

    @property
    def history(self) -> History:
        """What clients, gateway and workers observed."""

    @property
    def rate(self) -> float:
        """Requests per second."""

    @property
    def done(self) -> str:
        """What happened to the gateway or the workers during the run."""

    @property
    def lost(self) -> int:
        """Requests that did not end as they should."""

    @property
    def failed(self) -> bool:
        """Whether anything else was wrong."""


def run_repeatedly(runs: int, once: Callable[[Path], Coroutine[Any, Any, LoadRun]]) -> NoReturn:
    """Run repeatedly, each time in a new folder. Exits with 1 if anything was wrong."""
    failed = False
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            run = asyncio.run(once(Path(folder)))
        odd = run.history.violations()
        failed = failed or run.failed or bool(odd)
        click.echo(
            f"run {number + 1}: {len(run.history.observations)} requests at {run.rate:.0f}/s, "
            f"{run.done}, {run.lost} lost, {len(odd)} violations"
        )
        for one in odd[:10]:
            click.echo(f"    {one.kind} {one.id} {one.why}")
    sys.exit(failed)
