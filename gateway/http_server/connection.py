"""One client connection, whose requests are served in order.

The transport's callbacks feed the parser, which reports requests. One request at a time runs in a
task; those that a client has pipelined wait in a queue, and reading pauses when it is full. The
state (``ConnectionState``) says what the connection waits for, and so which timeout applies. One
check for all connections of the listener reads it: a request needs no timer of its own.

What must never happen:

- A response in the place of another one: the next request begins when the last response is
  complete, and a response that was cut off ends the connection.
- A request that is left running without its client: a lost connection cancels the task.
- A reset that loses an error's response: input is discarded for a while before the close.
- A client that makes the gateway hold one response after the other: the next request waits until it
  has read the last response.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final, Literal, Protocol, cast

from backends.http.interfaces import MAX_HELD_BYTES
from backends.write_batching import WriteBatcher
from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.overload import compute_check_interval, get_peer_address, is_body_overdue
from gateway.http_server.parser import BadRequest, IncomingRequest, RequestParser
from gateway.http_server.response import WRITE_HIGH_WATER, Http1ResponseWriter, render_head
from gateway.http_server.sockets import TLS_SIZE
from gateway.http_server.turn_slices import TurnGate, TurnQueue
from gateway.memory import MemoryBudget
from gateway.pipeline.http import HttpRequest, ResponseWriter

HandleRequest = Callable[[HttpRequest, ResponseWriter], Awaitable[None]]
"""Handles the requests of a listener."""

_MAX_PIPELINED: Final = 8
"""Pipelined requests before reading pauses."""
CONNECTION_SIZE: Final = 16 << 10
"""Bytes that a connection takes of the memory budget, besides those of TLS."""
_MIN_EVICTION_AGE: Final = 2.0
"""Seconds that a client sends a body, or does not read, before its rate is known."""
_WRITE_TIMEOUT: Final = 30.0
"""Seconds without the client reading data of a finished response."""
LINGER_TIMEOUT: Final = 2.0
"""Seconds that input is discarded after an error, so that the client can read the response."""


ConnectionState = Literal["head", "body", "response", "ending", "lingering"]
"""What a connection waits for: a request, its body, its response, the client to read the end of the
response (ending), or the client to read an error (lingering)."""


class ConnectionOwner(Protocol):
    """The listener that owns a connection."""

    handle_request: HandleRequest
    is_draining: bool
    memory: MemoryBudget
    write_batcher: WriteBatcher
    stream_turns: TurnGate
    """See ``ResponseOwner``."""
    cancellations: TurnQueue
    """Cancels the requests of clients that have left."""
    loop_time: float
    """The loop's time at the last timeout check."""
    malformed_by_status: Counter[int]
    """Inputs that are not valid requests, by the status of the response."""

    @property
    def limits(self) -> ServerLimitsConfig:
        """The limits of new connections."""

    def on_connection_open(self, connection: "ClientConnection") -> bool:
        """Register a connection; returns False if it must be closed."""

    def on_connection_close(self, connection: "ClientConnection") -> None:
        """Remove a closed connection."""

    def on_request_start(self, connection: "ClientConnection") -> None:
        """Note the start of a request."""

    def on_body_start(self, connection: "ClientConnection") -> None:
        """Note that the rest of a request's body is awaited."""

    def on_body_end(self, connection: "ClientConnection") -> None:
        """Note that no more of it is awaited."""

    def on_body_overdue(self) -> None:
        """Note that a body came too slowly."""

    def on_writing_paused(self, connection: "ClientConnection") -> None:
        """Note that the client does not read as fast as its response comes."""

    def on_writing_resumed(self, connection: "ClientConnection") -> None:
        """Note that the client has read on."""

    def on_request_end(self, connection: "ClientConnection") -> None:
        """Note the end of a request."""


class ClientConnection(asyncio.Protocol):
    """Reads requests and serves them in order until either side closes."""

    def __init__(self, owner: ConnectionOwner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._limits = owner.limits
        self._check_interval = compute_check_interval(owner.limits)
        self._state: ConnectionState = "head"
        self.peer = ""
        """The client's address."""
        self._state_since = owner.loop_time
        """Time of the last progress in this state, by the owner's clock."""
        self._body_since = 0.0
        """Time at which the current body's request began, by the owner's clock."""
        self._is_receiving = False
        """Whether more of a body is awaited than came with its head."""
        self._unsent_bytes = 0
        """Size of the write buffer at the last check."""
        self._held_bytes = 0
        """Taken of the memory budget for a response that the client does not read."""
        self._paused_at = 0.0
        """Time at which it stopped reading, by the owner's clock."""
        self._own_bytes = 0
        """Taken of the memory budget for the connection itself."""
        self._transport: asyncio.Transport | None = None
        self._parser = RequestParser(
            owner.limits.header,
            loop,
            owner.memory,
            self._on_request,
            self._resume_body,
        )
        self._queue: deque[IncomingRequest | BadRequest] = deque()
        self._writer: Http1ResponseWriter | None = None
        self._request: IncomingRequest | None = None
        """The request that runs in the task."""
        self._task: asyncio.Task[None] | None = None
        self._is_reading_paused = False

    def __repr__(self) -> str:
        peer = "closed" if self._transport is None else self.peer
        return f"<ClientConnection {peer}, in {self._state}, {len(self._queue)} requests queued>"

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or is being received."""
        return self._task is None and not self._queue and not self._parser.in_head

    @property
    def is_sending(self) -> bool:
        """Whether it has to send more, or is closed when it has."""
        transport = self._transport
        return transport is not None and (
            transport.is_closing() or transport.get_write_buffer_size() > 0
        )

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
        # The transport reports the loss later, but what needs the memory needs it now.
        self._parser.is_stopped = True
        if self._request is not None:
            self._request.drop_body()
        self._release_memory()

    def check_timeouts(self) -> None:
        """Close the connection if its timeout has passed."""
        now = self._owner.loop_time
        if self._transport is None or self._state == "response":
            return
        unsent_bytes = self._transport.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes:  # the client still reads
            self._unsent_bytes = unsent_bytes
            self._state_since = now
        is_overdue = now - self._state_since > self._get_timeout() + self._check_interval
        if not (is_overdue or self._is_body_overdue()):
            return
        if self._state == "body":
            self._parser.abort_body()
            self._owner.on_body_overdue()
        elif self._parser.in_head:
            self._parser.reject(408, "the request's head took too long")
        else:
            self.abort()

    def get_rate(self) -> float | None:
        """See ``gateway.http_server.overload.WaitingConnection``."""
        now, request = self._owner.loop_time, self._parser.body_request
        if self._held_bytes and self._transport is not None:
            age = now - self._paused_at
            size = self._held_bytes - MAX_HELD_BYTES - self._transport.get_write_buffer_size()
        elif request is not None:
            age, size = now - self._body_since, request.body_size
        else:
            return None
        return None if age < _MIN_EVICTION_AGE else size / age

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        self.peer = self.peer or get_peer_address(transport)
        has_tls = transport.get_extra_info("sslcontext") is not None
        self._own_bytes = CONNECTION_SIZE + (TLS_SIZE if has_tls else 0)
        self._owner.memory.record_held("connections", self._own_bytes)
        if not self._owner.on_connection_open(self):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        parser = self._parser
        if parser.is_stopped:
            return
        was_in_head = parser.in_head
        parser.feed(data)
        state = self._state
        if state == "response" and not self._queue:  # the usual request came whole
            return
        if state == "body":
            self._state_since = self._owner.loop_time
            if parser.body_request is None:
                self._state = "response"
                if self._is_receiving:
                    self._is_receiving = False
                    self._owner.on_body_end(self)
            elif not self._is_receiving:
                self._is_receiving = True
                self._owner.on_body_start(self)
        elif state == "head" and parser.in_head and not was_in_head:
            self._set_state("head")
        if self._queue or parser.body_request is not None:
            self._limit_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        del exc
        self._transport = None
        self._release_memory()
        self._parser.close()
        if self._writer is not None:
            self._writer.resume()
        if self._task is not None:
            self._owner.cancellations.call(self._task.cancel)
        self._owner.on_connection_close(self)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._writer is not None:
            self._writer.pause(self._loop)
        if self._transport is not None and not self._held_bytes:
            # What is buffered of the worker's response comes on top, soon if not yet.
            self._held_bytes = self._transport.get_write_buffer_size() + MAX_HELD_BYTES
            self._paused_at = self._owner.loop_time
            self._owner.on_writing_paused(self)
            self._owner.memory.record_held("responses", self._held_bytes)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._writer is not None:
            self._writer.resume()
        self._release_response()
        if self._task is None and self._queue:
            self._serve_next()

    # --- reading --------------------------------------------------------------------------------

    def _resume_body(self) -> None:
        """Resume reading a request body."""
        request = self._parser.body_request
        if self._transport is not None and request is not None and request.expects_continue:
            request.expects_continue = False
            self._owner.write_batcher.flush()
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._resume_reading()

    def _resume_reading(self) -> None:
        if self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()

    def _limit_reading(self) -> None:
        """Pause reading if enough data is buffered."""
        request = self._parser.body_request
        is_enough = len(self._queue) > _MAX_PIPELINED or (request is not None and request.is_full)
        if self._transport is not None and not self._is_reading_paused and is_enough:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _release_memory(self) -> None:
        """Give back what is held for the client, except the running request."""
        self._release_response()
        for request in self._queue:
            if type(request) is IncomingRequest:
                request.drop_body()
        self._queue.clear()
        own, self._own_bytes = self._own_bytes, 0
        self._owner.memory.record_held("connections", -own)

    def _release_response(self) -> None:
        """Give back what an unread response took of the memory budget."""
        held, self._held_bytes = self._held_bytes, 0
        if held:
            self._owner.on_writing_resumed(self)
            self._owner.memory.record_held("responses", -held)

    # --- serving --------------------------------------------------------------------------------

    def _on_request(self, request: IncomingRequest | BadRequest) -> None:
        """Serve a request or reject it, after the one that runs and what its client has to read."""
        if self._task is not None:
            self._queue.append(request)
        elif self._held_bytes:
            self._queue.append(request)
            self._set_state("ending")
        elif type(request) is BadRequest:
            self._send_bad_request(request)
        elif (transport := self._transport) is None or transport.is_closing():
            request.release_body()
        else:
            owner = self._owner
            self._request = request
            request.peer = self.peer
            owner.on_request_start(self)
            if request.is_complete:
                self._state = "response"
            else:
                self._state = "body"
                self._state_since = self._body_since = owner.loop_time
            writer = self._writer = Http1ResponseWriter(
                transport, owner, request, request.method == "HEAD"
            )
            self._task = asyncio.Task(
                self._handle_request(request, writer), loop=self._loop, name="request"
            )

    async def _handle_request(self, request: IncomingRequest, writer: Http1ResponseWriter) -> None:
        owner = self._owner
        handle = owner.handle_request
        try:
            await handle(request, writer)
        except asyncio.CancelledError:
            # A task keeps its error, whose traceback keeps the task: a reference cycle with all of
            # the request in it. Nobody awaits the task of a closed connection.
            if self._transport is not None:
                raise
        finally:
            self._task = self._writer = self._request = None
            request.release_body()
            owner.on_request_end(self)
            self._on_response_done(request, writer)

    def _on_response_done(self, request: IncomingRequest, writer: Http1ResponseWriter) -> None:
        """Continue with the next request, or close."""
        if not writer.finished:
            self.abort()
        elif not request.is_complete:
            self._linger()
        elif writer.closes_connection:
            self.close()
        elif self._queue:
            self._owner.write_batcher.flush()  # the transport says whether it takes more
            self._serve_next()
        else:
            if self._is_reading_paused:
                self._resume_reading()
            self._state = "head"
            self._state_since = self._owner.loop_time

    def _serve_next(self) -> None:
        """Serve the next pipelined request, or wait until the client has read the last response."""
        if self._held_bytes:
            self._set_state("ending")
            return
        self._on_request(self._queue.popleft())
        if len(self._queue) <= _MAX_PIPELINED:
            self._resume_reading()

    def _send_bad_request(self, error: BadRequest) -> None:
        self._owner.malformed_by_status[error.status] += 1
        body = f"{error.message}\n".encode()
        lines = (
            "Content-Type: text/plain; charset=utf-8",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        if self._transport is not None:
            self._owner.write_batcher.send(self._transport, render_head(error.status, lines) + body)
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

    def _is_body_overdue(self) -> bool:
        """Whether a body comes too slowly on the whole."""
        request = self._parser.body_request
        if self._state != "body" or request is None:
            return False
        elapsed = self._owner.loop_time - self._body_since
        return is_body_overdue(self._limits, elapsed, request.body_size)

    def _get_timeout(self) -> float:
        limits = self._limits
        match self._state:
            case "head":
                return limits.header_timeout if self._parser.in_head else limits.idle_timeout
            case "lingering":
                return LINGER_TIMEOUT
            case "body":
                return limits.body_timeout
            case _:
                return _WRITE_TIMEOUT
