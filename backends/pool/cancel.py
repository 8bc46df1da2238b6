"""Cancel requests: stop generation at a worker that ignores a closed connection."""

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
    """Sends cancel requests in the background, on connections of their own.

    Each has a timeout of two seconds, and at most 256 run at a time. If one fails, the connection
    of the cancelled response is closed all the same.
    """

    def __init__(self, upstream: HttpClient) -> None:
        self._http_client = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, worker: WorkerConfig, wire: UpstreamRequest) -> None:
        """Send ``wire`` in the background."""
        if len(self._tasks) >= _MAX_CONCURRENT_CANCELS:
            log.warning("cancel request to worker %s dropped: too many are in flight", worker.url)
            return
        task = asyncio.get_running_loop().create_task(self._send_cancel(worker, wire))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Wait for the requests in flight."""
        await asyncio.gather(*self._tasks)

    async def _send_cancel(self, worker: WorkerConfig, wire: UpstreamRequest) -> None:
        try:
            await request_worker(self._http_client, worker, wire, _CANCEL_TIMEOUT)
        except GatewayError as error:
            log.info("cancel request to worker %s failed: %s", worker.url, error)
