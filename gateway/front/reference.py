"""The reference front: aiohttp's low-level server, below its applications and routes."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import HttpVersion11, hdrs, web

from gateway.core.errors import Malformed, TooLarge
from gateway.core.ports import Headers
from gateway.front import Serve
from gateway.front.certified import outer

_LAST_WORDS = 0.1
"""Seconds that an answer has after it was told that it is cut."""

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Request:
    """A gateway.seam.Request."""

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
            raise _too_large(limit)
        pieces: list[bytes] = []
        size = 0
        try:
            while piece := await self._raw.content.readany():
                size += len(piece)
                if size > limit:
                    raise _too_large(limit)
                pieces.append(piece)
        except web.RequestPayloadError:
            raise Malformed("the body did not arrive whole") from None
        return b"".join(pieces)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit} bytes", limit=limit)


class _Sink:
    """A gateway.seam.Sink. Nothing is sent before ``drain``, so a short answer is one write."""

    pressure = True

    def __init__(self, raw: web.BaseRequest, front: "Front") -> None:
        self._raw = raw
        self._front = front
        self._response: web.StreamResponse | None = None
        self._status = 0
        self._headers: Headers = ()
        self._pending: list[bytes] = []
        self.started = False
        self.finished = False

    def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self._status, self._headers = status, headers

    def write(self, data: bytes) -> None:
        self._pending.append(data)

    def finish(self) -> None:
        self.finished = True

    async def drain(self) -> None:
        if self._response is None:
            self._response = self._make(web.StreamResponse(status=self._status))
            self._response.headers[hdrs.CACHE_CONTROL] = "no-cache"
            self._response.headers["X-Accel-Buffering"] = "no"
            await self._response.prepare(self._raw)
        data = b"".join(self._pending)
        self._pending.clear()
        if data:
            await self._response.write(data)

    async def close(self) -> web.StreamResponse:
        """Send what is left. The connection is cut when the answer was not finished."""
        if self._response is None and self.finished:
            body = b"".join(self._pending)
            return self._make(web.Response(status=self._status, body=body))
        if self._response is None:
            self._response = web.Response(status=500)
            self._response.force_close()
            return self._response
        await self.drain()
        if self.finished:
            await self._response.write_eof()
        elif self._raw.transport is not None:
            self._raw.transport.abort()
        return self._response

    def _make(self, response: web.StreamResponse) -> web.StreamResponse:
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
        if self._front.leaving:
            response.force_close()
        return response


class _Capped(web.Server):
    """Closes connections past a number of them at once: it has nothing to say to them in HTTP."""

    def __init__(self, answer: Answer, **kwargs: Any) -> None:
        super().__init__(answer, **kwargs)
        self.most = 0

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > self.most:
            transport.abort()

    def limit_header(self, size: int) -> None:
        """Lines of a head are this long at most, in bytes; holds for new connections."""
        self._kwargs.update(max_line_size=size, max_field_size=size)


class Front:
    """A ``gateway.front.Front`` on aiohttp."""

    def __init__(self, serve: Serve, *, header_limit: int, connections: int) -> None:
        self.serve = serve
        self.leaving = False
        """Whether connections end with the answer that they have."""
        self._server = _Capped(
            self._answer,
            handler_cancellation=True,
            access_log=None,
            logger=logging.getLogger("interlingua.http"),
            auto_decompress=False,
            keepalive_timeout=75,
        )
        self.limit(header_limit=header_limit, connections=connections)
        self._runner = web.ServerRunner(
            self._server, handle_signals=False, shutdown_timeout=_LAST_WORDS
        )
        self._site: web.TCPSite | None = None
        self._tls: ssl.SSLContext | None = None
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def limit(self, *, header_limit: int, connections: int) -> None:
        """What new connections are held to, and how many there may be."""
        self._server.limit_header(header_limit)
        self._server.most = connections

    def trust(self, tls: ssl.SSLContext | None) -> None:
        """With which certificate new connections are met; None where they are plain."""
        self._tls = tls

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        reuse_port: bool = False,
    ) -> int:
        """Bind; gives the port, which the system chooses for 0.

        With ``reuse_port`` other processes may listen there too.
        """
        self.trust(tls)
        await self._runner.setup()
        context = None if tls is None else outer(lambda: self._tls)
        self._site = web.TCPSite(
            self._runner, host, port, ssl_context=context, reuse_port=reuse_port
        )
        await self._site.start()
        bound: int = self._runner.addresses[0][1]
        return bound

    async def drain(self, seconds: float) -> None:
        """Take no more connections, and wait for the exchanges that run, so long at most."""
        self.leaving = True
        if (site := self._site) is not None:
            self._site = None
            await site.stop()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Cut what is left."""
        await self._runner.cleanup()

    async def _answer(self, raw: web.BaseRequest) -> web.StreamResponse:
        sink = _Sink(raw, self)
        self._busy += 1
        self._idle.clear()
        try:
            await self.serve(_Request(raw), sink)
            return await sink.close()
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()
