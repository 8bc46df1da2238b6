"""Soaks a gateway: see ``tests.soak.soak_run``.

python -m tests.soak --requests 200000 --cancelled 10000
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import click

from tests.soak.soak_run import SoakMeasurement, run_soak


def _print_measurement(look: SoakMeasurement) -> None:
    click.echo(look.text())


@click.command()
@click.option("--requests", default=200_000, show_default=True)
@click.option("--cancelled", default=10_000, show_default=True, help="Streams that are left.")
@click.option("--intervals", default=20, show_default=True, help="After each is looked.")
def main(requests: int, cancelled: int, intervals: int) -> None:
    """Send these requests and report growth. Exits with 1 if anything grows."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_soak(
            Path(folder),
            requests=requests,
            cancelled=cancelled,
            intervals=intervals,
            show=_print_measurement,
        )
        result = asyncio.run(run)
    click.echo(f"{result.slope:.1f} bytes a request")
    for one in result.growing():
        click.echo(f"grows: {one}")
    sys.exit(bool(result.growing()))


if __name__ == "__main__":
    main()
