"""Asking workers whether they are well, whether or not there are requests for them."""

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
    """Probes each worker by itself, at once and then again and again.

    A worker that is found well, for the first time or after it was not, is asked about its models.
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
        """``lost`` is told of each worker that its probes keep out, and which answers none.

        One that answers that it is not well may be leaving, and finishes what it has; so may one
        that takes no more connections.
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
        """Set when a worker was probed for the first time."""

    def set_workers(self, members: Sequence[WorkerState]) -> None:
        """These are the workers from now on."""
        for member in self._tasks.keys() - set(members):
            self._tasks.pop(member).cancel()
            self._first_checks.pop(member).set()
        for member in members:
            if member not in self._tasks:
                self._first_checks[member] = asyncio.Event()
                task = asyncio.get_running_loop().create_task(self._check_periodically(member))
                self._tasks[member] = task

    async def wait_first_checks(self) -> None:
        """Wait until each of the workers was probed."""
        for one in tuple(self._first_checks.values()):
            await one.wait()

    async def aclose(self) -> None:
        """Probe no more."""
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
                log.exception("probing worker %s failed", member.config.url)
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
