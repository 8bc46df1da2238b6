"""Stores responses in an SQLite file, which the processes of one machine may share."""

import asyncio
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gateway.observability.log_rate import RareWarnings
from gateway.store.response_store import (
    UNAVAILABLE_MESSAGE,
    StoredLocation,
    StoreLimits,
    StoreUnavailable,
    count_stored_bytes,
)
from protocols.core.interfaces import StoredResponse

log = logging.getLogger("interlingua")

ResultT = TypeVar("ResultT")

_FILE_MODE: Final = 0o600
"""The mode of a new file, since it holds prompts."""
_LOCK_TIMEOUT: Final = 2.0
"""Seconds to wait for another process."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS responses (
    owner TEXT NOT NULL, id TEXT NOT NULL, at REAL NOT NULL, size INTEGER NOT NULL,
    body BLOB NOT NULL, PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS responses_at ON responses (at);
CREATE TABLE IF NOT EXISTS items (
    owner TEXT NOT NULL, id TEXT NOT NULL, response TEXT NOT NULL, PRIMARY KEY (owner, id),
    FOREIGN KEY (owner, response) REFERENCES responses (owner, id) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS items_response ON items (owner, response);
"""
_FIND: Final = "SELECT id, body FROM responses WHERE owner = ? AND id = ? AND at > ?"
_LOCATE: Final = """
SELECT names.value, responses.id, responses.size FROM json_each(:names) AS names
LEFT JOIN items ON items.owner = :owner AND items.id = names.value
JOIN responses ON responses.owner = :owner AND responses.id = coalesce(items.response, names.value)
WHERE responses.at > :oldest
"""
_REMOVE_EXCESS: Final = """
DELETE FROM responses WHERE owner = :owner AND id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER newest AS number, sum(size) OVER newest AS total
        FROM responses WHERE owner = :owner WINDOW newest AS (ORDER BY at DESC, rowid DESC)
    ) WHERE number > :count OR total > :bytes
)
"""
"""Removes the oldest responses of an owner, beyond its count or its bytes."""


class SqliteResponseStore:
    """Stores responses in a file. Its statements run in a thread, one at a time."""

    def __init__(self, path: str, limits: StoreLimits, wall_clock: Callable[[], float]) -> None:
        self._path = path
        self._limits = limits
        self._wall_clock = wall_clock
        self._warnings = RareWarnings(wall_clock)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    async def locate_responses(
        self, owner: str, names: Sequence[str]
    ) -> Mapping[str, StoredLocation]:
        """See ``gateway.store.response_store.ResponseStore``."""
        return await self._read(lambda database: self._locate(database, owner, names))

    async def find_response(self, owner: str, name: str) -> StoredResponse | None:
        """See ``gateway.store.response_store.ResponseStore``."""
        return await self._read(lambda database: self._find(database, owner, name))

    async def add_response(self, owner: str, response: StoredResponse) -> None:
        """See ``gateway.store.response_store.ResponseStore``."""
        if count_stored_bytes(response) > self._limits.owner_bytes:
            self._warnings.add(
                "a response of %d bytes is too large to be stored", len(response.body)
            )
            return
        try:
            await asyncio.to_thread(
                self._run, lambda database: self._add(database, owner, response)
            )
        except (sqlite3.Error, OSError) as error:
            self._warnings.add("a response was not stored in %s: %s", self._path, error)

    async def remove_response(self, owner: str, name: str) -> None:
        """See ``gateway.store.response_store.ResponseStore``."""
        statement = "DELETE FROM responses WHERE owner = ? AND id = ?"
        await self._read(lambda database: database.execute(statement, (owner, name)))

    async def aclose(self) -> None:
        """See ``gateway.store.response_store.ResponseStore``."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    async def _read(self, action: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Run a statement. Raises StoreUnavailable."""
        try:
            return await asyncio.to_thread(self._run, action)
        except (sqlite3.Error, OSError) as error:
            self._warnings.add("stored responses can't be read from %s: %s", self._path, error)
            raise StoreUnavailable(UNAVAILABLE_MESSAGE) from error

    def _run(self, action: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        with self._lock:
            if self._connection is None:
                self._connection = self._connect()
            with self._connection:  # one transaction
                return action(self._connection)

    def _connect(self) -> sqlite3.Connection:
        path = Path(self._path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, _FILE_MODE))
        database = sqlite3.connect(path, timeout=_LOCK_TIMEOUT, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA foreign_keys = ON")
            database.executescript(_SCHEMA)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _locate(
        self, database: sqlite3.Connection, owner: str, names: Sequence[str]
    ) -> Mapping[str, StoredLocation]:
        oldest = self._wall_clock() - self._limits.retention
        text = msgspec.json.encode(names).decode()
        parameters = {"owner": owner, "names": text, "oldest": oldest}
        rows = database.execute(_LOCATE, parameters).fetchall()
        return {name: StoredLocation(response_id, size) for name, response_id, size in rows}

    def _find(self, database: sqlite3.Connection, owner: str, name: str) -> StoredResponse | None:
        oldest = self._wall_clock() - self._limits.retention
        row = database.execute(_FIND, (owner, name, oldest)).fetchone()
        return None if row is None else StoredResponse(row[0], (), row[1])

    def _add(self, database: sqlite3.Connection, owner: str, response: StoredResponse) -> None:
        now, limits = self._wall_clock(), self._limits
        database.execute("DELETE FROM responses WHERE at <= ?", (now - limits.retention,))
        database.execute(
            "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?)",
            (owner, response.id, now, count_stored_bytes(response), response.body),
        )
        database.executemany(
            "INSERT OR REPLACE INTO items VALUES (?, ?, ?)",
            [(owner, item_id, response.id) for item_id in response.item_ids],
        )
        parameters = {"owner": owner, "count": limits.owner_count, "bytes": limits.owner_bytes}
        database.execute(_REMOVE_EXCESS, parameters)
