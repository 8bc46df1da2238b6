"""One client connection, whose requests are served in order."""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final, Literal, Protocol, cast

from msgspec import Struct

from backends.aio import WriteBatcher
from gateway.http_server.parser import BadRequest, IncomingRequest, RequestParser
from gateway.http_server.response import Http1ResponseWriter, render_head
from gateway.pipeline.http import HttpRequest, ResponseWriter

# Limits of client connections.


class ConnectionLimits(Struct, frozen=True):
    """Times in seconds, sizes in bytes. Changes apply to new connections."""

    max_header_size: int = 16 << 10
    """Bytes of one header line; the whole head may be eight times as large."""
    max_connections: int = 10_000
    max_per_address: int | None = None
    """Connections per client address; None is unlimited."""
    header_timeout: float = 10.0
    """From the first byte of a request to the end of its headers."""
    body_timeout: float = 10.0
    """Without any data of a request body."""
    idle_timeout: float = 75.0
    """Between requests of a connection."""
    write_timeout: float = 30.0
    """Without the client reading data of a finished response."""
    linger_timeout: float = 2.0
    """How long input is discarded after an error, so that the client can read the response."""

    @property
    def check_interval(self) -> float:
        """Seconds between timeout checks; a timeout fires at most two intervals late."""
        return min(1.0, self.header_timeout / 4, self.body_timeout / 4, self.idle_timeout / 4)


HandleRequest = Callable[[HttpRequest, ResponseWriter], Awaitable[None]]


_MAX_PIPELINED: Final = 8
"""Pipelined requests before reading pauses."""
_WRITE_HIGH_WATER: Final = 64 << 10
"""Bytes in the write buffer before writing pauses."""


ConnectionState = Literal["head", "body", "answer", "ending", "lingering"]
"""What a connection waits for: a request, its body, its response, the client to read the end of the
response (ending), or the client to read an error (lingering)."""


class ConnectionOwner(Protocol):
    """The listener that owns a connection."""

    handle_request: HandleRequest
    is_draining: bool
    limits: ConnectionLimits
    write_batcher: WriteBatcher
    loop_time: float
    """The loop's time at the last timeout check."""
    malformed_by_status: Counter[int]
    """Inputs that are not valid requests, by the status of the response."""

    def on_connection_open(self, connection: "ClientConnection") -> bool:
        """Register a connection; returns False if it must be closed."""

    def on_connection_close(self, connection: "ClientConnection") -> None:
        """Remove a closed connection."""

    def on_request_start(self, connection: "ClientConnection") -> None:
        """Note the start of a request."""

    def on_request_end(self, connection: "ClientConnection") -> None:
        """Note the end of a request."""


class ClientConnection(asyncio.Protocol):
    """Reads requests and serves them in order until either side closes."""

    def __init__(self, owner: ConnectionOwner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._limits = owner.limits
        self._state: ConnectionState = "head"
        self.peer = ""
        """The client's address."""
        self._state_since = owner.loop_time
        """Time of the last progress in this state, by the owner's clock."""
        self._unsent_bytes = 0
        """Size of the write buffer at the last check."""
        self._transport: asyncio.Transport | None = None
        self._parser = RequestParser(
            owner.limits.max_header_size, loop, self._on_request, self._resume_body
        )
        self._queue: deque[IncomingRequest | BadRequest] = deque()
        self._writer: Http1ResponseWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_reading_paused = False

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or is being received."""
        return self._task is None and not self._queue and not self._parser.in_head

    def close(self) -> None:
        """Close after the written data is sent."""
        self._parser.is_stopped = True
        self._set_state("ending")
        self._owner.write_batcher.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._owner.write_batcher.flush()
        if self._transport is not None:
            self._transport.abort()

    def check_timeouts(self) -> None:
        """Close the connection if its timeout has passed."""
        now = self._owner.loop_time
        if self._transport is None or self._state == "answer":
            return
        left = self._transport.get_write_buffer_size()
        if left != self._unsent_bytes:  # the client still reads
            self._unsent_bytes = left
            self._state_since = now
        if now - self._state_since <= self._get_timeout() + self._limits.check_interval:
            return
        if self._state == "body":
            self._parser.abort_body()
        elif self._parser.in_head:
            self._parser.reject(408, "the request's head took too long")
        else:
            self.abort()

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) else ""
        if not self._owner.on_connection_open(self):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        reader = self._parser
        if reader.is_stopped:
            return
        began = reader.in_head
        reader.feed(data)
        state = self._state
        if state == "body":
            self._state_since = self._owner.loop_time
            if reader.body_request is None:
                self._state = "answer"
        elif state == "head" and reader.in_head and not began:
            self._set_state("head")
        if self._queue or reader.body_request is not None:
            self._limit_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        del exc
        self._transport = None
        self._queue.clear()
        if self._writer is not None:
            self._writer.resume()
        if self._task is not None:
            self._task.cancel()
        self._owner.on_connection_close(self)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._writer is not None:
            self._writer.pause(self._loop)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._writer is not None:
            self._writer.resume()

    # --- reading --------------------------------------------------------------------------------

    def _resume_body(self) -> None:
        """Resume reading a request body."""
        body = self._parser.body_request
        if self._transport is not None and body is not None and body.expects_continue:
            body.expects_continue = False
            self._owner.write_batcher.flush()
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._resume_reading()

    def _resume_reading(self) -> None:
        if self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()

    def _limit_reading(self) -> None:
        """Pause reading if enough data is buffered."""
        body = self._parser.body_request
        wanted = len(self._queue) <= _MAX_PIPELINED and not (body is not None and body.is_full)
        if self._transport is not None and not self._is_reading_paused and not wanted:
            self._is_reading_paused = True
            self._transport.pause_reading()

    # --- serving --------------------------------------------------------------------------------

    def _on_request(self, one: IncomingRequest | BadRequest) -> None:
        """Serve a request or reject it, after the one that runs."""
        if self._task is not None:
            self._queue.append(one)
        elif type(one) is BadRequest:
            self._send_bad_request(one)
        elif (transport := self._transport) is not None:
            owner = self._owner
            one.peer = self.peer
            if one.is_complete:
                self._state = "answer"
            else:
                self._set_state("body")
            sink = self._writer = Http1ResponseWriter(transport, owner, one, one.method == "HEAD")
            owner.on_request_start(self)
            self._task = asyncio.Task(
                self._handle_request(one, sink), loop=self._loop, name="request"
            )

    async def _handle_request(self, request: IncomingRequest, sink: Http1ResponseWriter) -> None:
        owner = self._owner
        serve = owner.handle_request
        try:
            await serve(request, sink)
        finally:
            self._task = self._writer = None
            owner.on_request_end(self)
            self._on_response_done(request, sink)

    def _on_response_done(self, request: IncomingRequest, sink: Http1ResponseWriter) -> None:
        """Continue with the next request, or close."""
        if not sink.finished:
            self.abort()
        elif not request.is_complete:
            self._linger()
        elif sink.closes_connection:
            self.close()
        else:
            if self._is_reading_paused:
                self._resume_reading()
            if self._queue:
                self._on_request(self._queue.popleft())
            else:
                self._set_state("head")

    def _send_bad_request(self, refused: BadRequest) -> None:
        self._owner.malformed_by_status[refused.status] += 1
        body = f"{refused.message}\n".encode()
        lines = (
            "Content-Type: text/plain; charset=utf-8",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        if self._transport is not None:
            self._owner.write_batcher.send(
                self._transport, render_head(refused.status, lines) + body
            )
        self._linger()

    def _linger(self) -> None:
        """Close after discarding input for a while: a reset would lose the response."""
        self._parser.is_stopped = True
        self._set_state("lingering")
        self._owner.write_batcher.flush()
        self._resume_reading()
        if self._transport is not None:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:  # TLS has no half-close
                self._transport.close()

    def _set_state(self, state: ConnectionState) -> None:
        self._state = state
        self._state_since = self._owner.loop_time

    def _get_timeout(self) -> float:
        limits = self._limits
        match self._state:
            case "head":
                return limits.header_timeout if self._parser.in_head else limits.idle_timeout
            case "lingering":
                return limits.linger_timeout
            case "body":
                return limits.body_timeout
            case _:
                return limits.write_timeout
