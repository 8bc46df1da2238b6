"""Rows of usage in a database of PostgreSQL, which several gateways may write to."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]

from gateway.observability.record import RequestRecord
from gateway.observability.usage import (
    CLEANUP_INTERVAL,
    GROUP_COLUMNS,
    USAGE_COLUMNS,
    UsageRecorder,
    UsageTotal,
    build_usage_row,
)

USAGE_TABLE: Final = "interlingua_usage"
_DATABASE_TIMEOUT: Final = 4.0
"""Seconds that a connection, or a batch, may take: a locked table is no reason to wait longer."""
_TYPES: Final = {"REAL": "float8", "TEXT": "text", "INTEGER": "int8"}
_COLUMN_TYPES: Final = tuple(_TYPES[kind.partition(" ")[0]] for _, kind in USAGE_COLUMNS)
_COLUMN_NAMES: Final = ", ".join(name for name, _ in USAGE_COLUMNS)
_CREATE_TABLE: Final = (
    f"CREATE TABLE IF NOT EXISTS {USAGE_TABLE} ("
    + ", ".join(
        f"{name} {mine} {kind.partition(' ')[2]}"
        for (name, kind), mine in zip(USAGE_COLUMNS, _COLUMN_TYPES, strict=True)
    )
    + ", PRIMARY KEY (at, id))"
)
_COLUMN_ARRAYS: Final = ", ".join(f"${n}::{kind}[]" for n, kind in enumerate(_COLUMN_TYPES, 1))
_INSERT: Final = f"INSERT INTO {USAGE_TABLE} ({_COLUMN_NAMES}) SELECT * FROM unnest({_COLUMN_ARRAYS}) ON CONFLICT DO NOTHING"  # noqa: S608 - of the names above
"""All rows in one statement, by a column at a time."""
_DAY_EXPRESSION: Final = "to_char(to_timestamp(at) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
_SUM_EXPRESSIONS: Final = (
    "count(*), count(*) FILTER (WHERE outcome NOT IN ('ok', 'cancelled')), "
    "count(*) FILTER (WHERE outcome = 'cancelled'), "
    "sum(prompt_tokens)::int8, sum(completion_tokens)::int8"
)
DATABASE_ERRORS: Final = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError)
"""What asyncpg raises; ValueError for a URL that it can't read."""
_ROW_ERRORS: Final = (asyncpg.DataError, asyncpg.ProgramLimitExceededError)
"""What it raises for a row that it will never take."""


def create_postgres_recorder(url: str, keep: float, now: Callable[[], float]) -> UsageRecorder:
    """What writes rows there. They are kept for so many seconds; ``now`` is in Unix seconds."""
    return UsageRecorder(_PostgresUsageStore(url, keep, now))


class _PostgresUsageStore:
    """A Store. Its loop runs only while it is written to, in the thread that writes."""

    transient_errors = DATABASE_ERRORS

    def __init__(self, url: str, keep: float, now: Callable[[], float]) -> None:
        self.name = redact_url(url)
        self._url = url
        self._retention = keep
        self._now = now
        self._runner: asyncio.Runner | None = None
        self._connection: Any = None
        self._cleaned_at = 0.0

    def insert_records(self, records: Sequence[RequestRecord]) -> int:
        """See Store."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        rows = [tuple(map(_clean_text, build_usage_row(record))) for record in records]
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
        async with asyncio.timeout(_DATABASE_TIMEOUT):
            if self._connection is None:
                self._connection = await connect_database(self._url)
                await self._connection.execute(_CREATE_TABLE)
            try:
                await self._insert_once(rows)
            except _ROW_ERRORS:
                for one in rows:
                    try:
                        await self._insert_once([one])
                    except _ROW_ERRORS:
                        given_up += 1
            now = self._now()
            if abs(now - self._cleaned_at) >= CLEANUP_INTERVAL:
                old = now - self._retention
                await self._connection.execute(f"DELETE FROM {USAGE_TABLE} WHERE at < $1", old)  # noqa: S608
                self._cleaned_at = now
        return given_up

    async def _insert_once(self, rows: Sequence[Sequence[Any]]) -> None:
        await self._connection.execute(_INSERT, *zip(*rows, strict=True))

    def _drop_connection(self) -> None:
        """Cut the connection, which may be in any state."""
        if self._connection is not None and self._runner is not None:
            connection, self._connection = self._connection, None
            self._runner.run(_abort_connection(connection))


async def connect_database(url: str) -> Any:
    """A connection. What stands between, such as PgBouncer, need not know prepared statements."""
    return await asyncpg.connect(url, timeout=_DATABASE_TIMEOUT, statement_cache_size=0)


async def _abort_connection(connection: Any) -> None:
    with suppress(*DATABASE_ERRORS):
        async with asyncio.timeout(1.0):
            await connection.close(timeout=0.5)
            return
    connection.terminate()
    await asyncio.sleep(0)  # the transport is closed in the loop's next turn


def _clean_text(value: Any) -> Any:
    """A text as the database takes it: it has no place for NUL, nor for half a character."""
    if not isinstance(value, str):
        return value
    return value.replace("\x00", "").encode("utf-8", "replace").decode()


def redact_url(url: str) -> str:
    """A database's URL without its password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the database"
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"


def query_postgres_usage(url: str, by: Sequence[str], since: float) -> list[UsageTotal]:
    """What was used since ``since``, in Unix seconds, by these names of ``BY``.

    Raises one of FAILURES.
    """
    return asyncio.run(_query_usage(url, by, since))


async def _query_usage(url: str, by: Sequence[str], since: float) -> list[UsageTotal]:
    keys = ", ".join(_DAY_EXPRESSION if name == "day" else GROUP_COLUMNS[name] for name in by)
    order = ", ".join(str(n) for n in range(1, len(by) + 1))
    query = f"SELECT {keys}, {_SUM_EXPRESSIONS} FROM {USAGE_TABLE} WHERE at >= $1 GROUP BY {order} ORDER BY {order}"  # noqa: S608 - of the names above
    async with asyncio.timeout(60):
        connection = await connect_database(url)
        try:
            rows = [tuple(one) for one in await connection.fetch(query, since)]
        finally:
            await connection.close()
    return [UsageTotal(dict(zip(by, row, strict=False)), *row[len(by) :]) for row in rows]
