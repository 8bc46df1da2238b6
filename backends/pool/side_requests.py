"""Short requests of the pool itself: health checks, metadata queries, cancel requests."""

import asyncio
from typing import Final

from backends.http.interfaces import HttpClient, WorkerConfig
from protocols.core.errors import DeadlineExceeded, WorkerFailed
from protocols.core.interfaces import Headers, UpstreamRequest

_MAX_RESPONSE_BYTES: Final = 1 << 20
"""The largest response that is read."""


def add_bearer(own: Headers, worker: WorkerConfig) -> Headers:
    """The headers plus the worker's API key, if it has one."""
    if worker.bearer is None:
        return own
    return (*own, ("Authorization", f"Bearer {worker.bearer}"))


async def request_worker(
    upstream: HttpClient, worker: WorkerConfig, wire: UpstreamRequest, seconds: float
) -> tuple[int, bytes]:
    """Send a request and return the status and body, all within ``seconds``.

    Raises WorkerError, and DeadlineExceeded (``first_token``).
    """
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            reading = await upstream.send(worker.url, wire, seconds, add_bearer((), worker))
            try:
                while pieces := await reading.read():
                    body += b"".join(pieces)
                    if len(body) > _MAX_RESPONSE_BYTES:
                        raise WorkerFailed(
                            f"the worker's response is larger than {_MAX_RESPONSE_BYTES} bytes"
                        )
            finally:
                reading.release()
    except TimeoutError:
        text = "the worker did not answer in time"
        raise DeadlineExceeded(text, which="first_token") from None
    return reading.status, bytes(body)
