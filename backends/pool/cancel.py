"""Telling workers to stop what nobody waits for any more, where closing a connection does not."""

import asyncio
import logging
from typing import Final

from backends.http.interfaces import HttpClient, WorkerConfig
from backends.pool.side_requests import request_worker
from protocols.core.errors import GatewayError
from protocols.core.interfaces import UpstreamRequest

log = logging.getLogger("interlingua")

_CANCEL_TIMEOUT: Final = 2.0
_MAX_CONCURRENT_CANCELS: Final = 256


class CancelSender:
    """Sends requests that stop others, on connections of their own and in the background.

    Each has two seconds, and there are 256 at most at a time: a worker that takes none of them has
    at least lost the connection that its answer was for.
    """

    def __init__(self, upstream: HttpClient) -> None:
        self._http_client = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, worker: WorkerConfig, wire: UpstreamRequest) -> None:
        """Begin to send ``wire``."""
        if len(self._tasks) >= _MAX_CONCURRENT_CANCELS:
            log.warning("worker %s was not told to stop: too many are being told", worker.url)
            return
        task = asyncio.get_running_loop().create_task(self._send_cancel(worker, wire))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Wait for what is being sent."""
        await asyncio.gather(*self._tasks)

    async def _send_cancel(self, worker: WorkerConfig, wire: UpstreamRequest) -> None:
        try:
            await request_worker(self._http_client, worker, wire, _CANCEL_TIMEOUT)
        except GatewayError as error:
            log.info("worker %s was not told to stop: %s", worker.url, error)
