"""One row of SQLite for each exchange that came to a model: who asked, what answered, the tokens.

A row is written once, however often that is tried: its key is when the exchange began, and its id.
The id alone would not do, since clients may choose it.

While the file can't be written, since it is locked, its disk is full or its folder gone, rows wait,
so many at most. The rest are left out and counted. Nothing of this is ever in the way of an answer.
"""

import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from gateway.figures import answered
from gateway.recording.scribe import Scribe
from gateway.telemetry import Record

log = logging.getLogger("interlingua")

COLUMNS: Final = (
    ("at", "REAL NOT NULL"),
    ("id", "TEXT NOT NULL"),
    ("key", "TEXT NOT NULL"),
    ("dialect", "TEXT NOT NULL"),
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

_MOST: Final = 10_000
"""Rows that may wait."""
_PATIENCE: Final = 1.0
"""Seconds to wait for a lock, and from a failure to the next try."""
_SWEEP: Final = 3600.0
"""Seconds from one look for old rows to the next."""
_TABLE: Final = (
    f"CREATE TABLE IF NOT EXISTS usage ({', '.join(' '.join(one) for one in COLUMNS)}, "
    "PRIMARY KEY (at, id)) WITHOUT ROWID"
)
_VALUES: Final = ", ".join(f"json_extract(value, '$[{n}]')" for n in range(len(COLUMNS)))
_INSERT: Final = f"INSERT OR IGNORE INTO usage SELECT {_VALUES} FROM json_each(?)"  # noqa: S608
"""All rows in one statement: the interpreter is left alone while it runs."""


class Ledger:
    """Writes them to a file."""

    def __init__(self, path: str, keep: float, now: Callable[[], float]) -> None:
        """Rows are kept for so many seconds. ``now`` is in Unix seconds."""
        self._path = path
        self._keep = keep
        self._now = now
        self._scribe = Scribe("usage", _MOST, self._write)
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        """Which one is open."""
        self._swept = 0.0
        self._failing = False
        self._told = 0
        """Lost rows of which was said that they are."""
        self.start = self._scribe.start

    def tell(self, record: Record) -> None:
        """Write down an exchange, if it came to a model."""
        if record.model:
            self._scribe.put(record)

    def lost(self) -> int:
        """How many exchanges have no row."""
        return self._scribe.lost

    def close(self, within: float) -> None:
        """Write what waits, for so many seconds at most, and let go of the file."""
        if not self._scribe.close(within):
            log.warning("usage: the last rows are not in %s", self._path)
            return
        self._say_lost()
        self._let_go()

    def _write(self, batch: Sequence[Record]) -> int:
        """Write them, if it is tried again and again; gives how many had to be given up."""
        rows = msgspec.json.encode([_row(record) for record in batch]).decode()
        while True:
            try:
                self._put_in(rows)
            except (OSError, sqlite3.Error) as error:
                if not self._failing:
                    log.warning("usage is not written to %s for now: %s", self._path, error)
                self._failing = True
                if self._scribe.closing.is_set():
                    return len(batch)
                self._scribe.closing.wait(_PATIENCE)
            else:
                if self._failing:
                    log.warning("usage is written to %s again", self._path)
                    self._say_lost()
                self._failing = False
                return 0

    def _put_in(self, rows: str) -> None:
        """Raises OSError or sqlite3.Error."""
        now = self._now()
        connection = self._opened()
        connection.execute(_INSERT, (rows,))
        if abs(now - self._swept) >= _SWEEP:
            connection.execute("DELETE FROM usage WHERE at < ?", (now - self._keep,))
            self._swept = now

    def _opened(self) -> sqlite3.Connection:
        """The file, which may have been taken away since. Raises OSError or sqlite3.Error."""
        whole = self._file is not None and self._file == _identity(self._path)
        if self._connection is not None and whole:
            return self._connection
        self._let_go()
        found = sqlite3.connect(
            self._path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
        )
        self._connection = found
        found.execute("PRAGMA journal_mode = WAL")
        found.execute("PRAGMA synchronous = NORMAL")
        found.execute(_TABLE)
        self._file = _identity(self._path)
        return found

    def _let_go(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = self._file = None

    def _say_lost(self) -> None:
        if lost := self._scribe.lost - self._told:
            self._told += lost
            log.warning("usage: %d rows are lost", lost)


def _identity(path: str) -> tuple[int, int] | None:
    """What makes it the same file; None where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - the path is a text
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _row(record: Record) -> tuple[Any, ...]:
    """As ``COLUMNS`` say. Tokens that were passed on before nobody counted them are estimated."""
    usage, (model, version, split) = record.usage, answered(record)
    tokens: tuple[int, int, str] = 0, record.tokens, "estimated" if record.tokens else ""
    if usage is not None:
        tokens = usage.prompt_tokens, usage.completion_tokens, usage.source
    return (
        record.began,
        record.id,
        record.key,
        record.dialect,
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
