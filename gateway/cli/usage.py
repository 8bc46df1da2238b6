"""``interlingua usage``: what was used, and by whom."""

import importlib.util
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from gateway.cli.console import print_table

if TYPE_CHECKING:
    from gateway.observability.usage import UsageTotal


# Since when: as the commands are told it.

_RELATIVE_TIME = re.compile(r"([0-9]{1,6})([smhd])")
_TIME_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_since(stated: str | None) -> float:
    """In Unix seconds; 0 for the beginning. Raises BadParameter."""
    if stated is None:
        return 0.0
    if match := _RELATIVE_TIME.fullmatch(stated):
        ago = timedelta(**{_TIME_UNITS[match[2]]: int(match[1])})
        return (datetime.now(UTC) - ago).timestamp()
    try:
        return datetime.fromisoformat(stated).astimezone().timestamp()
    except ValueError:
        text = f"{stated!r} is neither a time such as 2026-11-21T10:00 nor as long ago as 24h"
        raise click.BadParameter(text, param_hint="--since") from None


_STAT_COLUMNS = ("requests", "errors", "cancelled", "prompt tokens", "completion tokens")


@click.command()
@click.argument("source")
@click.option("--since", metavar="AGO|TIME", help="Since 30m, 24h or 7d ago, or since a time.")
@click.option(
    "--by",
    metavar="NAMES",
    default="key,model",
    show_default=True,
    help="What to sum by: of key, model, version, split, backend, protocol, outcome, source, day.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the sums as JSON, a line for each.")
def usage(source: str, since: str | None, by: str, *, as_json: bool) -> None:
    """Sum the usage that a gateway recorded in SOURCE: requests, errors and tokens.

    SOURCE is what the configuration has at observe.usage: a file of SQLite, or the postgresql://
    URL of a database. A gateway may write to it meanwhile.

    Exit codes: 0 summed, 2 wrong usage, or a source that can't be read.
    """
    names = _parse_group_by(by)
    look = _sum_postgres if source.startswith(("postgresql://", "postgres://")) else _sum_sqlite
    found = look(source, names, parse_since(since))
    if as_json:
        sys.stdout.buffer.write(b"".join(msgspec.json.encode(one) + b"\n" for one in found))
    else:
        _print(names, found)


def _parse_group_by(by: str) -> Sequence[str]:
    """Raises BadParameter."""
    from gateway.observability.usage import GROUP_COLUMNS  # noqa: PLC0415 - only here

    names = list(dict.fromkeys(by.split(",")))
    for name in names:
        if name not in GROUP_COLUMNS:
            text = f"{name!r} is none of {', '.join(GROUP_COLUMNS)}"
            raise click.BadParameter(text, param_hint="--by")
    return names


def _sum_postgres(url: str, by: Sequence[str], start: float) -> "list[UsageTotal]":
    """Raises UsageError, which shows no password."""
    if importlib.util.find_spec("asyncpg") is None:
        raise click.UsageError("a database needs: pip install 'interlingua[postgres]'")
    from gateway.observability.usage_postgres import (  # noqa: PLC0415 - as said
        DATABASE_ERRORS,
        query_postgres_usage,
        redact_url,
    )

    try:
        return query_postgres_usage(url, by, start)
    except DATABASE_ERRORS as error:
        why = str(error) or type(error).__name__
        raise click.UsageError(f"{redact_url(url)} can't be read: {why}") from None


def _sum_sqlite(file: str, by: Sequence[str], start: float) -> "list[UsageTotal]":
    """Raises UsageError."""
    import sqlite3  # noqa: PLC0415 - only here

    from gateway.observability.usage import query_sqlite_usage  # noqa: PLC0415 - as above

    if not Path(file).is_file():
        raise click.UsageError(f"the file {file} does not exist")
    try:
        return query_sqlite_usage(file, by, start)
    except sqlite3.Error as error:
        raise click.UsageError(f"{file} can't be read as a file of usage: {error}") from None


def _print(names: Sequence[str], found: "Sequence[UsageTotal]") -> None:
    """A row for each sum, and one of all together."""
    total = [sum(column) for column in zip(*map(_get_totals, found), strict=True)] or [0] * 5
    rows = [[*(one.by[name] or "-" for name in names), *_format_totals(one)] for one in found]
    rows.append(["all", *[""] * (len(names) - 1), *(f"{number:,}" for number in total)])
    print_table([*names, *_STAT_COLUMNS], rows, left=range(len(names)))


def _get_totals(one: "UsageTotal") -> tuple[int, ...]:
    return (one.requests, one.errors, one.cancelled, one.prompt_tokens, one.completion_tokens)


def _format_totals(one: "UsageTotal") -> list[str]:
    return [f"{number:,}" for number in _get_totals(one)]
