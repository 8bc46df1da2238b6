"""Active health checks of workers, independent of requests."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from backends.http.interfaces import HttpClient
from backends.pool.settings import HealthCheckSettings
from backends.pool.side_requests import request_worker
from backends.pool.worker_metadata import ModelMetadataCache
from backends.pool.workers import WorkerState
from protocols.core.errors import DeadlineExceeded, GatewayError
from protocols.core.interfaces import UpstreamRequest

log = logging.getLogger("interlingua")

_SUCCESS_STATUSES = range(200, 300)
_JITTER = 0.1


class HealthChecker:
    """Checks each worker in a task of its own, at once and then periodically.

    After a successful check the worker's model metadata is read, if it is not cached.
    """

    def __init__(
        self,
        settings: HealthCheckSettings,
        probe: UpstreamRequest,
        client: HttpClient,
        metadata_cache: ModelMetadataCache | None,
        *,
        draw: Callable[[], float],
        on_unresponsive: Callable[[WorkerState], None],
    ) -> None:
        """``on_unresponsive`` is called for a worker that is out and answers no check at all.

        A worker that reports unhealthy, or refuses connections, may be draining and still finish
        its requests.
        """
        self._settings = settings
        path = settings.path
        self._check_request = (
            UpstreamRequest(path, b"", method="GET") if path is not None else probe
        )
        self._http_client = client
        self._metadata_cache = metadata_cache
        self._draw = draw
        self._on_worker_down = on_unresponsive
        self._tasks: dict[WorkerState, asyncio.Task[None]] = {}
        self._first_checks: dict[WorkerState, asyncio.Event] = {}
        """Set after the first check of a worker."""

    def set_workers(self, workers: Sequence[WorkerState]) -> None:
        """Replace the set of workers."""
        for worker in self._tasks.keys() - set(workers):
            self._tasks.pop(worker).cancel()
            self._first_checks.pop(worker).set()
        for worker in workers:
            if worker not in self._tasks:
                self._first_checks[worker] = asyncio.Event()
                task = asyncio.get_running_loop().create_task(self._check_periodically(worker))
                self._tasks[worker] = task

    async def wait_first_checks(self) -> None:
        """Wait for the first check of each worker."""
        for first_check in tuple(self._first_checks.values()):
            await first_check.wait()

    async def aclose(self) -> None:
        """Stop all checks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_periodically(self, worker: WorkerState) -> None:
        first_check = self._first_checks[worker]
        while True:
            try:
                await self._check_worker(worker)
            except Exception:
                log.exception("health check of worker %s raised", worker.config.url)
            first_check.set()
            factor = 1.0 - _JITTER + 2.0 * _JITTER * self._draw()
            await asyncio.sleep(self._settings.interval * factor)

    async def _check_worker(self, worker: WorkerState) -> None:
        seconds = self._settings.timeout
        status, timed_out = 0, False
        try:
            status, _ = await request_worker(
                self._http_client, worker.config, self._check_request, seconds
            )
        except GatewayError as error:
            timed_out = isinstance(error, DeadlineExceeded)
        ok = status in _SUCCESS_STATUSES
        worker.record_health_check(ok=ok)
        if worker.logged_state == "out" and timed_out:
            self._on_worker_down(worker)
        if ok and self._metadata_cache is not None:
            await self._metadata_cache.query_worker(worker)
