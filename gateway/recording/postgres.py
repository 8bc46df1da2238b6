"""Rows of usage in a database of PostgreSQL, which several gateways may write to."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]

from gateway.recording.ledger import COLUMNS, SWEEP, Book, row
from gateway.recording.sums import BY, Sum
from gateway.telemetry import Record

TABLE: Final = "interlingua_usage"
_PATIENCE: Final = 4.0
"""Seconds that a connection, or a batch, may take: a locked table is no reason to wait longer."""
_TYPES: Final = {"REAL": "float8", "TEXT": "text", "INTEGER": "int8"}
_KINDS: Final = tuple(_TYPES[kind.partition(" ")[0]] for _, kind in COLUMNS)
_NAMES: Final = ", ".join(name for name, _ in COLUMNS)
_MAKE: Final = (
    f"CREATE TABLE IF NOT EXISTS {TABLE} ("
    + ", ".join(
        f"{name} {mine} {kind.partition(' ')[2]}"
        for (name, kind), mine in zip(COLUMNS, _KINDS, strict=True)
    )
    + ", PRIMARY KEY (at, id))"
)
_ARRAYS: Final = ", ".join(f"${n}::{kind}[]" for n, kind in enumerate(_KINDS, 1))
_INSERT: Final = (
    f"INSERT INTO {TABLE} ({_NAMES}) SELECT * FROM unnest({_ARRAYS}) ON CONFLICT DO NOTHING"  # noqa: S608 - of the names above
)
"""All rows in one statement, by a column at a time."""
_DAY: Final = "to_char(to_timestamp(at) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
_SUMS: Final = (
    "count(*), count(*) FILTER (WHERE outcome NOT IN ('ok', 'cancelled')), "
    "count(*) FILTER (WHERE outcome = 'cancelled'), "
    "sum(prompt_tokens)::int8, sum(completion_tokens)::int8"
)
FAILURES: Final = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError)
"""What asyncpg raises; ValueError for a URL that it can't read."""
_REFUSED: Final = (asyncpg.DataError, asyncpg.ProgramLimitExceededError)
"""What it raises for a row that it will never take."""


def book(url: str, keep: float, now: Callable[[], float]) -> Book:
    """What writes rows there. They are kept for so many seconds; ``now`` is in Unix seconds."""
    return Book(_Database(url, keep, now))


class _Database:
    """A Store. Its loop runs only while it is written to, in the thread that writes."""

    transient_errors = FAILURES

    def __init__(self, url: str, keep: float, now: Callable[[], float]) -> None:
        self.name = shown(url)
        self._url = url
        self._retention = keep
        self._now = now
        self._runner: asyncio.Runner | None = None
        self._connection: Any = None
        self._cleaned_at = 0.0

    def insert_records(self, records: Sequence[Record]) -> int:
        """See Store."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        rows = [tuple(map(_clean, row(record))) for record in records]
        try:
            return self._runner.run(self._insert_rows(rows))
        except BaseException:
            self._drop_connection()
            raise

    def close(self) -> None:
        """See Store."""
        self._drop_connection()
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    async def _insert_rows(self, rows: Sequence[Sequence[Any]]) -> int:
        given_up = 0
        async with asyncio.timeout(_PATIENCE):
            if self._connection is None:
                self._connection = await connected(self._url)
                await self._connection.execute(_MAKE)
            try:
                await self._insert_once(rows)
            except _REFUSED:
                for one in rows:
                    try:
                        await self._insert_once([one])
                    except _REFUSED:
                        given_up += 1
            now = self._now()
            if abs(now - self._cleaned_at) >= SWEEP:
                old = now - self._retention
                await self._connection.execute(f"DELETE FROM {TABLE} WHERE at < $1", old)  # noqa: S608
                self._cleaned_at = now
        return given_up

    async def _insert_once(self, rows: Sequence[Sequence[Any]]) -> None:
        await self._connection.execute(_INSERT, *zip(*rows, strict=True))

    def _drop_connection(self) -> None:
        """Cut the connection, which may be in any state."""
        if self._connection is not None and self._runner is not None:
            connection, self._connection = self._connection, None
            self._runner.run(_cut(connection))


async def connected(url: str) -> Any:
    """A connection. What stands between, such as PgBouncer, need not know prepared statements."""
    return await asyncpg.connect(url, timeout=_PATIENCE, statement_cache_size=0)


async def _cut(connection: Any) -> None:
    with suppress(*FAILURES):
        async with asyncio.timeout(1.0):
            await connection.close(timeout=0.5)
            return
    connection.terminate()
    await asyncio.sleep(0)  # the transport is closed in the loop's next turn


def _clean(value: Any) -> Any:
    """A text as the database takes it: it has no place for NUL, nor for half a character."""
    if not isinstance(value, str):
        return value
    return value.replace("\x00", "").encode("utf-8", "replace").decode()


def shown(url: str) -> str:
    """A database's URL without its password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the database"
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"


def sums(url: str, by: Sequence[str], since: float) -> list[Sum]:
    """What was used since ``since``, in Unix seconds, by these names of ``BY``.

    Raises one of FAILURES.
    """
    return asyncio.run(_sums(url, by, since))


async def _sums(url: str, by: Sequence[str], since: float) -> list[Sum]:
    keys = ", ".join(_DAY if name == "day" else BY[name] for name in by)
    order = ", ".join(str(n) for n in range(1, len(by) + 1))
    query = f"SELECT {keys}, {_SUMS} FROM {TABLE} WHERE at >= $1 GROUP BY {order} ORDER BY {order}"  # noqa: S608 - of the names above
    async with asyncio.timeout(60):
        connection = await connected(url)
        try:
            rows = [tuple(one) for one in await connection.fetch(query, since)]
        finally:
            await connection.close()
    return [Sum(dict(zip(by, row, strict=False)), *row[len(by) :]) for row in rows]
