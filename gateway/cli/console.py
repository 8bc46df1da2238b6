"""What commands print: tables for a terminal, a file or a pipe, and the progress of loading."""

import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from rich.status import Status

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


# The progress of loading a model: a line that changes on a terminal, and log lines elsewhere.

_ENGINE_LOGGER: Final = "backends.torch"


class _LoadingFilter(logging.Filter):
    """Shows progress in ``status``, if there is one, and drops errors, which the command prints."""

    def __init__(self, status: "Status | None") -> None:
        super().__init__()
        self._status = status

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging's Filter."""
        if record.name.startswith(_ENGINE_LOGGER):
            if record.levelno >= logging.ERROR:
                return False
            if self._status is not None and record.levelno == logging.INFO:
                self._status.update(record.getMessage())
                return False
        return True


@contextmanager
def show_loading(*, enabled: bool, use_status_line: bool) -> Iterator[None]:
    """Show the progress of local models that are being loaded, if ``enabled``.

    ``use_status_line``: a terminal gets a line that changes, and not the log's lines.
    """
    if not enabled:
        yield
    elif not (use_status_line and sys.stderr.isatty()):
        with _filter_log(_LoadingFilter(None)):
            yield
    else:
        from rich.console import Console  # noqa: PLC0415 - only for a terminal

        with Console(stderr=True).status("loading") as status, _filter_log(_LoadingFilter(status)):
            yield


@contextmanager
def _filter_log(log_filter: logging.Filter) -> Iterator[None]:
    handlers = logging.getLogger().handlers
    for handler in handlers:
        handler.addFilter(log_filter)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(log_filter)
