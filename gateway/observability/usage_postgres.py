"""Usage rows in PostgreSQL, which several gateways may share."""

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
"""Seconds that connecting or writing a batch may take."""
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
_INSERT: Final = (  # names of USAGE_COLUMNS only
    f"INSERT INTO {USAGE_TABLE} ({_COLUMN_NAMES}) "  # noqa: S608
    f"SELECT * FROM unnest({_COLUMN_ARRAYS}) ON CONFLICT DO NOTHING"
)
"""One statement for all rows, with one array per column."""
_DAY_EXPRESSION: Final = "to_char(to_timestamp(at) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
_SUM_EXPRESSIONS: Final = (
    "count(*), count(*) FILTER (WHERE outcome NOT IN ('ok', 'cancelled')), "
    "count(*) FILTER (WHERE outcome = 'cancelled'), "
    "sum(prompt_tokens)::int8, sum(completion_tokens)::int8"
)
DATABASE_ERRORS: Final = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError)
"""Errors of asyncpg; ValueError for an invalid URL."""
_ROW_ERRORS: Final = (asyncpg.DataError, asyncpg.ProgramLimitExceededError)
"""Errors of asyncpg for invalid rows."""


def create_postgres_recorder(url: str, retention: float, now: Callable[[], float]) -> UsageRecorder:
    """Create a recorder that deletes rows older than ``retention`` seconds.

    ``now`` gives Unix seconds.
    """
    return UsageRecorder(_PostgresUsageStore(url, retention, now))


class _PostgresUsageStore:
    """A ``UsageStore``. Its event loop runs in the writer thread, only during writes."""

    transient_errors = DATABASE_ERRORS

    def __init__(self, url: str, retention: float, now: Callable[[], float]) -> None:
        self.name = redact_url(url)
        self._url = url
        self._retention = retention
        self._now = now
        self._runner: asyncio.Runner | None = None
        self._connection: Any = None
        self._cleaned_at = 0.0

    def insert_records(self, records: Sequence[RequestRecord]) -> int:
        """See ``UsageStore``."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        rows = [tuple(map(_clean_text, build_usage_row(record))) for record in records]
        try:
            return self._runner.run(self._insert_rows(rows))
        except BaseException:
            self._drop_connection()
            raise

    def close(self) -> None:
        """See ``UsageStore``."""
        self._drop_connection()
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    async def _insert_rows(self, rows: Sequence[Sequence[Any]]) -> int:
        dropped = 0
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
                        dropped += 1
            now = self._now()
            if abs(now - self._cleaned_at) >= CLEANUP_INTERVAL:
                old = now - self._retention
                await self._connection.execute(f"DELETE FROM {USAGE_TABLE} WHERE at < $1", old)  # noqa: S608
                self._cleaned_at = now
        return dropped

    async def _insert_once(self, rows: Sequence[Sequence[Any]]) -> None:
        await self._connection.execute(_INSERT, *zip(*rows, strict=True))

    def _drop_connection(self) -> None:
        """Close the connection, whatever its state."""
        if self._connection is not None and self._runner is not None:
            connection, self._connection = self._connection, None
            self._runner.run(_abort_connection(connection))


async def connect_database(url: str) -> Any:
    """Connect without prepared statements, so that PgBouncer works in between."""
    return await asyncpg.connect(url, timeout=_DATABASE_TIMEOUT, statement_cache_size=0)


async def _abort_connection(connection: Any) -> None:
    with suppress(*DATABASE_ERRORS):
        async with asyncio.timeout(1.0):
            await connection.close(timeout=0.5)
            return
    connection.terminate()
    await asyncio.sleep(0)  # the transport closes in the next iteration of the loop


def _clean_text(value: Any) -> Any:
    """Remove what PostgreSQL does not accept in text: NUL and lone surrogates."""
    if not isinstance(value, str):
        return value
    return value.replace("\x00", "").encode("utf-8", "replace").decode()


def redact_url(url: str) -> str:
    """A database URL without user and password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the database"
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"


def query_postgres_usage(url: str, by: Sequence[str], since: float) -> list[UsageTotal]:
    """Usage since ``since`` (Unix seconds), grouped by names of ``GROUP_COLUMNS``.

    Raises one of ``DATABASE_ERRORS``.
    """
    return asyncio.run(_query_usage(url, by, since))


async def _query_usage(url: str, by: Sequence[str], since: float) -> list[UsageTotal]:
    keys = ", ".join(_DAY_EXPRESSION if name == "day" else GROUP_COLUMNS[name] for name in by)
    order = ", ".join(str(n) for n in range(1, len(by) + 1))
    query = (  # names of GROUP_COLUMNS only
        f"SELECT {keys}, {_SUM_EXPRESSIONS} FROM {USAGE_TABLE} WHERE at >= $1 "  # noqa: S608
        f"GROUP BY {order} ORDER BY {order}"
    )
    async with asyncio.timeout(60):
        connection = await connect_database(url)
        try:
            rows = [tuple(one) for one in await connection.fetch(query, since)]
        finally:
            await connection.close()
    return [UsageTotal(dict(zip(by, row, strict=False)), *row[len(by) :]) for row in rows]
