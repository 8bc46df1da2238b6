"""Short requests of the pool itself: health checks, metadata queries, cancel requests."""

import asyncio
import logging
from typing import Final

from backends.http.interfaces import HttpClient, WorkerConfig
from protocols.core.errors import DeadlineExceeded, GatewayError, WorkerFailed
from protocols.core.interfaces import Headers, UpstreamRequest

log = logging.getLogger("interlingua")

_MAX_RESPONSE_BYTES: Final = 1 << 20
"""The largest response that is read."""
_CANCEL_TIMEOUT: Final = 2.0
_MAX_CONCURRENT_CANCELS: Final = 256


async def request_worker(
    client: HttpClient, worker: WorkerConfig, request: UpstreamRequest, seconds: float
) -> tuple[int, bytes]:
    """Send a request and return the status and body, all within ``seconds``.

    Raises WorkerUnreachable, StreamBroken, WorkerFailed, and DeadlineExceeded (``first_token``).
    """
    body = bytearray()
    if worker.credentials is None:
        headers: Headers = ()
    else:
        request, headers = worker.credentials.authorize(request, ())
    try:
        async with asyncio.timeout(seconds):
            response = await client.send(worker.url, request, seconds, headers)
            try:
                while chunks := await response.read():
                    body += b"".join(chunks)
                    if len(body) > _MAX_RESPONSE_BYTES:
                        raise WorkerFailed(
                            f"the worker's response is larger than {_MAX_RESPONSE_BYTES} bytes"
                        )
            finally:
                response.release()
    except TimeoutError:
        message = "the worker did not answer in time"
        raise DeadlineExceeded(message, which="first_token") from None
    return response.status, bytes(body)


class CancelSender:
    """Sends cancel requests in the background, on connections of their own.

    Each has a timeout of two seconds, and at most 256 run at a time. If one fails, the connection
    of the cancelled response is closed all the same.
    """

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, worker: WorkerConfig, request: UpstreamRequest) -> None:
        """Send ``request`` in the background."""
        if len(self._tasks) >= _MAX_CONCURRENT_CANCELS:
            log.warning("cancel request to worker %s dropped: too many are in flight", worker.url)
            return
        task = asyncio.get_running_loop().create_task(self._send_cancel(worker, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Wait for the requests in flight."""
        await asyncio.gather(*self._tasks)

    async def _send_cancel(self, worker: WorkerConfig, request: UpstreamRequest) -> None:
        try:
            await request_worker(self._client, worker, request, _CANCEL_TIMEOUT)
        except GatewayError as error:
            log.info("cancel request to worker %s failed: %s", worker.url, error)
