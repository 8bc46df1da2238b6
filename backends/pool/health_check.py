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
        upstream: HttpClient,
        learner: ModelMetadataCache | None,
        *,
        draw: Callable[[], float],
        lost: Callable[[WorkerState], None],
    ) -> None:
        """``lost`` is called for each worker that is out and does not answer checks at all.

        A worker that reports unhealthy, or refuses connections, may be draining and still finish
        its requests.
        """
        self._settings = settings
        path = settings.path
        self._check_request = (
            UpstreamRequest(path, b"", method="GET") if path is not None else probe
        )
        self._http_client = upstream
        self._metadata_cache = learner
        self._draw = draw
        self._on_worker_down = lost
        self._tasks: dict[WorkerState, asyncio.Task[None]] = {}
        self._first_checks: dict[WorkerState, asyncio.Event] = {}
        """Set after the first check of a worker."""

    def set_workers(self, members: Sequence[WorkerState]) -> None:
        """Replace the set of workers."""
        for member in self._tasks.keys() - set(members):
            self._tasks.pop(member).cancel()
            self._first_checks.pop(member).set()
        for member in members:
            if member not in self._tasks:
                self._first_checks[member] = asyncio.Event()
                task = asyncio.get_running_loop().create_task(self._check_periodically(member))
                self._tasks[member] = task

    async def wait_first_checks(self) -> None:
        """Wait for the first check of each worker."""
        for one in tuple(self._first_checks.values()):
            await one.wait()

    async def aclose(self) -> None:
        """Stop all checks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_periodically(self, member: WorkerState) -> None:
        looked = self._first_checks[member]
        while True:
            try:
                await self._check_worker(member)
            except Exception:
                log.exception("health check of worker %s raised", member.config.url)
            looked.set()
            apart = 1.0 - _JITTER + 2.0 * _JITTER * self._draw()
            await asyncio.sleep(self._settings.interval * apart)

    async def _check_worker(self, member: WorkerState) -> None:
        seconds = self._settings.timeout
        status, silent = 0, False
        try:
            status, _ = await request_worker(
                self._http_client, member.config, self._check_request, seconds
            )
        except GatewayError as error:
            silent = isinstance(error, DeadlineExceeded)
        ok = status in _SUCCESS_STATUSES
        member.record_health_check(ok=ok)
        if member.logged_state == "out" and silent:
            self._on_worker_down(member)
        if ok and self._metadata_cache is not None:
            await self._metadata_cache.query_worker(member)
