"""Usage rows: one per request that reached a model, with key, model and tokens.

The primary key is the start time and the request id, so retried writes add no second row. The id
alone is not unique, since clients may choose it.

While the store is unavailable (locked file, full disk, missing folder, database down), rows are
queued up to a limit. Rows beyond it are dropped and counted. Writing never delays a response.
"""

import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from gateway.observability.background_writer import BackgroundWriter
from gateway.observability.record import RequestRecord
from gateway.observability.stats import build_stats_key

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
)
"""Times in seconds, ``at`` in Unix seconds."""

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
_VALUES: Final = ", ".join(f"json_extract(value, '$[{n}]')" for n in range(len(USAGE_COLUMNS)))
_INSERT: Final = f"INSERT OR IGNORE INTO usage SELECT {_VALUES} FROM json_each(?)"  # noqa: S608
"""One statement for all rows: SQLite releases the interpreter lock while it runs."""


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

    def close(self) -> None:
        """Close the store. Never raises."""


class UsageRecorder:
    """Writes usage rows to a store from a background thread."""

    def __init__(self, store: UsageStore) -> None:
        self._store = store
        self._writer = BackgroundWriter("usage", _MAX_WAITING_ROWS, self._write_batch)
        self._failing = False
        self._logged_dropped = 0
        """Dropped rows that a log message has reported."""
        self.start = self._writer.start

    def record_usage(self, record: RequestRecord) -> None:
        """Queue the usage row of a request, if it reached a model."""
        if record.model:
            self._writer.enqueue(record)

    def count_dropped(self) -> int:
        """The number of dropped rows."""
        return self._writer.dropped

    def close(self, within: float) -> None:
        """Write the queued rows within ``within`` seconds and close the store."""
        if not self._writer.close(within):
            log.warning("usage: the last rows were not written to %s", self._store.name)
            return
        self._log_dropped()
        self._store.close()

    def _write_batch(self, batch: Sequence[RequestRecord]) -> int:
        """Write a batch, retrying while the store is down; returns how many rows were dropped."""
        while True:
            is_last_attempt = self._writer.closing.is_set()
            try:
                dropped = self._store.insert_records(batch)
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

    def __init__(self, path: str, retention: float, now: Callable[[], float]) -> None:
        """Rows older than ``retention`` seconds are deleted. ``now`` gives Unix seconds."""
        super().__init__(_SqliteUsageStore(path, retention, now))


class _SqliteUsageStore:
    """A ``UsageStore`` over an SQLite file."""

    transient_errors = (OSError, sqlite3.Error)

    def __init__(self, path: str, retention: float, now: Callable[[], float]) -> None:
        self.name = path
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
            self._cleaned_at = now
        return 0

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
        # SQLite would let the umask decide. It gives the mode to its other files, -wal and -shm.
        with suppress(OSError):  # it exists, or SQLite reports what is wrong
            os.close(os.open(self.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE))
        connection = sqlite3.connect(
            self.name, timeout=_RETRY_DELAY, isolation_level=None, check_same_thread=False
        )
        self._connection = connection
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(_CREATE_TABLE)
        self._file_identity = _get_file_identity(self.name)
        return connection


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
    )


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


def query_sqlite_usage(path: str, by: Sequence[str], since: float) -> list[UsageTotal]:
    """Usage since ``since`` (Unix seconds), grouped by names of ``GROUP_COLUMNS``.

    Raises sqlite3.Error if the file is not a usage database or cannot be read.
    """
    keys = ", ".join(GROUP_COLUMNS[name] for name in by)
    query = (  # names of GROUP_COLUMNS only
        f"SELECT {keys}, {_SUM_EXPRESSIONS} FROM usage WHERE at >= ? "  # noqa: S608
        f"GROUP BY {keys} ORDER BY {keys}"
    )
    with closing(sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)) as file:
        rows = file.execute(query, (since,)).fetchall()
    return [UsageTotal(dict(zip(by, row, strict=False)), *row[len(by) :]) for row in rows]
