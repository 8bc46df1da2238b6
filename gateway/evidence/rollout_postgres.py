"""The state of rollouts in PostgreSQL, beside the usage rows of all gateways."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import asyncpg  # type: ignore[import-untyped]

from gateway.evidence.rollout_sqlite import DatabaseRolloutStore
from gateway.observability.usage import UsageSources
from gateway.observability.usage_postgres import (
    DATABASE_ERRORS,
    connect_database,
    fetch_usage,
)

_TABLE: Final = "interlingua_rollout"
_TIMEOUT: Final = 10.0
"""Seconds for one statement, with connecting."""


class PostgresRolloutStore(DatabaseRolloutStore):
    """The rollouts of one database."""

    errors = DATABASE_ERRORS

    def __init__(self, url: str) -> None:
        super().__init__(_TABLE, ("text", "float8"))
        self._url = url

    def _run(self, statement: str, *values: object) -> Sequence[Sequence[Any]]:
        # of two gateways that create the table at the same time, one fails, and the table is there
        with suppress(asyncpg.UndefinedTableError, asyncpg.UniqueViolationError):
            return asyncio.run(self._fetch(statement, values))
        return []

    async def _fetch(self, statement: str, values: Sequence[object]) -> Sequence[Sequence[Any]]:
        async with asyncio.timeout(_TIMEOUT):
            connection = await connect_database(self._url)
            try:
                return [tuple(row) for row in await connection.fetch(statement, *values)]
            finally:
                connection.terminate()

    def _query_usage(
        self, build_query: Callable[[UsageSources], str], *values: object
    ) -> Sequence[Sequence[Any]]:
        return asyncio.run(fetch_usage(self._url, build_query, *values))
