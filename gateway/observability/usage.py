"""Usage rows: one per request that reached a model, with key, model and tokens.

The primary key is the start time and the request id, so retried writes add no second row. The id
alone is not unique, since clients may choose it.

While the store is unavailable (locked file, full disk, missing folder, database down), rows are
queued up to a limit. Rows beyond it are dropped and counted. Writing never delays a response.

Feedback stands in a table of its own beside the rows, with the time and the id of the row that it
judges. Its primary key is that row, the API key and the name of the outcome: a key that judges a
request again replaces its first judgement.
"""

import asyncio
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from gateway.observability.background_writer import BackgroundWriter
from gateway.observability.record import Feedback, FeedbackKind, RequestRecord
from gateway.observability.stats import build_fallback_key, build_stats_key, get_error_origin

log = logging.getLogger("interlingua")

USAGE_COLUMNS: Final = (
    ("at", "REAL NOT NULL"),
    ("id", "TEXT NOT NULL"),
    ("key", "TEXT NOT NULL"),
    ("protocol", "TEXT NOT NULL"),
    ("model", "TEXT NOT NULL"),
    ("version", "TEXT NOT NULL"),
    ("split", "TEXT NOT NULL"),
    ("backend", "TEXT NOT NULL"),
    ("outcome", "TEXT NOT NULL"),
    ("error", "TEXT NOT NULL"),
    ("prompt_tokens", "INTEGER NOT NULL"),
    ("completion_tokens", "INTEGER NOT NULL"),
    ("source", "TEXT NOT NULL"),
    ("duration", "REAL NOT NULL"),
    ("first_token", "REAL"),
    ("rule", "TEXT NOT NULL DEFAULT ''"),
    ("response_id", "TEXT NOT NULL DEFAULT ''"),
    ("user_hash", "TEXT NOT NULL DEFAULT ''"),
    ("failed_model", "TEXT NOT NULL DEFAULT ''"),
    ("failed_version", "TEXT NOT NULL DEFAULT ''"),
    ("failed_split", "TEXT NOT NULL DEFAULT ''"),
    ("failed_outcome", "TEXT NOT NULL DEFAULT ''"),
    ("measures", "TEXT NOT NULL DEFAULT ''"),
    ("shadow_of", "TEXT NOT NULL DEFAULT ''"),
)
"""Times in seconds, ``at`` in Unix seconds. The columns from ``rule`` on are missing in tables of
older versions, to which they are added. If a fallback was asked, those with ``failed_`` are
of the target that failed first: as its row would have had them without the fallback.
``shadow_of`` is the id of the request of which this is a copy, whose rows only rollouts read."""
ADDED_COLUMNS: Final = USAGE_COLUMNS[-9:]
READ_COLUMNS: Final = ", ".join(name for name, _ in USAGE_COLUMNS)
FEEDBACK_COLUMNS: Final = (
    ("at", "REAL NOT NULL"),
    ("request_at", "REAL NOT NULL"),
    ("id", "TEXT NOT NULL"),
    ("key", "TEXT NOT NULL"),
    ("name", "TEXT NOT NULL"),
    ("kind", "TEXT NOT NULL"),
    ("number", "REAL"),
    ("category", "TEXT NOT NULL"),
    ("comment", "TEXT NOT NULL"),
)
"""``at`` is the time of the feedback, ``request_at`` that of the request's usage row. A boolean is
the number 0 or 1; ``kind`` is boolean, number or category."""

_MAX_WAITING_ROWS: Final = 10_000
"""Maximum queued rows."""
_RETRY_DELAY: Final = 1.0
"""Seconds to wait for a lock, and between write attempts."""
CLEANUP_INTERVAL: Final = 3600.0
"""Seconds between deletions of old rows."""
_FILE_MODE: Final = 0o600
"""The mode of a new file: who uses which model is nobody else's business."""
_CREATE_TABLE: Final = (
    f"CREATE TABLE IF NOT EXISTS usage ({', '.join(' '.join(one) for one in USAGE_COLUMNS)}, "
    "PRIMARY KEY (at, id)) WITHOUT ROWID"
)
_ROLLOUT_TABLES: Final = "rollout_"
"""How the tables of rollouts begin, which a gateway makes before the first row of usage."""
_ADD_COLUMN: Final = "ALTER TABLE usage ADD COLUMN "
_VALUES: Final = ", ".join(f"json_extract(value, '$[{n}]')" for n in range(len(USAGE_COLUMNS)))
_INSERT: Final = f"INSERT OR IGNORE INTO usage ({READ_COLUMNS}) SELECT {_VALUES} FROM json_each(?)"  # noqa: S608
"""One statement for all rows: SQLite releases the interpreter lock while it runs."""


def build_source(
    table: str,
    columns: Sequence[tuple[str, str]],
    present: Collection[str],
    types: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """A table as a subselect that has all ``columns``, of which ``present`` are in the database.

    In the table of an older version the added ones have their defaults. A table that is not there
    yet has no rows. ``types`` are the database's names of SQLite's types.
    """
    names = []
    for name, definition in columns:
        kind, _, rest = definition.partition(" ")
        default = rest.partition("DEFAULT ")[2] if present else "NULL"
        if name not in present and default:
            names.append(f"CAST({default} AS {types.get(kind, kind)}) AS {name}")
        else:
            names.append(name)
    return f"(SELECT {', '.join(names)} {f'FROM {table}' if present else 'WHERE 1 = 0'})"


class UsageSources(Struct, frozen=True):
    """What statements read from, whatever version made the database: see ``build_source``."""

    usage: str
    feedback: str

    @classmethod
    def build(
        cls,
        tables: Mapping[str, Collection[str]],
        names: tuple[str, str] = ("usage", "feedback"),
        types: Mapping[str, str] = MappingProxyType({}),
    ) -> "UsageSources":
        """``tables`` are the columns that are present, by the names of both tables."""
        usage, feedback = names
        return cls(
            build_source(usage, USAGE_COLUMNS, tables[usage], types),
            build_source(feedback, FEEDBACK_COLUMNS, tables[feedback], types),
        )

    def build_find(self, column: str) -> str:
        """Finds the newest row with an id in a column that a key may judge: its time and id."""
        return _build_find(f"{self.usage} AS u", column)

    @property
    def read_feedback(self) -> str:
        """The values of ``OutcomeRow``: of a model, of requests since a time."""
        return (
            "SELECT u.at, u.id, u.version, u.split, u.key, u.rule, u.protocol, "  # noqa: S608 - names of ours
            "u.user_hash, f.name, f.kind, f.number, f.category, f.at "
            f"FROM {self.feedback} AS f JOIN {self.usage} AS u "
            "ON u.at = f.request_at AND u.id = f.id "
            "WHERE u.model = $1 AND u.at >= $2 AND u.shadow_of = '' ORDER BY f.at, f.id"
        )


def _build_find(source: str, column: str) -> str:
    return (
        f"SELECT at, id FROM {source} WHERE {column} = $1 "  # noqa: S608 - names of ours
        "AND (key = $2 OR $3) ORDER BY at DESC LIMIT 1"
    )


class FeedbackStatements(Struct, frozen=True):
    """The SQL to write feedback to a pair of tables, with parameters ``$1``, ``$2`` and so on."""

    create: Sequence[str]
    find: Mapping[str, str]
    """By the column of the id: finds the newest row that a key may judge, its time and id."""
    insert: str
    delete: str

    @classmethod
    def build(
        cls, usage_table: str, table: str, types: Mapping[str, str] = MappingProxyType({})
    ) -> "FeedbackStatements":
        """``types`` are the database's names of SQLite's types."""
        columns = [(name, *kind.partition(" ")[::2]) for name, kind in FEEDBACK_COLUMNS]
        names = ", ".join(name for name, _ in FEEDBACK_COLUMNS)
        shared = {"at", "number", "category", "kind", "comment"}
        definitions = [
            f"{name} {types.get(kind, kind)} {rest}".rstrip() for name, kind, rest in columns
        ]
        values = ", ".join(f"${n}" for n in range(1, len(FEEDBACK_COLUMNS) + 1))
        updates = ", ".join(f"{name} = excluded.{name}" for name in sorted(shared))
        key = "request_at, id, key, name"
        create_index = "CREATE INDEX IF NOT EXISTS"
        key_text = f"PRIMARY KEY ({key})"
        return cls(
            (
                f"CREATE TABLE IF NOT EXISTS {table} ({', '.join((*definitions, key_text))})",
                f"{create_index} {usage_table}_by_id ON {usage_table} (id)",
                f"{create_index} {usage_table}_by_response ON {usage_table} (response_id)",
            ),
            {column: _build_find(usage_table, column) for column in ("id", "response_id")},
            f"INSERT INTO {table} ({names}) VALUES ({values}) "  # noqa: S608 - names of ours
            f"ON CONFLICT ({key}) DO UPDATE SET {updates}",
            f"DELETE FROM {table} WHERE request_at < $1",  # noqa: S608 - as above
        )


def bind_sqlite(statement: str, *values: object) -> tuple[str, Mapping[str, object]]:
    """A statement with parameters ``$1`` and so on, and its values, as SQLite takes them."""
    named = {f"v{number}": value for number, value in enumerate(values, 1)}
    return re.sub(r"\$(\d+)", r":v\1", statement), named


_FEEDBACK: Final = FeedbackStatements.build("usage", "feedback")


def build_feedback_row(feedback: Feedback, request_at: float, request_id: str) -> tuple[Any, ...]:
    """The values of ``FEEDBACK_COLUMNS``."""
    return (
        feedback.at,
        request_at,
        request_id,
        feedback.key,
        feedback.name,
        feedback.kind,
        feedback.number,
        feedback.category,
        feedback.comment,
    )


class UsageStore(Protocol):
    """A database for usage rows."""

    @property
    def name(self) -> str:
        """Its name in log messages, without secrets."""

    @property
    def transient_errors(self) -> tuple[type[Exception], ...]:
        """Exceptions that mean the store is temporarily unavailable."""

    def insert_records(self, records: Sequence[RequestRecord]) -> int:
        """Insert rows; returns how many are invalid. Raises one of ``transient_errors``."""

    def insert_feedback(self, feedback: Sequence[Feedback]) -> int:
        """Insert or replace judgements; returns how many judge no row that is there.

        Raises one of ``transient_errors``.
        """

    async def find_request(self, feedback: Feedback) -> bool:
        """Whether the row is there that this judges. Raises one of ``transient_errors``."""

    def close(self) -> None:
        """Close the store. Never raises."""


class UsageRecorder:
    """Writes usage rows to a store from a background thread."""

    def __init__(self, store: UsageStore) -> None:
        self._store = store
        self._writer = BackgroundWriter[RequestRecord | Feedback](
            "usage", _MAX_WAITING_ROWS, self._write_batch
        )
        self._failing = False
        self._logged_dropped = 0
        """Dropped rows that a log message has reported."""
        self.start = self._writer.start

    def record_usage(self, record: RequestRecord) -> None:
        """Queue the usage row of a request, if it reached a model."""
        if record.model:
            self._writer.enqueue(record)

    def record_feedback(self, feedback: Feedback) -> None:
        """Queue a judgement; it is written after the rows that are queued already."""
        self._writer.enqueue(feedback)

    async def find_request(self, feedback: Feedback) -> bool | None:
        """Whether the row is there that this judges; None if the store is unavailable."""
        try:
            return await self._store.find_request(feedback)
        except self._store.transient_errors:
            return None

    def count_dropped(self) -> int:
        """The number of dropped rows, with those of feedback."""
        return self._writer.dropped

    def close(self, within: float) -> None:
        """Write the queued rows within ``within`` seconds and close the store."""
        if not self._writer.close(within):
            log.warning("usage: the last rows were not written to %s", self._store.name)
            return
        self._log_dropped()
        self._store.close()

    def _write_batch(self, batch: Sequence[RequestRecord | Feedback]) -> int:
        """Write a batch, retrying while the store is down; returns how many rows were dropped."""
        records = [one for one in batch if isinstance(one, RequestRecord)]
        feedback = [one for one in batch if isinstance(one, Feedback)]
        while True:
            is_last_attempt = self._writer.closing.is_set()
            try:
                dropped = self._store.insert_records(records) if records else 0
                dropped += self._store.insert_feedback(feedback) if feedback else 0
            except self._store.transient_errors as error:
                if not self._failing:
                    reason = str(error) or type(error).__name__
                    log.warning("usage is not written to %s for now: %s", self._store.name, reason)
                self._failing = True
                if is_last_attempt:
                    return len(batch)
                self._writer.closing.wait(_RETRY_DELAY)
            else:
                if self._failing:
                    log.warning("usage is written to %s again", self._store.name)
                    self._log_dropped()
                self._failing = False
                return dropped

    def _log_dropped(self) -> None:
        if dropped := self._writer.dropped - self._logged_dropped:
            self._logged_dropped += dropped
            log.warning("usage: %d rows were dropped", dropped)


class SqliteUsageRecorder(UsageRecorder):
    """Writes usage rows to an SQLite file."""

    def __init__(
        self, path: str, retention: float, now: Callable[[], float], *, feedback: bool = False
    ) -> None:
        """Rows older than ``retention`` seconds are deleted. ``now`` gives Unix seconds.

        ``feedback``: the file also has the table of feedback.
        """
        super().__init__(_SqliteUsageStore(path, retention, now, feedback=feedback))


class _SqliteUsageStore:
    """A ``UsageStore`` over an SQLite file."""

    transient_errors = (OSError, sqlite3.Error)

    def __init__(
        self, path: str, retention: float, now: Callable[[], float], *, feedback: bool
    ) -> None:
        self.name = path
        self._has_feedback = feedback
        self._retention = retention
        self._now = now
        self._connection: sqlite3.Connection | None = None
        self._file_identity: tuple[int, int] | None = None
        """Device and inode of the open file."""
        self._cleaned_at = 0.0

    def insert_records(self, records: Sequence[RequestRecord]) -> int:
        """See ``UsageStore``."""
        now = self._now()
        connection = self._open_database()
        rows = msgspec.json.encode([build_usage_row(record) for record in records]).decode()
        connection.execute(_INSERT, (rows,))
        if abs(now - self._cleaned_at) >= CLEANUP_INTERVAL:
            connection.execute("DELETE FROM usage WHERE at < ?", (now - self._retention,))
            if self._has_feedback:
                connection.execute(*bind_sqlite(_FEEDBACK.delete, now - self._retention))
            self._cleaned_at = now
        return 0

    def insert_feedback(self, feedback: Sequence[Feedback]) -> int:
        """See ``UsageStore``."""
        connection = self._open_database()
        dropped = 0
        for one in feedback:
            find = bind_sqlite(_FEEDBACK.find[one.column], one.target, one.key, one.any_key)
            found = connection.execute(*find).fetchone()
            if found is None:
                dropped += 1
            else:
                row = build_feedback_row(one, *found)
                connection.execute(*bind_sqlite(_FEEDBACK.insert, *row))
        return dropped

    async def find_request(self, feedback: Feedback) -> bool:
        """See ``UsageStore``."""
        return await asyncio.to_thread(self._find_request, feedback)

    def _find_request(self, feedback: Feedback) -> bool:
        os.stat(self.name)  # noqa: PTH116 - a str; without its file, nothing is known of a request
        with open_sqlite_usage(self.name) as (file, sources):
            query = sources.build_find(feedback.column)
            find = bind_sqlite(query, feedback.target, feedback.key, feedback.any_key)
            return file.execute(*find).fetchone() is not None

    def close(self) -> None:
        """See ``UsageStore``."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = self._file_identity = None

    def _open_database(self) -> sqlite3.Connection:
        """Open the file, or reopen it if it was replaced. Raises OSError or sqlite3.Error."""
        current = self._file_identity is not None and self._file_identity == _get_file_identity(
            self.name
        )
        if self._connection is not None and current:
            return self._connection
        self.close()
        create_private_file(self.name)
        connection = sqlite3.connect(
            self.name, timeout=_RETRY_DELAY, isolation_level=None, check_same_thread=False
        )
        self._connection = connection
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(_CREATE_TABLE)
        present = {row[1] for row in connection.execute("PRAGMA table_info(usage)")}
        for name, kind in ADDED_COLUMNS:
            if name not in present:
                connection.execute(f"{_ADD_COLUMN}{name} {kind}")
        if self._has_feedback:
            for statement in _FEEDBACK.create:
                connection.execute(statement)
        self._file_identity = _get_file_identity(self.name)
        return connection


def create_private_file(path: str) -> None:
    """Create the file of a database, unless it exists or can't be: SQLite reports what is wrong.

    SQLite would let the umask decide. It gives the mode to its other files, -wal and -shm.
    """
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE))


@contextmanager
def open_sqlite_usage(path: str) -> Iterator[tuple[sqlite3.Connection, UsageSources]]:
    """Open a file to read it, of whatever version, while a gateway may write to it.

    A file that is not there yet, in a folder that is, has no rows; nor has one in which only the
    rollouts have tables. Raises sqlite3.Error, also for another application's database.
    """
    file = Path(path).absolute()
    is_expected = not file.exists() and file.parent.is_dir()
    uri = "file::memory:" if is_expected else f"{file.as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=_RETRY_DELAY)) as connection:
        names = {
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        if "usage" not in names and not all(name.startswith(_ROLLOUT_TABLES) for name in names):
            raise sqlite3.DatabaseError("it has no table 'usage'")
        tables = {
            name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
            for name in ("usage", "feedback")
        }
        yield connection, UsageSources.build(tables)


def _get_file_identity(path: str) -> tuple[int, int] | None:
    """Device and inode of a file; None if it does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116 - the path is a str
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def build_usage_row(record: RequestRecord) -> tuple[Any, ...]:
    """The values of ``USAGE_COLUMNS``. Without usage, the streamed tokens count as an estimate."""
    usage, (model, version, split) = record.usage, build_stats_key(record)
    tokens: tuple[int, int, str] = 0, record.tokens, "estimated" if record.tokens else ""
    if usage is not None:
        tokens = usage.prompt_tokens, usage.completion_tokens, usage.source
    return (
        record.started_at,
        record.id,
        record.key,
        record.protocol,
        model,
        version,
        split,
        record.backend,
        record.outcome,
        record.error,
        *tokens,
        record.duration,
        record.first_token,
        record.rule,
        record.response_id,
        record.user_hash,
        *_describe_first_failure(record),
        msgspec.json.encode(record.measures).decode() if record.measures else "",
        record.shadow_of,
    )


def _describe_first_failure(record: RequestRecord) -> tuple[str, str, str, str]:
    """Model, version, split and outcome of the target that failed before the fallbacks."""
    if not record.fallback_from:
        return "", "", "", ""
    # the first failure is the first target's: "model@version Error"
    error = record.failed_attempts[0].rpartition(" ")[2] if record.failed_attempts else ""
    return (*build_fallback_key(record), f"{get_error_origin(error)}_error")


# Usage totals. They can be queried while a gateway writes rows.

GROUP_COLUMNS: Final = {
    "key": "key",
    "model": "model",
    "version": "version",
    "split": "split",
    "backend": "backend",
    "protocol": "protocol",
    "outcome": "outcome",
    "source": "source",
    "day": "date(at, 'unixepoch')",
}
"""Columns that totals can be grouped by; days are UTC."""

_SUM_EXPRESSIONS: Final = (
    "count(*), sum(outcome NOT IN ('ok', 'cancelled')), sum(outcome = 'cancelled'), "
    "sum(prompt_tokens), sum(completion_tokens)"
)


class UsageTotal(Struct, frozen=True):
    """The totals of the requests in one group."""

    by: dict[str, str]
    requests: int
    errors: int
    """Requests that failed, without those that the client cancelled."""
    cancelled: int
    prompt_tokens: int
    completion_tokens: int


def query_sqlite_usage(
    path: str, by: Sequence[str], since: float, limit: int | None = None
) -> list[UsageTotal]:
    """Usage since ``since`` (Unix seconds), grouped by names of ``GROUP_COLUMNS``.

    The first ``limit`` groups, if there is one. Raises sqlite3.Error if the file is not a usage
    database or cannot be read.
    """
    keys = ", ".join(GROUP_COLUMNS[name] for name in by)
    with open_sqlite_usage(path) as (file, sources):
        query = (  # names of GROUP_COLUMNS only
            f"SELECT {keys}, {_SUM_EXPRESSIONS} FROM {sources.usage} "  # noqa: S608
            f"WHERE at >= ? AND shadow_of = '' GROUP BY {keys} ORDER BY {keys} LIMIT ?"
        )
        rows = file.execute(query, (since, -1 if limit is None else limit)).fetchall()
    return [UsageTotal(dict(zip(by, row, strict=False)), *row[len(by) :]) for row in rows]


class UsageInterval(Struct, frozen=True):
    """The requests of a version that began in one interval, by the interval's number ``n``."""

    n: int
    model: str
    version: str
    requests: int
    errors: int
    tokens: int
    """Those of the completions."""
    first_token: float | None
    """The mean time to the first token, in seconds."""


def query_sqlite_intervals(path: str, interval: float, since: float) -> list[UsageInterval]:
    """The intervals of ``interval`` seconds since ``since``, without those that have no requests.

    Raises sqlite3.Error, as ``query_sqlite_usage`` does.
    """
    with open_sqlite_usage(path) as (file, sources):
        query = (
            "SELECT CAST(at / ? AS INTEGER), model, version, count(*), "  # noqa: S608 - names of ours
            "sum(outcome NOT IN ('ok', 'cancelled')), sum(completion_tokens), avg(first_token) "
            f"FROM {sources.usage} WHERE at >= ? AND shadow_of = '' "
            "GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
        )
        return [UsageInterval(*row) for row in file.execute(query, (interval, since))]


# What a comparison of versions reads.


class OutcomeRow(Struct, frozen=True, array_like=True):
    """A judgement, with its request's time, id and labels."""

    request_at: float
    id: str
    version: str
    split: str
    key: str
    rule: str
    protocol: str
    user_hash: str
    name: str
    kind: FeedbackKind
    number: float | None
    category: str
    at: float


class UsageExtract(Struct, frozen=True):
    """The usage rows of a model, and the judgements of its requests in the order of their times.

    The values of a row are those of ``USAGE_COLUMNS``.
    """

    models: Sequence[str]
    """All models that have rows."""
    rows: Sequence[tuple[Any, ...]]
    outcomes: Sequence[OutcomeRow]


MAX_READ_ROWS: Final = 5_000_000
"""The newest rows of a model that are read at most: they are kept in memory."""


def read_sqlite_usage(
    path: str, model: str, since: float, limit: int = MAX_READ_ROWS
) -> UsageExtract:
    """Read the newest ``limit`` rows of a model since ``since`` (Unix seconds).

    They include those of requests that failed there and that a fallback to another model answered,
    and none of copies of requests.
    Raises sqlite3.Error if the file is not a usage database or cannot be read.
    """
    with open_sqlite_usage(path) as (file, sources):
        query = f"SELECT DISTINCT model FROM {sources.usage} ORDER BY 1"  # noqa: S608 - names of ours
        models = [name for (name,) in file.execute(query)]
        query = (
            f"SELECT {READ_COLUMNS} FROM {sources.usage} WHERE (model = ? OR failed_model = ?) "  # noqa: S608 - as above
            "AND at >= ? AND shadow_of = '' ORDER BY at DESC LIMIT ?"
        )
        rows = file.execute(query, (model, model, since, limit)).fetchall()[::-1]
        if len(rows) == limit:
            since = rows[0][0]
        judged = file.execute(*bind_sqlite(sources.read_feedback, model, since)).fetchall()
    return UsageExtract(models, rows, [OutcomeRow(*row) for row in judged])
