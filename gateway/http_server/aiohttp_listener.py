"""The aiohttp HTTP server: aiohttp's low-level server, without applications and routes."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import HttpVersion11, hdrs, web

from gateway.http_server.connection import ConnectionLimits, HandleRequest
from gateway.http_server.sockets import ListenSockets
from protocols.core.errors import MalformedRequest, RequestTooLarge
from protocols.core.interfaces import Headers

_SHUTDOWN_TIMEOUT = 0.1
"""Seconds for responses to end after the shutdown has begun."""

AiohttpHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _AiohttpRequest:
    """An ``HttpRequest``."""

    head = None
    __slots__ = ("_raw", "headers", "method", "path", "peer", "query")

    def __init__(self, raw: web.BaseRequest) -> None:
        self._raw = raw
        self.method = raw.method
        path, _, query = raw.raw_path.partition("?")
        self.path = path
        self.query = query
        self.headers: Mapping[str, str] = raw.headers
        self.peer = raw.remote or ""

    async def body(self, limit: int) -> bytes:
        declared = self._raw.content_length
        if declared is not None and declared > limit:
            raise _build_too_large(limit)
        pieces: list[bytes] = []
        size = 0
        try:
            while piece := await self._raw.content.readany():
                size += len(piece)
                if size > limit:
                    raise _build_too_large(limit)
                pieces.append(piece)
        except web.RequestPayloadError:
            raise MalformedRequest("the body did not arrive whole") from None
        return b"".join(pieces)


def _build_too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {limit} bytes", limit=limit)


class _AiohttpResponseWriter:
    """A ``ResponseWriter``. Nothing is sent before ``drain``: a short response is one write."""

    needs_drain = True
    _is_stream = False

    def __init__(self, raw: web.BaseRequest, front: "AiohttpListener") -> None:
        self._raw = raw
        self._listener = front
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
            failed = web.Response(status=500)
            failed.force_close()
            return failed
        response = await self._flush()
        if self.finished:
            await response.write_eof()
        elif self._raw.transport is not None:
            self._raw.transport.abort()
        return response

    def _set_headers(self, response: web.StreamResponse) -> web.StreamResponse:
        headers = response.headers
        headers[hdrs.SERVER] = "interlingua"
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


class _LimitedServer(web.Server):
    """A server that closes connections beyond its limits at once."""

    def __init__(self, answer: AiohttpHandler, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(answer, **kwargs)
        self.set_limits(limits)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        most, at = self._limits.max_per_address, _get_peer_address(transport)
        here = (
            sum(_get_peer_address(one.transport) == at for one in self.connections) if most else 0
        )
        if len(self.connections) > self._limits.max_connections or (most and here > most):
            transport.abort()

    def set_limits(self, limits: ConnectionLimits) -> None:
        """Set the limits of new connections; of the timeouts only ``idle_timeout`` applies."""
        self._limits = limits
        size = limits.max_header_size
        told = {
            "max_line_size": size,
            "max_field_size": size,
            "keepalive_timeout": limits.idle_timeout,
        }
        self._kwargs.update(told)


def _get_peer_address(transport: asyncio.BaseTransport | None) -> Any:
    peer = None if transport is None else transport.get_extra_info("peername")
    return peer and peer[0]


class AiohttpListener:
    """A ``Listener`` on aiohttp. It has no timeouts for headers and bodies."""

    def __init__(self, handle_request: HandleRequest, limits: ConnectionLimits) -> None:
        self.handle_request = handle_request
        self.is_draining = False
        """Whether each response closes its connection."""
        self._server = _LimitedServer(
            self._handle,
            limits,
            handler_cancellation=True,
            access_log=None,
            logger=logging.getLogger("interlingua.http"),
            auto_decompress=False,
        )
        self._sockets = ListenSockets(self._server)
        self.malformed_by_status: Mapping[int, int] = {}
        """See ``Listener``; aiohttp does not count them."""
        self._active_requests = 0
        self._idle_event = asyncio.Event()
        self._idle_event.set()

    def set_limits(self, limits: ConnectionLimits) -> None:
        """Set the limits of new connections."""
        self._server.set_limits(limits)

    def set_tls_context(self, tls: ssl.SSLContext | None) -> None:
        """Set the certificate of new connections; None without TLS."""
        self._sockets.set_tls_context(tls)

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        reuse_port: bool = False,
        given: Sequence[socket.socket] = (),
    ) -> int:
        """See ``Listener``."""
        return await self._sockets.listen(host, port, tls, reuse_port=reuse_port, given=given)

    @property
    def socket_fds(self) -> Sequence[int]:
        """File descriptors of the listening sockets."""
        return self._sockets.fds

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self._server.connections)

    def stop_accepting(self) -> None:
        """Accept no more connections; open connections stay."""
        self._sockets.stop_accepting()

    async def drain(self, seconds: float) -> None:
        """Stop accepting, close idle connections, wait ``seconds`` for running requests."""
        self.is_draining = True
        await self._sockets.wait_closed()
        self._server.pre_shutdown()
        try:
            async with asyncio.timeout(seconds):
                await self._idle_event.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Close the remaining connections at once."""
        await self._sockets.wait_closed()
        await self._server.shutdown(_SHUTDOWN_TIMEOUT)

    async def _handle(self, raw: web.BaseRequest) -> web.StreamResponse:
        sink = _AiohttpResponseWriter(raw, self)
        self._active_requests += 1
        self._idle_event.clear()
        try:
            await self.handle_request(_AiohttpRequest(raw), sink)
            return await sink.close()
        finally:
            self._active_requests -= 1
            if not self._active_requests:
                self._idle_event.set()
