"""Asking workers about models, for dialects that have to know before they send a request."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from backends.http.interfaces import HttpClient
from backends.interfaces import Deadline
from backends.pool.side_requests import request_worker
from backends.pool.workers import WorkerState
from protocols.core.errors import GatewayError
from protocols.core.interfaces import Clock, ModelMetadataReader, UpstreamRequest

_METADATA_TIMEOUT: Final = 2.0
"""How long one question may take, and how long a request waits for what is asked for its sake."""
_METADATA_RETRY_DELAY: Final = 30.0
"""How long a model is not asked about again when nobody knew of it."""
_MAX_CACHED_MODELS: Final = 1024
"""Names of models that are kept in mind: where any name is taken, clients make them up."""


class ModelMetadataCache:
    """Knows which models the workers were asked about.

    What the dialect makes of the answers is its own; only how many requests a worker takes at a
    time is kept here, in its Member.
    """

    def __init__(
        self,
        dialect: ModelMetadataReader,
        models: Sequence[str],
        upstream: HttpClient,
        clock: Clock,
    ) -> None:
        self._adapter = dialect
        self._models = models
        self._http_client = upstream
        self._clock = clock
        self._valid_until: dict[str, float] = {}
        """The models that need not be asked about before that moment."""
        self._running_queries: dict[str, asyncio.Task[None]] = {}

    async def query_worker(self, member: WorkerState) -> None:
        """Ask a worker that is there about every model of the pool."""
        for model in self._models:
            if model not in member.model_limits_from:
                await self._query_worker_model(member, model)

    def has_metadata(self, model: str) -> bool:
        """Whether ``model`` need not be asked about now."""
        until = self._valid_until.get(model)
        return until is not None and self._clock() < until

    async def load_metadata(
        self, model: str, members: Sequence[WorkerState], deadline: Deadline
    ) -> None:
        """Ask about ``model``, if nobody has yet: the first of ``members``, or else the second.

        Returns when that is known, or when it has taken too long. Raises DeadlineExceeded.
        """
        if not members or self.has_metadata(model):
            return
        seconds = deadline.remaining(_METADATA_TIMEOUT)
        task = self._running_queries.get(model)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._query_model(model, members[:2]))
            self._running_queries[model] = task
            task.add_done_callback(lambda _: self._running_queries.pop(model))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(task)

    async def aclose(self) -> None:
        """Ask no more."""
        tasks = list(self._running_queries.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _query_model(self, model: str, members: Sequence[WorkerState]) -> None:
        for member in members:
            if await self._query_worker_model(member, model):
                return
        self._store_expiry(model, self._clock() + _METADATA_RETRY_DELAY)

    async def _query_worker_model(self, member: WorkerState, model: str) -> bool:
        """Whether the worker answered any of the questions, or there were none."""
        answers: list[bytes | None] = []
        answered = False
        for question in (questions := self._adapter.metadata_requests(model)):
            status, body = await self._send_query(member, question)
            answered = answered or status is not None
            answers.append(body)
        if questions and not answered:
            return False
        told = self._adapter.load_metadata(model, answers)
        member.model_limits_from.add(model)
        member.model_limits.pop(model, None)
        if told is not None:
            member.model_limits[model] = max(told, 1)
        self._store_expiry(model, float("inf"))
        return True

    async def _send_query(
        self, member: WorkerState, question: UpstreamRequest
    ) -> tuple[int | None, bytes | None]:
        try:
            status, body = await request_worker(
                self._http_client, member.config, question, _METADATA_TIMEOUT
            )
        except GatewayError:
            return None, None
        return status, body if status == 200 else None  # noqa: PLR2004 - HTTP's word for yes

    def _store_expiry(self, model: str, until: float) -> None:
        if len(self._valid_until) >= _MAX_CACHED_MODELS and model not in self._valid_until:
            del self._valid_until[next(iter(self._valid_until))]
        self._valid_until[model] = until
