"""One run after the other under load, each told in a line: what such commands have in common."""

import asyncio
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, Protocol

import click

from tests.fault.history import History


class LoadRun(Protocol):
    """What came of one. ``rate``: requests a second that were really sent."""

    @property
    def history(self) -> History:
        """What its clients, the gateway and the workers saw."""

    @property
    def rate(self) -> float:
        """Requests a second."""

    @property
    def done(self) -> str:
        """What was done to it meanwhile."""

    @property
    def lost(self) -> int:
        """Requests that did not end as they should."""

    @property
    def failed(self) -> bool:
        """Whether anything was wrong, beside what its history tells."""


def run_repeatedly(runs: int, once: Callable[[Path], Coroutine[Any, Any, LoadRun]]) -> NoReturn:
    """Run it so often, each time in a folder of its own. Exits with 1 if anything was wrong."""
    failed = False
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            got = asyncio.run(once(Path(folder)))
        odd = got.history.violations()
        failed = failed or got.failed or bool(odd)
        click.echo(
            f"run {number + 1}: {len(got.history.observations)} requests at {got.rate:.0f}/s, "
            f"{got.done}, {got.lost} lost, {len(odd)} violations"
        )
        for one in odd[:10]:
            click.echo(f"    {one.kind} {one.id} {one.why}")
    sys.exit(failed)
