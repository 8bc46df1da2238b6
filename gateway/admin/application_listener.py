"""The admin API's HTTP server: aiohttp's, with the limits of connections of the other listeners.

``header_timeout`` applies to the first request of a connection; later ones have ``idle_timeout``.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, cast

from aiohttp import StreamReader, hdrs, web

from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.connection import LINGER_TIMEOUT
from gateway.http_server.overload import (
    ConnectionTracker,
    get_peer_address,
    is_body_overdue,
)
from gateway.http_server.parser import HTTP2_MESSAGE
from gateway.http_server.sockets import ListenSockets
from gateway.memory import MemoryBudget
from protocols.core.errors import MalformedRequest, RequestTooLarge

_SHUTDOWN_TIMEOUT: Final = 1.0
"""Seconds for responses to end after the shutdown has begun."""
_SINGLE_HEADERS: Final = (hdrs.HOST, hdrs.AUTHORIZATION)
"""Headers of which other software may read another one if there are several."""
_SERVER_NAME: Final = "interlingua"
_HTTP2_PAUSE: Final = "Pause on PRI/Upgrade"
"""What aiohttp's parser, llhttp, says of the first line of HTTP/2."""

BaseHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class BodyReader:
    """Reads a request body within the limits of its time and memory."""

    __slots__ = ("_budget", "_limits", "_size")

    def __init__(self, limits: ServerLimitsConfig, budget: MemoryBudget) -> None:
        self._limits = limits
        self._budget = budget
        self._size = 0
        """Bytes received, taken of the budget."""

    async def read(self, raw: web.BaseRequest, limit: int) -> bytes:
        """The body. Raises RequestTooLarge, Overloaded, or MalformedRequest if it is incomplete."""
        declared = raw.content_length or 0
        if declared > limit:
            raise _build_too_large(limit)
        self._budget.ensure_room(declared)
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

    def reserve_memory(self, size: int) -> None:
        """See ``gateway.pipeline.http.HttpRequest``."""
        self._budget.reserve("bodies", size)
        self._size += size

    def reserve_response(self, size: int) -> None:
        """See ``gateway.pipeline.http.HttpRequest``."""
        self.reserve_memory(size)

    def release(self) -> None:
        """Give the budget back what the request took of it."""
        self._budget.release("bodies", self._size)
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


class AdminConnection(web.RequestHandler):
    """A client connection with a time limit for its first request."""

    __slots__ = ("_header_timer", "_open_transport", "_server", "peer")

    def __init__(self, server: "LimitedServer", **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self._server = server
        self._header_timer: asyncio.TimerHandle | None = None
        self._open_transport: asyncio.Transport | None = None
        """The transport until it is closed; aiohttp forgets one with unsent data earlier."""
        self.peer = ""
        """The client's address."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.peer = self.peer or get_peer_address(transport)
        self._open_transport = cast("asyncio.Transport", transport)
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
        self._open_transport = None
        self.stop_header_timer()
        self._server.tracker.release(self)

    def stop_header_timer(self) -> None:
        """Note that a request has begun."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def abort(self) -> None:
        """Close at once, whatever the client has not read."""
        if self._open_transport is not None:
            self._open_transport.abort()

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

    def __init__(self, handler: BaseHandler, tracker: ConnectionTracker, **kwargs: Any) -> None:
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
        return AdminConnection(self, loop=self._loop, **self._kwargs)

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
        assert isinstance(connection, AdminConnection)  # noqa: S101 - see ``__call__``
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
            shutdown_timeout=_SHUTDOWN_TIMEOUT,
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
            await self._server.shutdown(_SHUTDOWN_TIMEOUT)
        await self._tracker.close()
        await self._runner.cleanup()

    def _build_connection(self) -> asyncio.Protocol:
        assert self._server is not None  # noqa: S101 - it was set up
        return self._server()
