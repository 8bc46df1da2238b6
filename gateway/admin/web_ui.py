"""The web UI: its files, and the requests that its playground sends to a listener.

The files contain no data of the gateway, so they need no key. A playground request goes through the
handler of the listener in this process, without a connection, and its response is streamed.

What must never happen:

- The admin key in a request to a model: the admin's headers are not forwarded, and a client's key
  is sent as ``x-api-key``.
- A response of a model that the browser takes for a page of the gateway: it is sandboxed.
"""

from collections.abc import Mapping
from http import HTTPStatus
from importlib import resources
from typing import Final

from aiohttp import hdrs, web

from gateway.admin.application_listener import BodyReader
from gateway.admin.http import CONNECTION_LIMITS, RESPONSE_HEADERS, AdminError
from gateway.admin.services import StatusService
from gateway.memory import MemoryBudget
from protocols.core.interfaces import Headers

_UI_PATH: Final = "/-/ui/"
_UI_FILES: Final = resources.files("gateway.admin") / "static"
_CONTENT_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No external resources, no inline scripts, and no text is parsed as HTML."""
_ADMIN_HEADERS: Final = frozenset({"authorization", "cookie", "host", "origin", "referer"})
"""Request headers that are not forwarded to the listener."""
_HOP_BY_HOP_HEADERS: Final = frozenset({"connection", "content-length", "transfer-encoding"})
_BODY_BUDGET: Final = MemoryBudget(16 << 20)
"""For the bodies of playground requests."""


async def redirect_to_ui(request: web.Request) -> web.Response:
    """Redirect to the web UI."""
    del request
    return web.Response(status=HTTPStatus.FOUND, headers={hdrs.LOCATION: _UI_PATH})


async def serve_ui_file(request: web.Request) -> web.Response:
    """Serve a file of the web UI."""
    name = request.match_info["file"] or "index.html"
    file = {entry.name: entry for entry in _UI_FILES.iterdir()}.get(name)
    content_type = _CONTENT_TYPES.get(name.rpartition(".")[2])
    if file is None or content_type is None:
        raise AdminError(HTTPStatus.NOT_FOUND, "there is no such path")
    headers = {
        hdrs.CONTENT_TYPE: content_type,
        hdrs.CONTENT_SECURITY_POLICY: _CONTENT_SECURITY_POLICY,
        "Referrer-Policy": "no-referrer",
    }
    return web.Response(body=file.read_bytes(), headers=headers)


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
            name.lower(): value
            for name, value in raw.headers.items()
            if name.lower() not in _ADMIN_HEADERS
        }
        self.peer = raw.remote or ""
        self._raw = raw
        self._reader = BodyReader(CONNECTION_LIMITS, _BODY_BUDGET)

    async def body(self, limit: int) -> bytes:
        return await self._reader.read(self._raw, limit)

    def reserve_memory(self, size: int) -> None:
        self._reader.reserve_memory(size)

    def reserve_response(self, size: int) -> None:
        self._reader.reserve_response(size)

    def release_memory(self) -> None:
        """Give the budget of bodies back what the request took of it."""
        self._reader.release()


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
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP_HEADERS:
                self._response.headers[name] = value
        self._response.headers.update(RESPONSE_HEADERS)
        self._response.headers[hdrs.CONTENT_SECURITY_POLICY] = "default-src 'none'; sandbox"

    def write(self, data: bytes) -> None:
        if self._raw.method != hdrs.METH_HEAD:  # a response to HEAD has no body
            self._buffer.append(data)

    def flush(self) -> None:
        """What bridges a silence is sent with the next events: the page waits for those."""

    def finish(self) -> None:
        self._finished = True

    async def drain(self) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._raw)
        data = b"".join(self._buffer)
        self._buffer.clear()
        await self._response.write(data)

    async def close(self) -> web.StreamResponse:
        """Send the rest; abort the connection if the response is not finished."""
        await self.drain()
        if self._finished:
            await self._response.write_eof()
        elif self._raw.transport is not None:
            self._raw.transport.abort()
        return self._response


async def serve_playground(
    status_service: StatusService, request: web.Request
) -> web.StreamResponse:
    """Forward the request to a listener's handler."""
    handle_request = status_service.get_listener_handler(int(request.match_info["listener"]))
    if handle_request is None:
        raise AdminError(HTTPStatus.NOT_FOUND, "there is no such listener", "listener")
    writer = _PlaygroundResponseWriter(request)
    http_request = _PlaygroundRequest(request)
    try:
        await handle_request(http_request, writer)
        return await writer.close()
    finally:
        http_request.release_memory()
