"""Model metadata read from workers, for protocols that need it before the first request."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from backends.http.interfaces import HttpClient
from backends.interfaces import Deadline
from backends.pool.side_requests import request_worker
from backends.pool.worker_state import WorkerState
from protocols.core.errors import GatewayError
from protocols.core.interfaces import Clock, ModelMetadataReader, UpstreamRequest

_METADATA_TIMEOUT: Final = 2.0
"""Timeout of one query in seconds, and how long a request waits for its model's metadata."""
_METADATA_RETRY_DELAY: Final = 30.0
"""Seconds until metadata of a model is queried again after all queries failed."""
_MAX_CACHED_MODELS: Final = 1024
"""Limit of cached model names, since clients may send any name."""


class ModelMetadataCache:
    """Queries model metadata and remembers for which models it was read.

    The protocol's adapter stores the metadata itself; the concurrency that a worker announces is
    stored in its WorkerState.
    """

    def __init__(
        self,
        adapter: ModelMetadataReader,
        models: Sequence[str],
        client: HttpClient,
        clock: Clock,
    ) -> None:
        self._adapter = adapter
        self._models = models
        self._http_client = client
        self._clock = clock
        self._valid_until: dict[str, float] = {}
        """Until when the metadata of a model need not be queried, by the clock."""
        self._running_queries: dict[str, asyncio.Task[None]] = {}

    async def query_worker(self, worker: WorkerState) -> None:
        """Query the metadata of all configured models from an available worker."""
        for model in self._models:
            if model not in worker.model_limits_from:
                await self._query_worker_model(worker, model)

    def has_metadata(self, model: str) -> bool:
        """Whether the metadata of ``model`` is cached."""
        until = self._valid_until.get(model)
        return until is not None and self._clock() < until

    async def load_metadata(
        self, model: str, workers: Sequence[WorkerState], deadline: Deadline
    ) -> None:
        """Query the metadata of ``model`` from the first of ``workers``, or else the second.

        Returns when the metadata is read or the query timed out. Raises DeadlineExceeded.
        """
        if not workers or self.has_metadata(model):
            return
        seconds = deadline.remaining(_METADATA_TIMEOUT)
        task = self._running_queries.get(model)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._query_model(model, workers[:2]))
            self._running_queries[model] = task
            task.add_done_callback(lambda _: self._running_queries.pop(model))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(task)

    async def aclose(self) -> None:
        """Cancel running queries."""
        tasks = list(self._running_queries.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _query_model(self, model: str, workers: Sequence[WorkerState]) -> None:
        for worker in workers:
            if await self._query_worker_model(worker, model):
                return
        self._store_expiry(model, self._clock() + _METADATA_RETRY_DELAY)

    async def _query_worker_model(self, worker: WorkerState, model: str) -> bool:
        """Returns whether the worker answered any query, or none was needed."""
        bodies: list[bytes | None] = []
        answered = False
        for request in (requests := self._adapter.metadata_requests(model)):
            status, body = await self._send_query(worker, request)
            answered = answered or status is not None
            bodies.append(body)
        if requests and not answered:
            return False
        limit = self._adapter.load_metadata(model, bodies)
        worker.model_limits_from.add(model)
        worker.model_limits.pop(model, None)
        if limit is not None:
            worker.model_limits[model] = max(limit, 1)
        self._store_expiry(model, float("inf"))
        return True

    async def _send_query(
        self, worker: WorkerState, request: UpstreamRequest
    ) -> tuple[int | None, bytes | None]:
        try:
            status, body = await request_worker(
                self._http_client, worker.config, request, _METADATA_TIMEOUT
            )
        except GatewayError:
            return None, None
        return status, body if status == 200 else None  # noqa: PLR2004 - HTTP OK

    def _store_expiry(self, model: str, until: float) -> None:
        if len(self._valid_until) >= _MAX_CACHED_MODELS and model not in self._valid_until:
            del self._valid_until[next(iter(self._valid_until))]
        self._valid_until[model] = until
