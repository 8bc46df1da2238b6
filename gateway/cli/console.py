"""Tables for commands that print to a terminal, a file or a pipe."""

from collections.abc import Collection, Sequence
from typing import Final

import click

_WIDTH: Final = 10_000
"""Wider than any table: no cell is folded or cut, whatever the width of the terminal."""


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[int]
) -> None:
    """Print a table, with the columns ``left`` aligned to the left and all others to the right.

    The output is the same on a terminal and elsewhere, but for the headings' style.
    """
    from rich.console import Console  # noqa: PLC0415 - most commands print no table
    from rich.table import Table  # noqa: PLC0415 - as above

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(
            heading, justify="left" if number in left_aligned else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(*row)
    console = Console(width=_WIDTH, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())
