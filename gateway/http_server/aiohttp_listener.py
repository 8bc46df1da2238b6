"""The reference front: aiohttp's low-level server, below its applications and routes."""

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
"""Seconds that an answer has after it was told that it is cut."""

AiohttpHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _AiohttpRequest:
    """A gateway.pipeline.http.HttpRequest."""

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
    """A gateway.pipeline.http.ResponseWriter. Nothing is sent before ``drain``, so a short answer is one write."""

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
        """The answer, of which all that was written is sent."""
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
        """Send what is left. The connection is cut when the answer was not finished."""
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
    """Closes connections past a number of them at once: it has nothing to say to them in HTTP."""

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
        """Hold new connections to these. Of the times it knows how long a connection may wait."""
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
    """A ``gateway.http_server.listener.Listener`` on aiohttp. It has no time for a head or a body."""

    def __init__(self, serve: HandleRequest, limits: ConnectionLimits) -> None:
        self.handle_request = serve
        self.is_draining = False
        """Whether connections end with the answer that they have."""
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
        """See ``gateway.http_server.listener.Listener``: the library does not tell."""
        self._active_requests = 0
        self._idle_event = asyncio.Event()
        self._idle_event.set()

    def set_limits(self, limits: ConnectionLimits) -> None:
        """What new connections are held to, and how many there may be."""
        self._server.set_limits(limits)

    def set_tls_context(self, tls: ssl.SSLContext | None) -> None:
        """With which certificate new connections are met; None where they are plain."""
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
        """See ``gateway.http_server.listener.Listener``."""
        return await self._sockets.listen(host, port, tls, reuse_port=reuse_port, given=given)

    @property
    def socket_fds(self) -> Sequence[int]:
        """The descriptors of its listening sockets."""
        return self._sockets.fds

    @property
    def connections(self) -> int:
        """How many clients have now."""
        return len(self._server.connections)

    def stop_accepting(self) -> None:
        """Take no more connections. Those that are there go on."""
        self._sockets.stop_accepting()

    async def drain(self, seconds: float) -> None:
        """Leave and shut, end what rests, and wait for what runs, so long at most."""
        self.is_draining = True
        await self._sockets.wait_closed()
        self._server.pre_shutdown()
        try:
            async with asyncio.timeout(seconds):
                await self._idle_event.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Cut what is left."""
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
