"""One row for each exchange that came to a model: who asked, what answered, the tokens.

A row is written once, however often that is tried: its key is when the exchange began, and its id.
The id alone would not do, since clients may choose it.

While the store can't be written to (a file is locked, its disk is full or its folder gone, or a
database is away), rows wait, so many at most. The rest are left out and counted. Nothing of this is
ever in the way of an answer.
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
"""Rows that may wait."""
_RETRY_DELAY: Final = 1.0
"""Seconds to wait for a lock, and from a failure to the next try."""
CLEANUP_INTERVAL: Final = 3600.0
"""Seconds from one look for old rows to the next."""
_CREATE_TABLE: Final = (
    f"CREATE TABLE IF NOT EXISTS usage ({', '.join(' '.join(one) for one in USAGE_COLUMNS)}, "
    "PRIMARY KEY (at, id)) WITHOUT ROWID"
)
_VALUES: Final = ", ".join(f"json_extract(value, '$[{n}]')" for n in range(len(USAGE_COLUMNS)))
_INSERT: Final = f"INSERT OR IGNORE INTO usage SELECT {_VALUES} FROM json_each(?)"  # noqa: S608
"""All rows in one statement: the interpreter is left alone while it runs."""


class UsageStore(Protocol):
    """Where rows are kept."""

    @property
    def name(self) -> str:
        """What the log calls it; it holds no secret."""

    @property
    def transient_errors(self) -> tuple[type[Exception], ...]:
        """What it raises while it can't be written to."""

    def insert_records(self, records: Sequence[RequestRecord]) -> int:
        """Write them all; gives how many it can never take. Raises one of ``failures``."""

    def close(self) -> None:
        """Let go of it. Never raises."""


class UsageRecorder:
    """Writes rows to a store, as soon as it takes them."""

    def __init__(self, store: UsageStore) -> None:
        self._store = store
        self._writer = BackgroundWriter("usage", _MAX_WAITING_ROWS, self._write_batch)
        self._failing = False
        self._logged_dropped = 0
        """Lost rows of which was said that they are."""
        self.start = self._writer.start

    def record_usage(self, record: RequestRecord) -> None:
        """Write down an exchange, if it came to a model."""
        if record.model:
            self._writer.enqueue(record)

    def count_dropped(self) -> int:
        """How many exchanges have no row."""
        return self._writer.dropped

    def close(self, within: float) -> None:
        """Write what waits, for so many seconds at most, and let go of the store."""
        if not self._writer.close(within):
            log.warning("usage: the last rows are not in %s", self._store.name)
            return
        self._log_dropped()
        self._store.close()

    def _write_batch(self, batch: Sequence[RequestRecord]) -> int:
        """Write them, if it is tried again and again; gives how many had to be given up."""
        while True:
            last = self._writer.closing.is_set()
            try:
                given_up = self._store.insert_records(batch)
            except self._store.transient_errors as error:
                if not self._failing:
                    why = str(error) or type(error).__name__
                    log.warning("usage is not written to %s for now: %s", self._store.name, why)
                self._failing = True
                if last:
                    return len(batch)
                self._writer.closing.wait(_RETRY_DELAY)
            else:
                if self._failing:
                    log.warning("usage is written to %s again", self._store.name)
                    self._log_dropped()
                self._failing = False
                return given_up

    def _log_dropped(self) -> None:
        if lost := self._writer.dropped - self._logged_dropped:
            self._logged_dropped += lost
            log.warning("usage: %d rows are lost", lost)


class SqliteUsageRecorder(UsageRecorder):
    """Writes them to a file of SQLite."""

    def __init__(self, path: str, keep: float, now: Callable[[], float]) -> None:
        """Rows are kept for so many seconds. ``now`` is in Unix seconds."""
        super().__init__(_SqliteUsageStore(path, keep, now))


class _SqliteUsageStore:
    """A Store."""

    transient_errors = (OSError, sqlite3.Error)

    def __init__(self, path: str, keep: float, now: Callable[[], float]) -> None:
        self.name = path
        self._retention = keep
        self._now = now
        self._connection: sqlite3.Connection | None = None
        self._file_identity: tuple[int, int] | None = None
        """Which one is open."""
        self._cleaned_at = 0.0

    def insert_records(self, records: Sequence[RequestRecord]) -> int:
        """See Store."""
        now = self._now()
        connection = self._open_database()
        rows = msgspec.json.encode([build_usage_row(record) for record in records]).decode()
        connection.execute(_INSERT, (rows,))
        if abs(now - self._cleaned_at) >= CLEANUP_INTERVAL:
            connection.execute("DELETE FROM usage WHERE at < ?", (now - self._retention,))
            self._cleaned_at = now
        return 0

    def close(self) -> None:
        """See Store."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = self._file_identity = None

    def _open_database(self) -> sqlite3.Connection:
        """The file, which may have been taken away since. Raises OSError or sqlite3.Error."""
        whole = self._file_identity is not None and self._file_identity == _get_file_identity(
            self.name
        )
        if self._connection is not None and whole:
            return self._connection
        self.close()
        found = sqlite3.connect(
            self.name, timeout=_RETRY_DELAY, isolation_level=None, check_same_thread=False
        )
        self._connection = found
        found.execute("PRAGMA journal_mode = WAL")
        found.execute("PRAGMA synchronous = NORMAL")
        found.execute(_CREATE_TABLE)
        self._file_identity = _get_file_identity(self.name)
        return found


def _get_file_identity(path: str) -> tuple[int, int] | None:
    """What makes it the same file; None where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - the path is a text
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def build_usage_row(record: RequestRecord) -> tuple[Any, ...]:
    """As ``COLUMNS`` say. Tokens that were passed on before nobody counted them are estimated."""
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


# What rows of usage come to. They may be read while a gateway writes them.

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
