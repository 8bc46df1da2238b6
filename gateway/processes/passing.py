"""A request to one process's admin listener, and its answer, a piece at a time."""

from collections.abc import Mapping
from typing import Final

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict

_HOP_BY_HOP_HEADERS: Final = (
    hdrs.CONNECTION,
    hdrs.CONTENT_LENGTH,
    hdrs.TRANSFER_ENCODING,
    hdrs.KEEP_ALIVE,
    hdrs.EXPECT,
)
"""What belongs to one connection."""
_CLIENT_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, connect=10.0)


async def proxy_request(request: web.Request, path: str) -> web.StreamResponse | None:
    """Ask the listener at this Unix socket; None where it does not answer.

    The answer ends as that one does: whole, or cut.
    """
    url = request.url.with_scheme("http").with_host("localhost").with_port(None)
    answer = web.StreamResponse()
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path),
                timeout=_CLIENT_TIMEOUT,
                auto_decompress=False,
            ) as session,
            session.request(
                request.method,
                url,
                headers=_filter_headers(request.headers),
                data=request.content if request.body_exists else None,
                allow_redirects=False,
            ) as said,
        ):
            answer.set_status(said.status)
            answer.headers.update(_filter_headers(said.headers))
            await answer.prepare(request)
            async for piece in said.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
    except (aiohttp.ClientError, TimeoutError):
        if not answer.prepared:
            return None
        if request.transport is not None:
            request.transport.abort()
    return answer


def _filter_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    kept = CIMultiDict(headers)
    for name in _HOP_BY_HOP_HEADERS:
        kept.popall(name, None)
    return kept
