"""What rows of usage come to. They may be read while a gateway writes them."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from msgspec import Struct

GROUP_COLUMNS: Final = {
    "key": "key",
    "model": "model",
    "version": "version",
    "split": "split",
    "backend": "backend",
    "dialect": "dialect",
    "outcome": "outcome",
    "source": "source",
    "day": "date(at, 'unixepoch')",
}
"""What usage can be summed by; days are those of UTC."""

_SUM_EXPRESSIONS: Final = (
    "count(*), sum(outcome NOT IN ('ok', 'cancelled')), sum(outcome = 'cancelled'), "
    "sum(prompt_tokens), sum(completion_tokens)"
)


class UsageTotal(Struct, frozen=True):
    """The exchanges that have these values in common."""

    by: dict[str, str]
    requests: int
    errors: int
    """Those that did not come to their end, and not since their client left."""
    cancelled: int
    prompt_tokens: int
    completion_tokens: int


def query_sqlite_usage(path: str, by: Sequence[str], since: float) -> list[UsageTotal]:
    """What was used since ``since``, in Unix seconds, by these names of ``BY``.

    Raises sqlite3.Error where the file is no such file, or can't be read.
    """
    keys = ", ".join(GROUP_COLUMNS[name] for name in by)
    query = f"SELECT {keys}, {_SUM_EXPRESSIONS} FROM usage WHERE at >= ? GROUP BY {keys} ORDER BY {keys}"  # noqa: S608 - of the names above
    with closing(sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)) as file:
        rows = file.execute(query, (since,)).fetchall()
    return [UsageTotal(dict(zip(by, row, strict=False)), *row[len(by) :]) for row in rows]
