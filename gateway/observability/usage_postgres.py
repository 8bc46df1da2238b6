"""Usage rows in PostgreSQL, which several gateways may share."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]

from gateway.observability.record import Feedback, RequestRecord
from gateway.observability.usage import (
    ADDED_COLUMNS,
    CLEANUP_INTERVAL,
    GROUP_COLUMNS,
    MAX_READ_ROWS,
    READ_COLUMNS,
    USAGE_COLUMNS,
    FeedbackStatements,
    OutcomeRow,
    UsageExtract,
    UsageInterval,
    UsageRecorder,
    UsageSources,
    UsageTotal,
    build_feedback_row,
    build_usage_row,
)

USAGE_TABLE: Final = "interlingua_usage"
FEEDBACK_TABLE: Final = "interlingua_feedback"
_DATABASE_TIMEOUT: Final = 4.0
"""Seconds that connecting or writing a batch may take."""
_SETUP_TIMEOUT: Final = 600.0
"""Seconds to create the indexes of a large table."""
_TYPES: Final = {"REAL": "float8", "TEXT": "text", "INTEGER": "int8"}
_COLUMN_TYPES: Final = tuple(_TYPES[kind.partition(" ")[0]] for _, kind in USAGE_COLUMNS)
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
    f"INSERT INTO {USAGE_TABLE} ({READ_COLUMNS}) "  # noqa: S608
    f"SELECT * FROM unnest({_COLUMN_ARRAYS}) ON CONFLICT DO NOTHING"
)
"""One statement for all rows, with one array per column."""
_ADD_COLUMNS: Final = f"ALTER TABLE {USAGE_TABLE} " + ", ".join(
    f"ADD COLUMN IF NOT EXISTS {name} {_TYPES[kind.partition(' ')[0]]} {kind.partition(' ')[2]}"
    for name, kind in ADDED_COLUMNS
)
_GET_COLUMNS: Final = (
    "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 "
    "AND NOT attisdropped"
)
_FEEDBACK: Final = FeedbackStatements.build(USAGE_TABLE, FEEDBACK_TABLE, _TYPES)
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


def create_postgres_recorder(
    url: str, retention: float, now: Callable[[], float], *, feedback: bool = False
) -> UsageRecorder:
    """Create a recorder that deletes rows older than ``retention`` seconds.

    ``now`` gives Unix seconds. ``feedback``: the database also has the table of feedback.
    """
    return UsageRecorder(_PostgresUsageStore(url, retention, now, feedback=feedback))


class _PostgresUsageStore:
    """A ``UsageStore``. Its event loop runs in the writer thread, only during writes.

    Rows are searched in the event loop of the caller, with a connection of their own.
    """

    transient_errors = DATABASE_ERRORS

    def __init__(
        self, url: str, retention: float, now: Callable[[], float], *, feedback: bool
    ) -> None:
        self._has_feedback = feedback
        self._reader: Any = None
        self._reader_lock = asyncio.Lock()
        self.name = redact_url(url)
        self._url = url
        self._retention = retention
        self._now = now
        self._runner: asyncio.Runner | None = None
        self._connection: Any = None
        self._cleaned_at = 0.0

    def insert_records(self, records: Sequence[RequestRecord]) -> int:
        """See ``UsageStore``."""
        rows = [tuple(map(_clean_text, build_usage_row(record))) for record in records]
        return self._run(self._insert_rows(rows))

    def insert_feedback(self, feedback: Sequence[Feedback]) -> int:
        """See ``UsageStore``."""
        return self._run(self._insert_feedback(feedback))

    async def find_request(self, feedback: Feedback) -> bool:
        """See ``UsageStore``."""
        async with self._reader_lock, asyncio.timeout(_DATABASE_TIMEOUT):
            try:
                if self._reader is None or self._reader.is_closed():
                    self._reader = await connect_database(self._url)
                sources = await _read_sources(self._reader)
                query = sources.build_find(feedback.column)
                return await _find_row(self._reader, feedback, query) is not None
            except BaseException:
                if self._reader is not None:
                    self._reader.terminate()
                self._reader = None
                raise

    def _run(self, coroutine: Coroutine[Any, Any, int]) -> int:
        if self._runner is None:
            self._runner = asyncio.Runner()
        try:
            return self._runner.run(coroutine)
        except BaseException:
            self._drop_connection()
            raise

    def close(self) -> None:
        """See ``UsageStore``."""
        if self._reader is not None:
            with suppress(RuntimeError):  # its event loop has ended, and the connection with it
                self._reader.terminate()
            self._reader = None
        self._drop_connection()
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    async def _insert_rows(self, rows: Sequence[Sequence[Any]]) -> int:
        dropped = 0
        await self._connect()
        async with asyncio.timeout(_DATABASE_TIMEOUT):
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
                if self._has_feedback:
                    await self._connection.execute(_FEEDBACK.delete, old)
                self._cleaned_at = now
        return dropped

    async def _insert_feedback(self, feedback: Sequence[Feedback]) -> int:
        dropped = 0
        await self._connect()
        async with asyncio.timeout(_DATABASE_TIMEOUT), self._connection.transaction():
            for one in feedback:
                found = await _find_row(self._connection, one, _FEEDBACK.find[one.column])
                if found is None:
                    dropped += 1
                    continue
                row = map(_clean_text, build_feedback_row(one, *found))
                await self._connection.execute(_FEEDBACK.insert, *row)
        return dropped

    async def _connect(self) -> None:
        """Connect and create the tables, unless it is connected."""
        if self._connection is not None:
            return
        async with asyncio.timeout(_DATABASE_TIMEOUT):
            self._connection = await connect_database(self._url)
            await self._connection.execute(_CREATE_TABLE)
            present = await _read_columns(self._connection, USAGE_TABLE)
            if not {name for name, _ in ADDED_COLUMNS} <= {*present}:
                await self._connection.execute(_ADD_COLUMNS)
        if self._has_feedback:
            async with asyncio.timeout(_SETUP_TIMEOUT):
                for statement in _FEEDBACK.create:
                    await self._connection.execute(statement)

    async def _insert_once(self, rows: Sequence[Sequence[Any]]) -> None:
        await self._connection.execute(_INSERT, *zip(*rows, strict=True))

    def _drop_connection(self) -> None:
        """Close the connection, whatever its state."""
        if self._connection is not None and self._runner is not None:
            connection, self._connection = self._connection, None
            self._runner.run(_abort_connection(connection))


async def _read_columns(connection: Any, table: str) -> list[str]:
    """The columns of a table; none if it is not there yet."""
    return [row[0] for row in await connection.fetch(_GET_COLUMNS, table)]


async def _read_sources(connection: Any) -> UsageSources:
    names = USAGE_TABLE, FEEDBACK_TABLE
    tables = {name: await _read_columns(connection, name) for name in names}
    return UsageSources.build(tables, names, _TYPES)


async def _find_row(connection: Any, feedback: Feedback, query: str) -> Any:
    """The time and id of the newest row that the feedback judges, or None."""
    target, key = _clean_text(feedback.target), _clean_text(feedback.key)
    return await connection.fetchrow(query, target, key, feedback.any_key)


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


def query_postgres_usage(
    url: str, by: Sequence[str], since: float, limit: int | None = None
) -> list[UsageTotal]:
    """Usage since ``since`` (Unix seconds), grouped by names of ``GROUP_COLUMNS``.

    The first ``limit`` groups, if there is one. Raises one of ``DATABASE_ERRORS``.
    """
    keys = ", ".join(_DAY_EXPRESSION if name == "day" else GROUP_COLUMNS[name] for name in by)
    order = ", ".join(str(n) for n in range(1, len(by) + 1))

    def build_query(sources: UsageSources) -> str:
        return (  # names of GROUP_COLUMNS only
            f"SELECT {keys}, {_SUM_EXPRESSIONS} FROM {sources.usage} AS u "  # noqa: S608
            f"WHERE at >= $1 AND shadow_of = '' GROUP BY {order} ORDER BY {order} LIMIT $2"
        )

    rows = asyncio.run(fetch_usage(url, build_query, since, limit))
    return [UsageTotal(dict(zip(by, row, strict=False)), *row[len(by) :]) for row in rows]


def query_postgres_intervals(url: str, interval: float, since: float) -> list[UsageInterval]:
    """The intervals since ``since``, see ``query_sqlite_intervals``.

    Raises one of ``DATABASE_ERRORS``.
    """

    def build_query(sources: UsageSources) -> str:
        return (
            "SELECT floor(at / $1)::int8, model, version, count(*), "  # noqa: S608 - names of ours
            "count(*) FILTER (WHERE outcome NOT IN ('ok', 'cancelled')), "
            "sum(completion_tokens)::int8, avg(first_token) "
            f"FROM {sources.usage} AS u WHERE at >= $2 AND shadow_of = '' "
            "GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
        )

    rows = asyncio.run(fetch_usage(url, build_query, interval, since))
    return [UsageInterval(*row) for row in rows]


async def fetch_usage(
    url: str, build_query: Callable[[UsageSources], str], *parameters: object
) -> list[tuple[Any, ...]]:
    """The rows of a query on a database of whatever version. Raises one of ``DATABASE_ERRORS``."""
    async with asyncio.timeout(60):
        connection = await connect_database(url)
        try:
            query = build_query(await _read_sources(connection))
            return [tuple(one) for one in await connection.fetch(query, *parameters)]
        finally:
            await connection.close()


def read_postgres_usage(
    url: str, model: str, since: float, limit: int = MAX_READ_ROWS
) -> UsageExtract:
    """Read the newest ``limit`` rows of a model, see ``read_sqlite_usage``.

    Raises one of ``DATABASE_ERRORS``.
    """
    return asyncio.run(_read_usage(url, model, since, limit))


async def _read_usage(url: str, model: str, since: float, limit: int) -> UsageExtract:
    async with asyncio.timeout(60):
        connection = await connect_database(url)
        try:
            sources = await _read_sources(connection)
            query = f"SELECT DISTINCT model FROM {sources.usage} AS u ORDER BY 1"  # noqa: S608 - names of ours
            models = [row[0] for row in await connection.fetch(query)]
            query = (
                f"SELECT {READ_COLUMNS} FROM {sources.usage} AS u "  # noqa: S608 - as above
                "WHERE (model = $1 OR failed_model = $1) AND at >= $2 "
                "AND shadow_of = '' ORDER BY at DESC LIMIT $3"
            )
            found = await connection.fetch(query, model, since, limit)
            rows = [tuple(row) for row in reversed(found)]
            if len(rows) == limit:
                since = rows[0][0]
            judged = await connection.fetch(sources.read_feedback, model, since)
        finally:
            await connection.close()
    return UsageExtract(models, rows, [OutcomeRow(*row) for row in judged])
