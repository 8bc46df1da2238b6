"""The aiohttp HTTP server: aiohttp's low-level server, without applications and routes."""

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from aiohttp import HttpVersion11, StreamReader, hdrs, web

from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.connection import LINGER_TIMEOUT, HandleRequest
from gateway.http_server.listener import Listener
from gateway.http_server.overload import (
    BodyBudget,
    ConnectionTracker,
    build_body_overload,
    get_peer_address,
    is_body_overdue,
)
from gateway.http_server.parser import HTTP2_MESSAGE
from gateway.http_server.sockets import ListenSockets
from protocols.core.errors import MalformedRequest, RequestTooLarge
from protocols.core.interfaces import Headers

_SHUTDOWN_TIMEOUT: Final = 0.1
"""Seconds for responses to end after the shutdown has begun."""
_APPLICATION_SHUTDOWN_TIMEOUT: Final = 1.0
_SINGLE_HEADERS: Final = (hdrs.HOST, hdrs.AUTHORIZATION)
"""Headers of which other software may read another one if there are several."""
_SERVER_NAME: Final = "interlingua"
_HTTP2_PAUSE: Final = "Pause on PRI/Upgrade"
"""What aiohttp's parser, llhttp, says of the first line of HTTP/2."""

AiohttpHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _AiohttpRequest:
    """An ``HttpRequest``."""

    head = None
    __slots__ = ("_body", "_raw", "headers", "method", "path", "peer", "query")

    def __init__(self, raw: web.BaseRequest, body: "BodyReader") -> None:
        self._raw = raw
        self._body = body
        self.method = raw.method
        path, _, query = raw.raw_path.partition("?")
        self.path = path
        self.query = query
        self.headers: Mapping[str, str] = raw.headers
        connection = raw.protocol
        assert isinstance(connection, AiohttpConnection)  # noqa: S101 - see ``LimitedServer``
        self.peer = connection.peer

    async def body(self, limit: int) -> bytes:
        return await self._body.read(self._raw, limit)

    async def peek_body(self, size: int) -> tuple[bytes, bool]:
        return await self._body.peek(self._raw, size)

    async def read_body_piece(self) -> bytes:
        return await self._body.read_next(self._raw)

    def reserve_memory(self, size: int) -> None:
        self._body.reserve_memory(size)


class BodyReader:
    """Reads a request body within the limits of its time and memory."""

    __slots__ = ("_budget", "_limits", "_peeked", "_size")

    def __init__(self, limits: ServerLimitsConfig, budget: BodyBudget) -> None:
        self._limits = limits
        self._budget = budget
        self._size = 0
        """Bytes received, taken of the budget."""
        self._peeked = bytearray()
        """Bytes received and not yet read, of a body that is read in pieces."""

    async def read(self, raw: web.BaseRequest, limit: int) -> bytes:
        """The body. Raises RequestTooLarge, Overloaded, or MalformedRequest if it is incomplete."""
        declared = raw.content_length or 0
        if declared > limit:
            raise _build_too_large(limit)
        if not self._budget.has_room(declared):
            raise build_body_overload()
        buffer = bytearray()
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            while piece := await self._read_piece(raw.content):
                buffer += piece
                self._count(len(piece), limit)
                if is_body_overdue(self._limits, loop.time() - started, len(buffer)):
                    raise TimeoutError
        except (web.RequestPayloadError, TimeoutError):
            raise MalformedRequest("the body did not arrive whole") from None
        return bytes(buffer)

    async def peek(self, raw: web.BaseRequest, size: int) -> tuple[bytes, bool]:
        """See ``gateway.pipeline.http.StreamedHttpRequest``."""
        is_complete = False
        while len(self._peeked) <= size and not is_complete:
            piece = await self._read_whole_piece(raw)
            self._count(len(piece), sys.maxsize)
            self._peeked += piece
            is_complete = not piece
        return bytes(self._peeked), is_complete or raw.content.at_eof()

    async def read_next(self, raw: web.BaseRequest) -> bytes:
        """See ``gateway.pipeline.http.StreamedHttpRequest``."""
        if self._peeked:
            piece = bytes(self._peeked)
            self._peeked.clear()
            self.release()
            return piece
        return await self._read_whole_piece(raw)

    async def _read_whole_piece(self, raw: web.BaseRequest) -> bytes:
        try:
            return await self._read_piece(raw.content)
        except (web.RequestPayloadError, TimeoutError):
            raise MalformedRequest("the body did not arrive whole") from None

    def reserve_memory(self, size: int) -> None:
        """See ``gateway.pipeline.http.HttpRequest``."""
        self._budget.reserve(size)
        self._size += size

    def release(self) -> None:
        """Give the budget back what the body took of it."""
        self._budget.used -= self._size
        self._size = 0

    async def _read_piece(self, content: StreamReader) -> bytes:
        if content.is_eof():
            return content.read_nowait()
        async with asyncio.timeout(self._limits.body_timeout):
            return await content.readany()

    def _count(self, size: int, limit: int) -> None:
        if self._size + size > limit:
            raise _build_too_large(limit)
        self.reserve_memory(size)


def _build_too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {limit} bytes", limit=limit)


class _AiohttpResponseWriter:
    """A ``ResponseWriter``. Nothing is sent before ``drain``: a short response is one write."""

    needs_drain = True
    _is_stream = False

    def __init__(self, raw: web.BaseRequest, listener: "AiohttpListener") -> None:
        self._raw = raw
        self._listener = listener
        self._response: web.StreamResponse | None = None
        self._status = 0
        self._headers: Headers = ()
        self._buffer: list[bytes] = []
        self.started = False
        self.finished = False

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        self.started = self.finished = True
        self._status, self._headers = status, headers
        self._buffer.append(body)

    def start(self, status: int, headers: Headers) -> None:
        self.started = self._is_stream = True
        self._status, self._headers = status, headers

    def write(self, data: bytes) -> None:
        self._buffer.append(data)

    def finish(self) -> None:
        self.finished = True

    async def drain(self) -> None:
        await self._flush()

    async def _flush(self) -> web.StreamResponse:
        """Send the buffered data; returns the response."""
        if self._response is None:
            self._response = self._set_headers(web.StreamResponse(status=self._status))
            self._response.headers[hdrs.CACHE_CONTROL] = "no-cache"
            self._response.headers["X-Accel-Buffering"] = "no"
            await self._response.prepare(self._raw)
        data = b"".join(self._buffer)
        self._buffer.clear()
        if data:
            await self._response.write(data)
        return self._response

    async def close(self) -> web.StreamResponse:
        """Send the rest; abort the connection if the response is not finished."""
        if self._response is None and self.finished and not self._is_stream:
            body = b"".join(self._buffer)
            return self._set_headers(web.Response(status=self._status, body=body))
        if self._response is None and not self.finished:
            return _plain_response(HTTPStatus.INTERNAL_SERVER_ERROR, "an internal error")
        response = await self._flush()
        if self.finished:
            await response.write_eof()
        elif self._raw.transport is not None:
            self._raw.transport.abort()
        return response

    def _set_headers(self, response: web.StreamResponse) -> web.StreamResponse:
        headers = response.headers
        headers[hdrs.SERVER] = _SERVER_NAME
        headers.pop(hdrs.CONTENT_TYPE, None)
        for name, value in self._headers:
            if name == hdrs.TRANSFER_ENCODING:
                if self._raw.version >= HttpVersion11:
                    response.enable_chunked_encoding()
            elif name == hdrs.CONNECTION:
                response.force_close()
            else:
                headers[name] = value
        if self._listener.is_draining:
            response.force_close()
        return response


# Connections. The admin listener uses these, too.


class AiohttpConnection(web.RequestHandler):
    """A client connection with a time limit for its first request."""

    __slots__ = ("_header_timer", "_server", "peer")

    def __init__(self, server: "LimitedServer", **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self._server = server
        self._header_timer: asyncio.TimerHandle | None = None
        self.peer = ""
        """The client's address."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.peer = self.peer or get_peer_address(transport)
        super().connection_made(transport)
        if not self._server.tracker.admit(self):
            self.abort()
            return
        self._header_timer = asyncio.get_running_loop().call_later(
            self._server.tracker.limits.header_timeout, self.abort
        )

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        self.stop_header_timer()
        self._server.tracker.release(self)

    def stop_header_timer(self) -> None:
        """Note that a request has begun."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer input that is not a request, without naming aiohttp or repeating the input."""
        self.stop_header_timer()
        if message is not None and message.startswith(_HTTP2_PAUSE):
            return self._server.reject(HTTP2_MESSAGE, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        if status == HTTPStatus.BAD_REQUEST:
            return self._server.reject("the request is not HTTP")
        self.log_exception("Error handling request from %s", request.remote, exc_info=exc)
        return _plain_response(status, "an internal error")


def _plain_response(status: int, message: str) -> web.Response:
    """A response that closes the connection."""
    response = web.Response(status=status, text=f"{message}\n", headers={hdrs.SERVER: _SERVER_NAME})
    response.force_close()
    return response


class LimitedServer(web.Server):
    """An aiohttp server with limits of connections."""

    def __init__(self, handler: AiohttpHandler, tracker: ConnectionTracker, **kwargs: Any) -> None:
        super().__init__(
            self._handle_counted,
            handler_cancellation=True,
            access_log=None,
            logger=logging.getLogger("interlingua.http"),
            auto_decompress=False,
            lingering_time=LINGER_TIMEOUT,
            **kwargs,
        )
        self._handler = handler
        self.tracker = tracker
        self.malformed_by_status = Counter[int]()
        """Inputs that are not valid requests, by the status of the response."""
        self.set_limits(tracker.limits)

    def __call__(self) -> web.RequestHandler:
        """Make the protocol of a connection."""
        return AiohttpConnection(self, loop=self._loop, **self._kwargs)

    def set_limits(self, limits: ServerLimitsConfig) -> None:
        """Set the limits of new connections."""
        self.tracker.limits = limits
        size = limits.header
        self._kwargs.update(
            max_line_size=size, max_field_size=size, keepalive_timeout=limits.idle_timeout
        )

    def reject(self, message: str, status: int = HTTPStatus.BAD_REQUEST) -> web.StreamResponse:
        """The response to a request that is malformed."""
        self.malformed_by_status[status] += 1
        return _plain_response(status, message)

    async def _handle_counted(self, raw: web.BaseRequest) -> web.StreamResponse:
        connection = raw.protocol
        assert isinstance(connection, AiohttpConnection)  # noqa: S101 - see ``__call__``
        connection.stop_header_timer()
        self.tracker.idle.pop(connection, None)
        try:
            for name in _SINGLE_HEADERS:
                if len(raw.headers.getall(name, ())) > 1:
                    return self.reject(f"the request must have one header {name}")
            return await self._handler(raw)
        except web.HTTPException as error:
            return _plain_response(error.status, HTTPStatus(error.status).phrase.lower())
        finally:
            if connection in self.tracker.connections:
                self.tracker.idle[connection] = None


class AiohttpListener(Listener):
    """A ``Listener`` on aiohttp.

    ``header_timeout`` applies to the first request of a connection; later ones have
    ``idle_timeout``. A slow body is never closed for a new connection.
    """

    def __init__(
        self,
        handle_request: HandleRequest,
        limits: ServerLimitsConfig,
        body_budget: BodyBudget | None = None,
    ) -> None:
        self._server = LimitedServer(self._handle, ConnectionTracker(limits))
        super().__init__(handle_request, self._server, self._server.tracker, body_budget)
        self.malformed_by_status = self._server.malformed_by_status

    def set_limits(self, limits: ServerLimitsConfig) -> None:
        """See ``Listener``."""
        self._server.set_limits(limits)

    def close_idle(self) -> None:
        """See ``Listener``."""
        self._server.pre_shutdown()

    async def close(self) -> None:
        """See ``Listener``."""
        await self.close_sockets()
        await self._server.shutdown(_SHUTDOWN_TIMEOUT)
        await self._tracker.close()

    async def _handle(self, raw: web.BaseRequest) -> web.StreamResponse:
        if "," in raw.headers.get(hdrs.HOST, ""):
            return self._server.reject("the request must have one header Host")
        writer = _AiohttpResponseWriter(raw, self)
        body = BodyReader(self.limits, self.body_budget)
        self._active_requests += 1
        try:
            await self.handle_request(_AiohttpRequest(raw, body), writer)
            return await writer.close()
        finally:
            body.release()
            self._active_requests -= 1
            if self._idle_event is not None and not self._active_requests:
                self._idle_event.set()


class ApplicationListener(ListenSockets):
    """A listening address of an aiohttp application, with limits of its own."""

    def __init__(self, application: web.Application, limits: ServerLimitsConfig) -> None:
        super().__init__(self._build_connection, ConnectionTracker(limits))
        self._runner = web.AppRunner(
            application,
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            logger=logging.getLogger("interlingua.http"),
            auto_decompress=False,
            shutdown_timeout=_APPLICATION_SHUTDOWN_TIMEOUT,
        )
        self._server: LimitedServer | None = None

    async def set_up(self) -> None:
        """Start the application, before it listens."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None  # noqa: S101 - it was set up
        self._server = LimitedServer(
            server.request_handler, self._tracker, request_factory=server.request_factory
        )

    async def listen_unix(self, path: str) -> None:
        """Bind a Unix socket, without limits: its clients are processes of the gateway."""
        await web.UnixSite(self._runner, path).start()

    @property
    def malformed_by_status(self) -> Mapping[int, int]:
        """Inputs that are not valid requests, by the status of the response."""
        return {} if self._server is None else self._server.malformed_by_status

    async def close(self) -> None:
        """Close the listener and its connections."""
        await self.close_sockets()
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(_APPLICATION_SHUTDOWN_TIMEOUT)
        await self._tracker.close()
        await self._runner.cleanup()

    def _build_connection(self) -> asyncio.Protocol:
        assert self._server is not None  # noqa: S101 - it was set up
        return self._server()
