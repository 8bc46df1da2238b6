"""Active health checks of workers, independent of requests."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus

from backends.http.interfaces import HttpClient
from backends.pool.settings import HealthCheckSettings
from backends.pool.side_requests import request_worker
from backends.pool.worker_metadata import ModelMetadataCache
from backends.pool.worker_state import WorkerState
from protocols.core.errors import DeadlineExceeded, GatewayError
from protocols.core.interfaces import UpstreamRequest

log = logging.getLogger("interlingua")

_SUCCESS_STATUSES = range(200, 300)
_JITTER = 0.1
_ADMIN_LISTENER = b"this is the admin listener"
"""In the error of a gateway's admin listener (``gateway.admin.api``) for paths of models."""


class HealthChecker:
    """Checks each worker in a task of its own, at once and then periodically.

    After a successful check the worker's model metadata is read, if it is not cached. If a worker
    has no such path as the protocol's, the log names the protocols whose paths it has.
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
        build_health_requests: Callable[[], Mapping[str, UpstreamRequest]],
    ) -> None:
        """``on_unresponsive`` is called for a worker that is out and answers no check at all.

        A worker that reports unhealthy, or refuses connections, may be draining and still finish
        its requests. ``build_health_requests`` builds those of all protocols.
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
        self._build_health_requests = build_health_requests
        self._tasks: dict[WorkerState, asyncio.Task[None]] = {}
        self._first_checks: dict[WorkerState, asyncio.Event] = {}
        """Set after the first check of a worker."""

    def __repr__(self) -> str:
        return f"<HealthChecker {len(self._tasks)} workers>"

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
        first_check, status = self._first_checks[worker], 0
        while True:
            try:
                previous = status
                status, body = await self._check_worker(worker)
                if status == HTTPStatus.NOT_FOUND != previous:
                    await self._log_wrong_url(worker, body)
            except Exception:
                log.exception("health check of worker %s raised", worker.config.url)
            first_check.set()
            factor = 1.0 - _JITTER + 2.0 * _JITTER * self._draw()
            await asyncio.sleep(self._settings.interval * factor)

    async def _check_worker(self, worker: WorkerState) -> tuple[int, bytes]:
        """Check once and return the status, 0 without a response, and the body."""
        status, body, timed_out = 0, b"", False
        try:
            status, body = await self._send_request(worker, self._check_request)
        except GatewayError as error:
            timed_out = isinstance(error, DeadlineExceeded)
        ok = status in _SUCCESS_STATUSES
        worker.record_health_check(ok=ok)
        if worker.logged_state == "out" and timed_out:
            self._on_worker_down(worker)
        if ok and self._metadata_cache is not None:
            await self._metadata_cache.query_worker(worker)
        return status, body

    async def _send_request(
        self, worker: WorkerState, request: UpstreamRequest
    ) -> tuple[int, bytes]:
        """The status of the response, and its body. Raises GatewayError."""
        return await request_worker(
            self._http_client, worker.config, request, self._settings.timeout
        )

    async def _is_answered(self, worker: WorkerState, request: UpstreamRequest) -> bool:
        try:
            status, _ = await self._send_request(worker, request)
        except GatewayError:
            return False
        return status in _SUCCESS_STATUSES

    async def _log_wrong_url(self, worker: WorkerState, body: bytes) -> None:
        """Log what a worker is that does not have the path of the check: its response is 404."""
        if _ADMIN_LISTENER in body:
            log.warning(
                "worker %s is the admin listener of a gateway: set the URL of the pool's worker to "
                "a listener of models",
                worker.config.url,
            )
        else:
            await self._log_spoken_protocols(worker)

    async def _log_spoken_protocols(self, worker: WorkerState) -> None:
        """Log which protocols a worker may speak that does not have the path of the check."""
        missing = self._check_request.path
        requests: dict[str, UpstreamRequest] = {}
        names: dict[str, list[str]] = {}
        for name, request in self._build_health_requests().items():
            if request.path != missing:
                requests.setdefault(request.path, request)
                names.setdefault(request.path, []).append(name)
        answers = await asyncio.gather(
            *(self._is_answered(worker, request) for request in requests.values())
        )
        spoken = [
            f"GET {path} (protocol: {' or '.join(names[path])})"
            for path, is_answered in zip(requests, answers, strict=True)
            if is_answered
        ]
        if spoken:
            log.warning(
                "worker %s has no GET %s, but it answers %s: set the protocol of its pool",
                worker.config.url,
                missing,
                ", ".join(spoken),
            )
