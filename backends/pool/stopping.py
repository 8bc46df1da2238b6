"""Telling workers to stop what nobody waits for any more, where closing a connection does not."""

import asyncio
import logging
from typing import Final

from backends.pool.errand import fetch
from backends.upstream import Upstream, Worker
from gateway.core.errors import GatewayError
from gateway.core.ports import WireRequest

log = logging.getLogger("interlingua")

_SECONDS: Final = 2.0
_MOST: Final = 256


class Stopping:
    """Sends requests that stop others, on connections of their own and in the background.

    Each has two seconds, and there are 256 at most at a time: a worker that takes none of them has
    at least lost the connection that its answer was for.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._http_client = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, worker: Worker, wire: WireRequest) -> None:
        """Begin to send ``wire``."""
        if len(self._tasks) >= _MOST:
            log.warning("worker %s was not told to stop: too many are being told", worker.url)
            return
        task = asyncio.get_running_loop().create_task(self._send_cancel(worker, wire))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Wait for what is being sent."""
        await asyncio.gather(*self._tasks)

    async def _send_cancel(self, worker: Worker, wire: WireRequest) -> None:
        try:
            await fetch(self._http_client, worker, wire, _SECONDS)
        except GatewayError as error:
            log.info("worker %s was not told to stop: %s", worker.url, error)
