"""A listener's own answer, by way of the admin listener: the page need ask nowhere else.

The admin's key stays here. A key of the gateway's is given as ``x-api-key``.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from gateway.admin.answers import RESPONSE_HEADERS, AdminError
from gateway.admin.ports import StatusService
from protocols.core.errors import MalformedRequest, RequestTooLarge
from protocols.core.interfaces import Headers

_ADMIN_HEADERS: Final = frozenset({"authorization", "cookie", "host", "origin", "referer"})
"""What is said to the admin listener, and not to the one that is asked."""
_HOP_BY_HOP_HEADERS: Final = frozenset({"connection", "content-length", "transfer-encoding"})


class _PlaygroundRequest:
    """A ``gateway.pipeline.http.HttpRequest``."""

    headers: Mapping[str, str]
    head = None

    def __init__(self, raw: web.Request) -> None:
        path, _, query = raw.raw_path.partition("?")
        self.method = raw.method
        self.path = "/" + path.split("/", 4)[4]
        self.query = query
        self.headers = {
            name.lower(): text
            for name, text in raw.headers.items()
            if name.lower() not in _ADMIN_HEADERS
        }
        self.peer = raw.remote or ""
        self._raw = raw

    async def body(self, limit: int) -> bytes:
        body = bytearray()
        try:
            while piece := await self._raw.content.readany():
                body += piece
                if len(body) > limit:
                    raise RequestTooLarge(f"the body is larger than {limit} bytes", limit=limit)
        except web.RequestPayloadError:
            raise MalformedRequest("the body did not arrive whole") from None
        return bytes(body)


class _PlaygroundResponseWriter:
    """A ``gateway.pipeline.http.ResponseWriter``."""

    needs_drain = True

    def __init__(self, raw: web.Request) -> None:
        self._raw = raw
        self._response = web.StreamResponse()
        self._buffer: list[bytes] = []
        self.started = False
        self._finished = False

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers)
        self.write(body)
        self.finish()

    def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self._response.set_status(status)
        for name, text in headers:
            if name.lower() not in _HOP_BY_HOP_HEADERS:
                self._response.headers[name] = text
        self._response.headers.update(RESPONSE_HEADERS)
        self._response.headers[hdrs.CONTENT_SECURITY_POLICY] = "default-src 'none'; sandbox"

    def write(self, data: bytes) -> None:
        if self._raw.method != hdrs.METH_HEAD:  # it would be the next answer's beginning
            self._buffer.append(data)

    def finish(self) -> None:
        self._finished = True

    async def drain(self) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._raw)
        data = b"".join(self._buffer)
        self._buffer.clear()
        await self._response.write(data)

    async def close(self) -> web.StreamResponse:
        """Send what is left. The connection is cut where the answer was not finished."""
        await self.drain()
        if self._finished:
            await self._response.write_eof()
        elif self._raw.transport is not None:
            self._raw.transport.abort()
        return self._response


async def serve_playground(overview: StatusService, request: web.Request) -> web.StreamResponse:
    """Answer as that listener would."""
    serve = overview.get_listener_handler(int(request.match_info["listener"]))
    if serve is None:
        raise AdminError(HTTPStatus.NOT_FOUND, "there is no such listener", "listener")
    sink = _PlaygroundResponseWriter(request)
    await serve(_PlaygroundRequest(request), sink)
    return await sink.close()
