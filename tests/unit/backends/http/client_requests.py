"""An HTTP client for one test, and an answer's body."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from backends.http.client import AsyncioHttpClient
from backends.http.interfaces import UpstreamResponse


@asynccontextmanager
async def open_client(
    *, idle: float = 4.0, keep: int = 64, ca: str | None = None
) -> AsyncIterator[AsyncioHttpClient]:
    upstream = AsyncioHttpClient(idle_timeout=idle, max_idle=keep, ca=ca)
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.aclose()


async def read_body(reading: UpstreamResponse) -> bytes:
    """The body, read to its end; the connection is given back, or cut where it breaks."""
    body = b""
    try:
        while pieces := await reading.read():
            body += b"".join(pieces)
    finally:
        reading.release()
    return body
