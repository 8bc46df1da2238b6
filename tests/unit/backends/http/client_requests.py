"""An HTTP client for one test, and a response's body."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from backends.http.client import AsyncioHttpClient
from backends.http.interfaces import DEFAULT_MAX_HEAD, UpstreamResponse


@asynccontextmanager
async def open_client(
    *,
    idle: float = 4.0,
    keep: int = 64,
    ca: str | None = None,
    max_response_head: int = DEFAULT_MAX_HEAD,
) -> AsyncIterator[AsyncioHttpClient]:
    upstream = AsyncioHttpClient(
        idle_timeout=idle, max_idle=keep, ca=ca, max_response_head=max_response_head
    )
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.aclose()


async def read_body(reading: UpstreamResponse) -> bytes:
    """Read the body to its end; the connection is returned to the pool, or closed on an error."""
    body = bytearray()
    try:
        while pieces := await reading.read():
            for piece in pieces:
                body += piece
    finally:
        reading.release()
    return bytes(body)
