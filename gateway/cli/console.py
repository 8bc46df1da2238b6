"""What commands print and write: tables and files."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import click

from backends.log_format import escape_controls

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
        table.add_row(*map(escape_controls, row))
    console = Console(width=_WIDTH, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())  # with the style of the headings


def write_file(file: Path, text: str) -> None:
    """Write what a command produces. Raises UsageError, which says why it can't be written."""
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise click.UsageError(f"{file} can't be written: {error.strerror}") from None
