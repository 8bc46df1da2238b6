"""``interlingua usage``: sums of the recorded usage."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from gateway.cli.console import print_table
from gateway.terminal import print_text

if TYPE_CHECKING:
    from gateway.observability.usage import UsageExtract, UsageTotal


# The option --since.

_POSTGRES_SCHEMES: Final = ("postgresql://", "postgres://")
_RELATIVE_TIME = re.compile(r"([0-9]{1,6})([smhd])")
_TIME_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_since(value: str | None) -> float:
    """The time in Unix seconds; 0 for None. Raises BadParameter."""
    if value is None:
        return 0.0
    if match := _RELATIVE_TIME.fullmatch(value):
        ago = timedelta(**{_TIME_UNITS[match[2]]: int(match[1])})
        return (datetime.now(UTC) - ago).timestamp()
    try:
        return datetime.fromisoformat(value).astimezone().timestamp()
    except ValueError:
        text = f"{value!r} is neither a time, such as 2026-11-21T10:00, nor a duration, such as 24h"
        raise click.BadParameter(text, param_hint="--since") from None


_STAT_COLUMNS = ("requests", "errors", "cancelled", "prompt tokens", "completion tokens")


@click.command()
@click.argument("source")
@click.option(
    "--since", metavar="AGO|TIME", help="Count from 30m, 24h or 7d ago on, or from a time on."
)
@click.option(
    "--by",
    metavar="NAMES",
    default="key,model",
    show_default=True,
    help="Group by any of key, model, version, split, backend, protocol, outcome, source, day.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the sums as JSON lines.")
def usage(source: str, since: str | None, by: str, *, as_json: bool) -> None:
    """Sum the usage that a gateway recorded in SOURCE: requests, errors and tokens.

    SOURCE is the database of the setting observe.usage: an SQLite file, or a postgresql:// URL. A
    gateway may write to it at the same time.

    Exit codes: 0 summed, 2 wrong usage, or a source that can't be read.
    """
    names = _parse_group_by(by)
    query = _sum_postgres if source.startswith(_POSTGRES_SCHEMES) else _sum_sqlite
    totals = query(source, names, parse_since(since))
    if not totals:
        print_text("There are no usage rows, or none of that time.", err=True)
    if as_json:
        for total in totals:
            print_text(msgspec.json.encode(total))
    else:
        _print(names, totals)


def _parse_group_by(by: str) -> Sequence[str]:
    """Raises BadParameter."""
    from gateway.observability.usage import GROUP_COLUMNS  # noqa: PLC0415 - only here

    names = list(dict.fromkeys(by.split(",")))
    for name in names:
        if name not in GROUP_COLUMNS:
            text = f"{name!r} is not one of {', '.join(GROUP_COLUMNS)}"
            raise click.BadParameter(text, param_hint="--by")
    return names


def _sum_postgres(url: str, by: Sequence[str], start: float) -> "list[UsageTotal]":
    with _report_postgres_errors(url):
        from gateway.observability.usage_postgres import (  # noqa: PLC0415 - optional
            query_postgres_usage,
        )

        return query_postgres_usage(url, by, start)


def _sum_sqlite(file: str, by: Sequence[str], start: float) -> "list[UsageTotal]":
    if Path(file).is_dir():
        raise click.UsageError(f"{file} is a folder, not a usage database")
    if not Path(file).is_file():
        raise click.UsageError(f"the file {file} does not exist")
    with _report_sqlite_errors(file):
        from gateway.observability.usage import query_sqlite_usage  # noqa: PLC0415 - only here

        return query_sqlite_usage(file, by, start)


@contextmanager
def _report_postgres_errors(url: str) -> Iterator[None]:
    """Raises UsageError, which shows no password."""
    if importlib.util.find_spec("asyncpg") is None:
        raise click.UsageError("PostgreSQL needs: pip install 'interlingua[postgres]'")
    from gateway.observability.usage_postgres import (  # noqa: PLC0415 - optional
        DATABASE_ERRORS,
        redact_url,
    )

    try:
        yield
    except DATABASE_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise click.UsageError(f"{redact_url(url)} can't be read: {reason}") from None


@contextmanager
def _report_sqlite_errors(file: str) -> Iterator[None]:
    """Raises UsageError."""
    import sqlite3  # noqa: PLC0415 - only here

    try:
        yield
    except sqlite3.Error as error:
        raise click.UsageError(f"{file} is not a usage database: {error}") from None


_SQLITE_MAGIC: Final = b"SQLite format 3\0"


def read_usage_source(source: str, model: str, since: float) -> "UsageExtract | None":
    """The rows of a model in a usage database; None if the source is not one. Raises UsageError."""
    if source.startswith(_POSTGRES_SCHEMES):
        with _report_postgres_errors(source):
            from gateway.observability.usage_postgres import (  # noqa: PLC0415 - optional
                read_postgres_usage,
            )

            return read_postgres_usage(source, model, since)
    path = Path(source)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(len(_SQLITE_MAGIC)) != _SQLITE_MAGIC:
            return None
    with _report_sqlite_errors(source):
        from gateway.observability.usage import read_sqlite_usage  # noqa: PLC0415 - only here

        return read_sqlite_usage(source, model, since)


def _print(names: Sequence[str], totals: "Sequence[UsageTotal]") -> None:
    """Print a row for each group, and one for all."""
    sums = [sum(column) for column in zip(*map(_get_totals, totals), strict=True)] or [0] * 5
    rows = [[*(row.by[name] or "-" for name in names), *_format_totals(row)] for row in totals]
    rows.append(["all", *[""] * (len(names) - 1), *(f"{number:,}" for number in sums)])
    print_table([*names, *_STAT_COLUMNS], rows, left_aligned=range(len(names)))


def _get_totals(row: "UsageTotal") -> tuple[int, ...]:
    return (row.requests, row.errors, row.cancelled, row.prompt_tokens, row.completion_tokens)


def _format_totals(row: "UsageTotal") -> list[str]:
    return [f"{number:,}" for number in _get_totals(row)]
