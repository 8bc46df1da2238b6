"""The state of rollouts in the database of the usage rows; here: in a file of SQLite."""

import math
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gateway.config.schema import RolloutConfig
from gateway.evidence.rollout import RolloutState, StepSamples
from gateway.evidence.rollout_gateways import GatewaySettings
from gateway.evidence.rollout_samples import read_samples
from gateway.observability.usage import (
    UsageSources,
    bind_sqlite,
    create_private_file,
    open_sqlite_usage,
)
from protocols.core.json_text import decode_json

_TIMEOUT: Final = 5.0
"""Seconds to wait for another writer."""


_KEY: Final = "model = $1 AND plan = $2"


class DatabaseRolloutStore(ABC):
    """A ``RolloutStore`` in the database of the usage rows."""

    def __init__(self, table: str, types: tuple[str, str]) -> None:
        """``types`` are the database's names of texts and of floating-point numbers."""
        text, number = types
        self._create = (
            f"CREATE TABLE IF NOT EXISTS {table} (model {text} NOT NULL, plan {text} NOT NULL, "
            f"state {text} NOT NULL, owner {text} NOT NULL, leased_until {number} NOT NULL, "
            "PRIMARY KEY (model, plan))"
        )
        self._select = f"SELECT state FROM {table} WHERE {_KEY}"  # noqa: S608 - names of ours
        self._insert = (
            f"INSERT INTO {table} VALUES ($1, $2, $3, '', 0) ON CONFLICT DO NOTHING RETURNING 1"  # noqa: S608 - as above
        )
        self._lease = (
            f"UPDATE {table} SET owner = $3, leased_until = $5 "  # noqa: S608 - as above
            f"WHERE {_KEY} AND (owner = $3 OR leased_until <= $4 OR leased_until - $5 + $4 > $5) "
            "RETURNING 1"
        )
        self._create_gateways = (
            f"CREATE TABLE IF NOT EXISTS {table}_gateway (model {text} NOT NULL, "
            f"owner {text} NOT NULL, settings {text} NOT NULL, PRIMARY KEY (model, owner))"
        )
        self._list_gateways = f"SELECT owner, settings FROM {table}_gateway WHERE model = $1"  # noqa: S608 - as above
        self._put_gateway = (
            f"INSERT INTO {table}_gateway VALUES ($1, $2, $3) "  # noqa: S608 - as above
            "ON CONFLICT (model, owner) DO UPDATE SET settings = excluded.settings RETURNING 1"
        )
        self._remove_gateway = f"DELETE FROM {table}_gateway WHERE model = $1 AND owner = $2"  # noqa: S608 - as above
        self._replace = f"UPDATE {table} SET state = $3 WHERE {_KEY} AND state = $4 RETURNING 1"  # noqa: S608 - as above

    @abstractmethod
    def _run(self, statement: str, *values: object) -> Sequence[Sequence[Any]]:
        """The rows of one statement with parameters ``$1`` and so on; none without its table."""

    @abstractmethod
    def _query_usage(
        self, build_query: Callable[[UsageSources], str], *values: object
    ) -> Sequence[Sequence[Any]]:
        """The result of a query on the usage rows, whatever version made their table."""

    def load(
        self,
        model: str,
        plan: str,
        now: float,
        step: int = 0,
        last_read: RolloutState | None = None,
    ) -> RolloutState:
        """See ``RolloutStore``."""
        if (state := self.read(model, plan)) is not None:
            return state
        state = last_read or RolloutState(step=step, step_at=now)
        self._run(self._create)
        self._run(self._insert, model, plan, encode_state(state))
        return self.read(model, plan) or state

    def read(self, model: str, plan: str) -> RolloutState | None:
        """See ``RolloutStore``."""
        rows = self._run(self._select, model, plan)
        return decode_state(rows[0][0]) if rows else None

    def take_lease(self, model: str, plan: str, owner: str, now: float, seconds: float) -> bool:
        """See ``RolloutStore``. A lease that is too long is from before a clock went back."""
        return bool(self._run(self._lease, model, plan, owner, now, now + seconds))

    def save(self, model: str, plan: str, before: RolloutState, after: RolloutState) -> bool:
        """See ``RolloutStore``."""
        return bool(
            self._run(self._replace, model, plan, encode_state(after), encode_state(before))
        )

    def read_samples(
        self, rollout: RolloutConfig, model: str, split: str, state: RolloutState
    ) -> StepSamples:
        """See ``RolloutStore``."""
        return read_samples(
            self._query_usage, rollout, model, split, state.step_at, is_shadow=state.is_shadow
        )

    def publish_samples(
        self, rollout: RolloutConfig, model: str, split: str, state: RolloutState
    ) -> None:
        """See ``RolloutStore``: the database has them."""
        del rollout, model, split, state

    def list_gateways(self, model: str) -> dict[str, GatewaySettings]:
        """See ``RolloutStore``."""
        return {
            owner: decode_json(text, kind=GatewaySettings)
            for owner, text in self._run(self._list_gateways, model)
        }

    def put_gateway(self, model: str, owner: str, settings: GatewaySettings) -> None:
        """See ``RolloutStore``."""
        values = model, owner, msgspec.json.encode(settings).decode()
        if not self._run(self._put_gateway, *values):
            self._run(self._create_gateways)
            self._run(self._put_gateway, *values)

    def remove_gateway(self, model: str, owner: str) -> None:
        """See ``RolloutStore``."""
        self._run(self._remove_gateway, model, owner)

    def close(self) -> None:
        """See ``RolloutStore``: each statement has a connection of its own."""
        return


class SqliteRolloutStore(DatabaseRolloutStore):
    """The rollouts of one SQLite file."""

    errors = (sqlite3.Error, OSError)

    def __init__(self, path: str) -> None:
        super().__init__("rollout_plan", ("TEXT", "REAL"))
        self.path = path

    def _run(self, statement: str, *values: object) -> Sequence[Sequence[Any]]:
        is_reading = statement.startswith("SELECT")
        if is_reading and not Path(self.path).exists():
            return []
        if not is_reading:
            create_private_file(self.path)
        uri = f"{Path(self.path).absolute().as_uri()}?mode={'ro' if is_reading else 'rw'}"
        with closing(
            sqlite3.connect(uri, uri=True, timeout=_TIMEOUT, isolation_level=None)
        ) as file:
            try:
                return file.execute(*bind_sqlite(statement, *values)).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" not in str(error):
                    raise
                return []

    def _query_usage(
        self, build_query: Callable[[UsageSources], str], *values: object
    ) -> Sequence[Sequence[Any]]:
        with open_sqlite_usage(self.path) as (file, sources):
            return query_sqlite(file, build_query(sources), *values)

    def find_id(self) -> str | None:
        """The name of this file; None if no process has named it. Nothing is written."""
        rows = self._run("SELECT id FROM rollout_file")
        return str(rows[0][0]) if rows else None

    def create_id(self) -> str:
        """Names this file, in all processes that use it."""
        self._run("CREATE TABLE IF NOT EXISTS rollout_file (n INTEGER PRIMARY KEY, id TEXT)")
        self._run("INSERT INTO rollout_file VALUES (1, $1) ON CONFLICT DO NOTHING", token_hex(16))
        return str(self._run("SELECT id FROM rollout_file")[0][0])


def query_sqlite(file: sqlite3.Connection, query: str, *values: object) -> list[Any]:
    """The rows of a query with ``ln`` and ``floor``, which SQLite need not be built with."""
    file.create_function("ln", 1, math.log, deterministic=True)
    file.create_function("floor", 1, math.floor, deterministic=True)
    return file.execute(*bind_sqlite(query, *values)).fetchall()


def decode_state(text: str | bytes) -> RolloutState:
    """Read a state. Raises msgspec.DecodeError."""
    return decode_json(text, kind=RolloutState)


def encode_state(state: RolloutState) -> str:
    """The state as it is stored: equal states are equal texts."""
    return msgspec.json.encode(replace(state, step_at=float(state.step_at))).decode()
