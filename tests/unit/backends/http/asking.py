"""An HTTP client for one test, and an answer's body."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from backends.http import HttpUpstream
from backends.upstream import Reading


@asynccontextmanager
async def client(
    *, idle: float = 4.0, keep: int = 64, ca: str | None = None
) -> AsyncIterator[HttpUpstream]:
    upstream = HttpUpstream(idle=idle, keep=keep, ca=ca)
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.aclose()


async def rest(reading: Reading) -> bytes:
    """The body, read to its end; the connection is given back, or cut where it breaks."""
    body = b""
    try:
        while pieces := await reading.read():
            body += b"".join(pieces)
    finally:
        reading.release()
    return body
