"""One attempt: one request to one worker, its timeouts and response events.

``begin`` sends the request and waits for the response to begin: of a stream that is its first
content, of a unary response all of it. Until then the client has got nothing, so that the pool may
retry on another worker. Then ``read_next`` returns what has arrived, or has it written by a sink as
it arrives. The attempt is its own timeouts (``attempt_timeouts``): it aborts its response.

What must never happen:

- A connection that is used again with a part of a response in it: whatever ends early is aborted.
- A response that ends without StreamEnd or an error, or a failure that no worker's health records.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from http import HTTPStatus
from typing import Final, NoReturn

from msgspec import Struct, field
from msgspec.structs import replace

from backends.deadline_timer import DeadlineTimer
from backends.http.interfaces import HttpClient, UpstreamResponse
from backends.interfaces import (
    EventSink,
    StreamItem,
    Timeouts,
)
from backends.pool.attempt_request import AttemptRequest
from backends.pool.attempt_timeouts import NO_TIMEOUT, AttemptTimeouts
from backends.pool.metrics import PoolMetrics
from backends.pool.settings import DEFAULT_MAX_EMBEDDINGS_SIZE, DEFAULT_MAX_RESPONSE_SIZE
from backends.pool.worker_response import (
    ResponseDocument,
    TranslatedResponse,
    build_worker_error,
    check_content_encoding,
    decode_end,
    has_content,
    select_headers,
)
from backends.pool.worker_state import WorkerState, get_error_kind
from backends.pool.workers import WorkerSlot
from backends.thread_slots import SlotThread, hold_slots
from protocols.core.errors import (
    ClientError,
    DeadlineExceeded,
    GatewayError,
    MemoryExhausted,
    RateLimitExceeded,
    StreamBroken,
    UnsupportedEndpoint,
    WorkerFailed,
    drop_tracebacks,
)
from protocols.core.events import (
    Event,
    StreamEnd,
)
from protocols.core.interfaces import (
    BASIC_KINDS,
    Clock,
    Headers,
    PassthroughReader,
    UpstreamRequest,
    build_unsupported_kind_error,
)
from protocols.core.json_counts import ResponseCounts
from protocols.core.response_headers import COMMON_RESPONSE_HEADERS, ResponseHeaders
from protocols.core.sse import MAX_EVENT_BYTES
from protocols.core.vectors import find_vectors, remove_vectors

_GENERATION_KINDS: Final = ("chat", "completion")
_UNKNOWN_PATH_STATUSES: Final = (404, 405, 501)
"""A worker answers so if it has no API for this kind of request, such as reranking."""
_MAX_ERROR_BYTES: Final = 64 << 10
"""How much of an error body is read."""
_LARGE_BODY: Final = 256 << 10
"""The size from which a unary response, or an event of a stream, is decoded in a thread."""
_MAX_DECODING: Final = 2
"""Large responses and events of a pool that are decoded at the same time."""
_HUGE_BODY: Final = 4 << 20
"""From this size on, one of them is decoded at a time: it holds the interpreter's lock for long."""
_DECODING_FACTOR: Final = 5
"""The memory of a large response while it is decoded and written, as a multiple of its size: the
received text, what is read of it, and what is written. Objects and numbers come on top."""
_VECTORS_FACTOR: Final = 3
"""The same of a response with vectors that are passed on as they are."""
_NUMBER_SIZE: Final = 80
"""Bytes of each number of vectors that are decoded and written."""
_MIN_HELD_BYTES: Final = 64 << 10
"""From this size on, a response that is not complete takes of the gateway's memory budget."""
_MAX_BATCH: Final = 1000
"""The most events of a large event of a stream that are passed on in a turn of the event loop."""
_BODY_END_SECONDS: Final = 1.0
"""How long the rest of a body may take once the response or its error is complete."""
_STATUS_OK: Final = 200
_NO_OUTPUT: Final[StreamItem] = None, ()


class DecodingSlots:
    """Bounds what threads decode: each holds several copies, and the interpreter's lock."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(_MAX_DECODING)
        self._huge = asyncio.Semaphore(1)

    def take(self, size: int) -> AbstractAsyncContextManager[SlotThread]:
        """Wait for a slot for so many bytes; others of a smaller size do not wait for huge ones."""
        return hold_slots(*(() if size < _HUGE_BODY else (self._huge,)), self._all)


class AttemptServices(Struct, frozen=True):
    """Shared by all attempts of a pool."""

    http_client: HttpClient
    timeouts: Timeouts
    clock: Clock
    deadline_timer: DeadlineTimer
    metrics: PoolMetrics = field(default_factory=PoolMetrics)
    response_headers: ResponseHeaders = COMMON_RESPONSE_HEADERS
    """Those of the workers' protocol."""
    max_response_size: int = DEFAULT_MAX_RESPONSE_SIZE
    """The largest unary response. Streams have no such limit: they are not buffered."""
    max_embeddings_size: int = DEFAULT_MAX_EMBEDDINGS_SIZE
    """The same of a response with embeddings."""
    response_counts: ResponseCounts = ResponseCounts()
    """What a unary response may consist of."""
    decoding_slots: DecodingSlots = field(default_factory=DecodingSlots)
    """Taken by what a thread decodes."""


def _refuse_item(_raw: bytes | None, _events: Sequence[Event]) -> bool:
    """Refuse an item before there is a sink."""
    return False


class Attempt(AttemptTimeouts, kw_only=True, eq=False):
    """One request to one worker. Its outcome is recorded in the worker's health.

    Call ``begin``, then ``read_next`` until ``finished``, then ``drain`` unless ``complete``.
    Always call ``close``, which closes the worker's connection if the response is unfinished.
    ``accepted``: the worker sent status 200. ``failure`` is the error that ended the response.
    """

    slot: WorkerSlot
    worker: WorkerState
    request: AttemptRequest
    _services: AttemptServices
    _response_reader: PassthroughReader
    _is_stream: bool
    _response: UpstreamResponse | None = None
    _rate_limited: bool = False
    _had_content: bool = True
    """Whether the item read last had content."""
    _document: ResponseDocument = field(default_factory=ResponseDocument)
    _held_bytes: int = 0
    """Taken of the gateway's memory for the response."""
    _undecoded: int = 0
    """Bytes of an event of the stream that has not ended, or of several without content."""
    _large_chunks: Sequence[bytes] = ()
    """The end of a large event, which a thread has to decode."""
    _decoded_items: list[StreamItem] = field(default_factory=list[StreamItem])
    """What it holds, the last first."""
    _sink: EventSink = _refuse_item
    _last_item: StreamItem = _NO_OUTPUT
    """What ended the use of the sink."""
    finished: bool = False
    """The last event was StreamEnd or an error; else the worker may still be generating."""
    complete: bool = False
    """A unary response has been read to its end."""
    is_large: bool = False
    """The unary response was decoded in a thread."""
    accepted: bool = False
    failure: GatewayError | None = None

    @classmethod
    def create(
        cls, slot: WorkerSlot, request: AttemptRequest, services: AttemptServices
    ) -> "Attempt":
        """An attempt at the worker of ``slot``."""
        timeouts = services.timeouts
        if request.model_timeouts is not None:
            timeouts = request.model_timeouts.override(timeouts)
        is_stream = request.request.stream
        return cls(
            services.deadline_timer,
            request.deadline,
            # A unary response has no first token of its own: only the deadline applies.
            slot.acquired_at + timeouts.first_token if is_stream else NO_TIMEOUT,
            timeouts.idle,
            timeouts.idle_max,
            slot=slot,
            worker=slot.worker,
            request=request,
            _services=services,
            _response_reader=request.make_response_reader(),
            _is_stream=is_stream,
        )

    def __repr__(self) -> str:
        state = "waiting"
        if self.failure is not None:
            state = f"failed: {type(self.failure).__name__}"
        elif self.finished:
            state = "finished"
        elif self.accepted:
            state = "accepted"
        return f"<Attempt at {self.worker.name}, {state}>"

    async def begin(self) -> list[StreamItem]:
        """Send the request and return the first items of the response.

        For a stream these reach to its first content; for a unary response they are all of it.
        Until then the request can be retried on another worker. Raises DeadlineExceeded,
        WorkerError, and the errors that the protocol's adapter reads from the worker.
        """
        worker, request = self.worker, self.request
        config = worker.config
        upstream_request, headers = request.upstream_request, request.request_headers
        if config.credentials is not None:
            upstream_request, headers = config.credentials.authorize(upstream_request, headers)
        worker.waiting_attempts.add(self)
        try:
            self.start_wait(self.slot.acquired_at)
            response = self._response = self._services.http_client.try_send(
                config.url, upstream_request, headers
            )
            if response is None or not await response.wait_headers():
                response = await self._send_on_new_connection(upstream_request, headers)
            if worker.logged_state != "up":
                worker.record_connected()
            if response.status != _STATUS_OK:
                raise await self._read_error(response)
            self.accepted = True
            if "content-encoding" in response.headers:
                check_content_encoding(response.headers["content-encoding"])
            if self._is_stream:
                items = await self._read_beginning(response)
            elif response.complete:
                items = self._read_complete(response.read_available())
            else:
                items = await self._read_unary(response)
            self.complete = response.complete and not self._is_stream
        except GatewayError as error:
            self._raise_failure(error)
        finally:
            worker.waiting_attempts.discard(self)
        if self._is_stream:
            self.request = replace(
                request, upstream_request=request.upstream_request.without_body()
            )
        if self._is_stream or request.request.kind not in _GENERATION_KINDS:
            self._record_first_token()
        return items

    def select_headers(self) -> Headers:
        """The headers of the worker's response that clients may get."""
        response, table = self._response, self._services.response_headers
        if response is None or not any(map(table.is_passed, response.headers)):
            return ()
        return select_headers(table, response.headers, self.worker.config)

    def abort_response(self) -> None:
        """See AttemptTimeouts."""
        if self._response is not None:
            self._response.abort()

    def _read_complete(self, chunks: Sequence[bytes]) -> list[StreamItem]:
        """Decode a unary response whose body has arrived with its head."""
        if sum(map(len, chunks)) > self._max_size:
            raise self._make_too_large_error()
        items = self._decode_unary(chunks)
        self._record_success(items[-1][1])
        return items

    def _decode_unary(self, chunks: Sequence[bytes]) -> list[StreamItem]:
        """Decode a unary response, or the rest of one."""
        reader = self._response_reader
        items: list[StreamItem] = []  # not list[StreamItem](), which costs a hundred times as much
        raw, events = reader.feed(chunks) if chunks else _NO_OUTPUT
        if raw or events:
            items.append((raw, events))
        if not events or type(events[-1]) is not StreamEnd:
            items.append(decode_end(reader))
        return items

    async def _read_unary(self, response: UpstreamResponse) -> list[StreamItem]:
        """Decode all of a unary response: a document at its end, anything else as it comes."""
        document, items, size, is_document = self._document, list[StreamItem](), 0, True
        while not self.finished:
            chunks = response.read_available() or await self._read_body(response)
            is_last = not chunks or response.complete
            if chunks:
                is_document = is_document and (size > 0 or chunks[0].lstrip()[:1] in b"{[")
                size += sum(map(len, chunks))
                self._check_size(size, self._max_size)
                self.has_started = True
                if is_document:
                    document.add(chunks)
                else:
                    item = self._decode_body(chunks)
                    if item[0] or item[1]:
                        items.append(item)
            if is_last and not self.finished:
                items += await self._decode_rest(size)
                self._record_success(items[-1][1])
        self.stop_wait()
        self.has_started = True
        return items

    async def _decode_rest(self, size: int) -> list[StreamItem]:
        """Decode the document, or the end of another response of so many bytes.

        Raises MemoryExhausted without room for what is read and written of it.
        """
        if size < _LARGE_BODY:
            self._measure_document(size)
            return self._decode_document()
        self.is_large = True  # it would block the event loop
        async with self._services.decoding_slots.take(size) as thread:
            self._hold_memory(_VECTORS_FACTOR * size)
            self._hold_memory(await thread.call(self._measure_document, size))
            return await thread.call(self._decode_document)

    def _decode_document(self) -> list[StreamItem]:
        """Decode the document, if there is one, and the end of the response."""
        document = self._document.take()
        return self._decode_unary([document] if document else ())

    def _measure_document(self, size: int) -> int:
        """About how many bytes it will take at most, until what is read of it is written.

        Raises WorkerFailed if it has more objects or values than allowed.
        """
        counts = self._services.response_counts
        if size < _LARGE_BODY and not counts.needs_check(size):
            return 0
        text = self._document.join()
        if self.request.request.kind != "embedding":
            return _DECODING_FACTOR * size + counts.estimate_size(text)
        # Vectors are decoded one by one, and only if they are translated.
        is_translated = isinstance(self._response_reader, TranslatedResponse)
        numbers = text.count(b",") if is_translated else 0
        others = counts.estimate_size(remove_vectors(text, find_vectors(text)))
        return max(_VECTORS_FACTOR * size, _NUMBER_SIZE * numbers) + others

    async def _read_beginning(self, response: UpstreamResponse) -> list[StreamItem]:
        """Decode a stream up to its first content, or a JSON document in place of a stream."""
        items: list[StreamItem] = []
        body, size = self._document, 0
        while not self.finished:
            chunks = response.read_available() or await self._read_body(response)
            is_last = not chunks or response.complete
            if chunks:
                size += sum(map(len, chunks))
                self._check_size(size, MAX_EVENT_BYTES)
                body.add(chunks)
                if self._is_large(chunks):
                    await self._decode_large(chunks)
                    item = self._take_item()
                else:
                    item = self._decode_body(chunks)
                if item[0] or item[1]:
                    items.append(item)
                    if self._decoded_items or has_content(item):
                        break
                self.record_life()
            if is_last and not self.finished:
                if size < _LARGE_BODY:
                    end = self._decode_checked_end(size)
                else:  # it would block the event loop
                    async with self._services.decoding_slots.take(size) as thread:
                        self._hold_memory(_DECODING_FACTOR * size)
                        end = await thread.call(self._decode_checked_end, size)
                self._record_success(end[1])
                items.append(end)
        self.stop_wait()
        self.has_started = True
        body.clear()
        if not self._decoded_items:
            self._hold_memory(0)
        return items

    def _check_size(self, size: int, max_size: int) -> None:
        """Raises WorkerFailed above the limit, MemoryExhausted if there is no room for them."""
        if size > max_size:
            raise self._make_too_large_error()
        if size > _MIN_HELD_BYTES:
            self._hold_memory(size)

    def _hold_memory(self, size: int) -> None:
        """Take so many bytes in all for the response. Raises MemoryExhausted."""
        if added := size - self._held_bytes:
            self.request.reserve_memory(added)
            self._held_bytes = size

    async def read_next(self, sink: EventSink | None = None) -> StreamItem:
        """The next item; the last one ends with StreamEnd. Raises as ``begin`` does.

        ``sink`` receives items as they arrive; returned is the last item, or an empty one if
        ``sink`` accepts no more at once.
        """
        response = self._response
        assert response is not None  # noqa: S101 - it has begun
        if self._decoded_items:
            await asyncio.sleep(0)
            return self._take_item()
        try:
            if sink is not None:
                self._sink, self._last_item = sink, _NO_OUTPUT
                self.wait_next()
                has_ended = await response.forward_to(self._forward_body)
                self.stop_wait()
                if not self._large_chunks:
                    return self._decode_end() if has_ended else self._last_item
                await self._decode_large(self._large_chunks)
                return self._take_item()
            while chunks := await self._read_body(response, had_content=self._had_content):
                if self._is_large(chunks):
                    await self._decode_large(chunks)
                    item = self._take_item()
                else:
                    item = self._decode_body(chunks)
                self._had_content = has_content(item)
                if item[0] or item[1]:
                    return item
            return self._decode_end()
        except GatewayError as error:
            self._raise_failure(error)

    async def drain(self) -> None:
        """Read the rest of the body for up to a second, so that the connection can be reused."""
        response = self._response
        assert response is not None  # noqa: S101 - it has begun
        self.set_drain_deadline(_BODY_END_SECONDS)
        if self._is_stream and self.longest_gap:
            self._services.metrics.stream_gaps.add(self.longest_gap)
        if not response.complete:
            with suppress(GatewayError):
                while not response.complete:
                    await self._read_body(response)

    def close(self) -> None:
        """Stop the timeouts and release the connection."""
        self.deadline_timer.remove(self)
        if self._response is not None:
            self._response.release()

    async def _send_on_new_connection(
        self, upstream_request: UpstreamRequest, headers: Headers
    ) -> UpstreamResponse:
        """Send the request over a new connection and wait for the response headers."""
        services, url = self._services, self.worker.config.url
        pending_response = services.http_client.send_on_new_connection(
            url, upstream_request, services.timeouts.connect, headers
        )
        response = self._response = await self.wait_response(pending_response)
        return response

    async def _read_error(self, response: UpstreamResponse) -> GatewayError:
        """Read the error of a response whose status is not 200."""
        status, headers = response.status, response.headers
        if status < HTTPStatus.BAD_REQUEST:
            return build_worker_error(self.request.read_error, status, headers, b"")
        self.set_drain_deadline(_BODY_END_SECONDS)
        body = bytearray()
        with suppress(GatewayError):  # a part of the body is enough
            while len(body) < _MAX_ERROR_BYTES and (chunks := await self._read_body(response)):
                body += b"".join(chunks)
        payload = bytes(body[:_MAX_ERROR_BYTES])
        self._rate_limited = "retry-after" in headers or b"overloaded" in payload.lower()
        kind = self.request.request.kind
        if kind not in BASIC_KINDS and status in _UNKNOWN_PATH_STATUSES:
            return build_worker_error(
                lambda *_: build_unsupported_kind_error(kind, UnsupportedEndpoint),
                status,
                headers,
                payload,
            )
        return build_worker_error(self.request.read_error, status, headers, payload)

    async def _read_body(
        self, response: UpstreamResponse, *, had_content: bool = True
    ) -> list[bytes]:
        """The next chunks of the body, [] at its end. Raises DeadlineExceeded or StreamBroken."""
        if response.complete:
            return response.read_available()
        self.wait_next(had_content=had_content)
        chunks = await response.read()
        self.stop_wait()
        return chunks

    def _forward_body(self, chunks: Sequence[bytes]) -> bool:
        """Pass the next decoded item on; returns whether more is accepted at once."""
        if self._is_large(chunks):
            self._large_chunks = chunks
            return False
        raw, events = self._response_reader.feed(chunks)
        if raw or events:
            self._undecoded = 0
        if events and type(events[-1]) is StreamEnd:
            self._record_success(events)
            self._last_item = raw, events  # its reader writes it together with the end
            return False
        accepts_more = self._sink(raw, events) if raw or events else True
        if has_content((raw, events)):
            self.record_read()
        else:
            self.record_life()
        return accepts_more

    def _decode_body(self, chunks: Sequence[bytes]) -> StreamItem:
        """Decode the next bytes."""
        raw, events = self._response_reader.feed(chunks)
        if raw or events:
            self._undecoded = 0
        if events and type(events[-1]) is StreamEnd:
            self._record_success(events)
        return raw, events

    def _is_large(self, chunks: Sequence[bytes]) -> bool:
        """Whether an event of the stream may end here that would block the event loop."""
        self._undecoded += sum(map(len, chunks))
        return self._undecoded >= _LARGE_BODY

    async def _decode_large(self, chunks: Sequence[bytes]) -> None:
        """Decode the next bytes in a thread. The bytes of a batch go with its last events."""
        self._large_chunks = ()
        size = self._undecoded
        self._hold_memory(size)
        async with self._services.decoding_slots.take(size) as thread:
            self._hold_memory(_DECODING_FACTOR * size)  # until its events are passed on
            raw, events = await thread.call(self._response_reader.feed, chunks)
        if raw or events:
            self._undecoded = 0
        else:
            self._hold_memory(size)
        start = max(0, len(events) - 1) // _MAX_BATCH * _MAX_BATCH
        self._decoded_items.append((raw, events[start:]))
        early = None if raw is None else b""
        for begin in range(start - _MAX_BATCH, -1, -_MAX_BATCH):
            self._decoded_items.append((early, events[begin : begin + _MAX_BATCH]))

    def _take_item(self) -> StreamItem:
        """The next part of a large event."""
        item = self._decoded_items.pop()
        if not self._decoded_items and not self._undecoded:
            self._hold_memory(0)
        if item[1] and type(item[1][-1]) is StreamEnd:
            self._record_success(item[1])
        return item

    def _decode_checked_end(self, size: int) -> StreamItem:
        """Decode the end of the body if it has no more objects and values than allowed."""
        counts = self._services.response_counts
        if counts.needs_check(size):
            counts.check((self._document.take(),))
        self._document.clear()  # the reader has its own
        return decode_end(self._response_reader)

    @property
    def _max_size(self) -> int:
        """The largest unary response."""
        if self.request.request.kind == "embedding":
            return self._services.max_embeddings_size
        return self._services.max_response_size

    def _decode_end(self) -> StreamItem:
        """Decode the end of the body; the last event is StreamEnd."""
        item = decode_end(self._response_reader)
        self._record_success(item[1])
        return item

    def _record_success(self, events: Sequence[Event]) -> None:
        """Record the end of the response, which is the last of these events."""
        self.finished = True
        self.worker.record_success(self.slot.model)
        end = events[-1]
        if type(end) is StreamEnd and end.has_ignored_usage:
            self.worker.log_ignored_usage(self.request.request.model)

    def _make_too_large_error(self) -> WorkerFailed:
        """The error for a response that exceeds the buffer."""
        if self._is_stream:
            return WorkerFailed(f"the worker sent {MAX_EVENT_BYTES} bytes without content")
        kind = "embeddings" if self.request.request.kind == "embedding" else "response"
        return WorkerFailed(
            f"the worker's response is larger than {self._max_size} bytes (max_{kind}_size)"
        )

    def _record_first_token(self) -> None:
        """Record the time to the first token, or the timeout of it.

        Not for unary text, whose time depends on the length of the text.
        """
        if not self.request.background:
            now = self._services.clock()
            self.worker.latency_average.add(now, now - self.slot.acquired_at)

    def _raise_failure(self, error: GatewayError) -> NoReturn:
        """Record the failure and raise ``error`` or its cause."""
        cause = self.get_cause(error)
        cause.worker_headers = self.select_headers()
        self._record_failure(cause)
        if cause is error:
            raise error
        raise cause from None

    def _drop_response(self, error: GatewayError) -> None:
        """Free what was received, and give its memory back.

        The frames in which the error was raised hold it as well.
        """
        drop_tracebacks(error)
        self._document = ResponseDocument()
        self._decoded_items, self._large_chunks, self._last_item = [], (), _NO_OUTPUT
        self._response_reader = self.request.make_response_reader()
        self._hold_memory(0)

    def _record_failure(self, error: GatewayError) -> None:
        self.failure = error
        self._drop_response(error)
        if self.accepted and self._response is not None:
            self._response.abort()  # further bytes must not be read as another response
        if isinstance(error, MemoryExhausted):
            return  # not the worker's fault
        if isinstance(error, DeadlineExceeded):
            generates = self.request.request.kind in _GENERATION_KINDS
            has_first_token = self._is_stream or not generates
            if error.phase == "first_token" and has_first_token:
                self._record_first_token()
        elif not self.accepted or isinstance(error, StreamBroken):
            self.finished = True
        if not isinstance(error, ClientError) or isinstance(error, RateLimitExceeded):
            self._services.metrics.failures[get_error_kind(error)] += 1
        if not self.request.background:
            self.worker.record_failure(error, overloaded=self._rate_limited, model=self.slot.model)
