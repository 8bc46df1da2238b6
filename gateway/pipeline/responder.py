"""Writes the response of one attempt: from a target's events to the client.

A stream's events are written by the callback that reads them (``_write_events``), so that a token
wakes no task; the task waits for the end, or for a client that reads too slowly. The response
begins with its first bytes. A unary response is built of the same events, when all are there.

An error before the first byte is raised, so that the caller gets its status, or a fallback gets the
request. An error after that is written into the stream, which then ends without its normal end.

What must never happen:

- An invented end: only StreamEnd ends a stream normally, and nothing is written behind an end.
- A task that swallows a cancellation of somebody else: it ends by its own deadline, by ``stop``, or
  by the client that left, and none of these is mistaken for a cancellation from outside.
- A client that reads nothing and holds its worker for longer than the idle timeout.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from backends.deadline_timer import DeadlineTimer
from backends.thread_slots import hold_slots
from gateway.observability.record import RequestRecord
from gateway.pipeline.http import CancellableRequest, ResponseWriter
from gateway.pipeline.state import RequestState
from gateway.pipeline.strategies import TargetAttempt
from protocols.core.errors import (
    ClientDisconnected,
    ClientError,
    DeadlineExceeded,
    GatewayError,
    StreamBroken,
    UnknownFinishReason,
    drop_tracebacks,
)
from protocols.core.events import (
    INCOMPLETE_REASONS,
    ChoiceEnd,
    Classification,
    Embedding,
    Event,
    FinishReason,
    HostedToolCall,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenList,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import Headers, HttpResponse, SupportsHeartbeat
from protocols.core.response_headers import merge_headers
from protocols.core.response_losses import LossyEvent
from protocols.core.worker_error_keys import restore_worker_keys

_CONTENT_EVENTS = frozenset({TextDelta, ReasoningDelta, RefusalDelta, ToolCallStart})
"""The events with which the content of a streamed response begins."""
_PROTOCOL_EVENTS: Final = frozenset(
    {HostedToolCall, ResponseExtra, ResponseMetadata, ToolCallStart}
)
"""The events that only some encoders write."""
_PIECES: Final = frozenset({ReasoningDelta, RefusalDelta})
"""Those of them that are pieces of one whole, which is reported once."""
_LISTS: Final = frozenset({Classification, Embedding, TokenList})
"""The events that hold many values."""
_MAX_BLOCKED_SECONDS: Final = 30.0
"""The longest time for which a client may block a write."""
_MANY_EVENTS: Final = 1000
"""A unary response of more events is written in a thread."""
_MANY_VALUES: Final = 10_000
"""The same of more numbers of vectors and classes, and ids of tokens."""
_TRUNCATED_MESSAGE: Final = "the response ended early"


class HeartbeatTimer:
    """Writes to the client of a stream while its target is silent."""

    def __init__(
        self, encoder: SupportsHeartbeat, timer: DeadlineTimer, write: Callable[[bytes], None]
    ) -> None:
        self.has_output = False
        """Whether the target sent something since the last check."""
        self._encoder = encoder
        self._interval = encoder.heartbeat_interval
        self._timer = timer
        self._write = write
        self._silence = 0.0
        timer.add(self, timer.clock() + self._interval)

    def on_deadline(self, now: float) -> None:
        """Write if the target was silent."""
        self._silence = 0.0 if self.has_output else self._silence + self._interval
        self.has_output = False
        if self._silence and (data := self._encoder.encode_heartbeat(self._silence)):
            self._write(data)
        self._timer.add(self, now + self._interval)

    def stop(self) -> None:
        """Write nothing more."""
        self._timer.remove(self)


class Responder(Struct, eq=False):
    """Writes one target's response to one request."""

    _request: RequestState
    _strategy: TargetAttempt
    _deadline_timer: DeadlineTimer
    """Uses the context's clock."""
    _encoding_slots: asyncio.Semaphore
    """Taken by a large response that a thread writes: it holds several copies of it."""
    _loop: asyncio.AbstractEventLoop | None = None
    """The event loop, if it is known: asking for the running one takes a system call."""
    _task: asyncio.Task[Any] | None = None
    """The task that runs it, as long as it may be cancelled."""
    _is_cancelled: bool = False
    """Whether this class cancelled the task."""
    _stop_reason: GatewayError | None = None
    """Why ``stop`` was called, if it was."""
    _blocked_until: float = math.inf
    """How long a write may wait for the client that waits for it now, by the context's clock."""
    _is_client_stalled: bool = False
    _has_content: bool = False
    """Whether some content was written."""
    _has_unwritten_content: bool = False
    """Whether there was content whose bytes come with those of later events."""
    _is_stream_complete: bool = False
    _is_end_written: bool = False
    """Whether the end of the stream was written. A later failure does not concern the client."""
    _finish_reasons: list[FinishReason] = []
    _reported_content: set[tuple[type[Event], int]] = set()
    """The kinds of content, each of a choice, of which a piece was looked at."""
    _last_chunk: bytes = b""
    """The end of a stream whose response has to be stored first: its client may use it at once."""
    _heartbeat: HeartbeatTimer | None = None
    """Set while a stream has to be kept alive."""

    def __repr__(self) -> str:
        state = "not begun"
        if self._is_end_written:
            state = "ended"
        elif self.started:
            state = "begun"
        return f"<Responder {state} for {self._request!r}>"

    @property
    def record(self) -> RequestRecord:
        """The request's record so far."""
        return self._request.record

    @property
    def age(self) -> float:
        """Seconds since the request was read."""
        return self._get_elapsed()

    @property
    def started(self) -> bool:
        """Whether the response has begun."""
        return self._request.writer.started

    def stop(self, error: GatewayError | None = None) -> None:
        """Cancel the request with this error; by default, as if its client had cancelled it."""
        self._stop_reason = error or ClientDisconnected("the request was stopped")
        self._cancel_task()

    async def run(self, running_requests: set[CancellableRequest], *, stream: bool) -> None:
        """Write the response; meanwhile it is one of ``running_requests``.

        Raises GatewayError before the first byte.
        """
        self._task = task = asyncio.current_task(self._loop)
        assert task is not None  # noqa: S101 - a coroutine runs in one
        cancelled, context, timer = task.cancelling(), self._request.context, self._deadline_timer
        running_requests.add(self)
        try:
            timer.add(self, context.deadline.expiry_within(math.inf))
            if stream:
                await self._stream_events()
            else:
                await self._send_unary()
        except asyncio.CancelledError:
            if self._is_end_written:
                return
            if (
                not self._is_cancelled or task.cancelling() > cancelled + 1
            ):  # somebody else cancels it, too
                raise
            if self._is_client_stalled:
                self._abandon_client()
            else:
                await self._handle_error(
                    self._stop_reason or DeadlineExceeded("the request's time is up")
                )
        except GatewayError as error:
            await self._handle_error(error)
        finally:
            self._task = None
            running_requests.discard(self)
            if self._is_cancelled:
                task.uncancel()
            timer.remove(self)
            record, history = self._request.record, context.attempt_history
            if context.first_attempt_at is not None:
                record.overhead = context.first_attempt_at - context.received_at
            record.worker = history.worker
            if history.failures:
                record.worker_failures = history.failures

    def _cancel_task(self) -> None:
        """Cancel the task once."""
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    def on_deadline(self, now: float) -> None:
        """End a request whose time is up, or whose client has blocked a write for too long."""
        self._is_client_stalled = self._blocked_until <= now
        if self._is_client_stalled or self._request.context.deadline.expires_at <= now:
            self._cancel_task()
        else:
            self._set_deadline()

    def _set_deadline(self) -> None:
        """Set the timer for the end of the request's time, or of a blocked write."""
        deadline = self._request.context.deadline
        self._deadline_timer.add(self, min(deadline.expires_at, self._blocked_until))

    async def _drain(self) -> None:
        """Wait until the client has read enough.

        A client that blocks a write for longer than the idle timeout, or 30 seconds, is
        disconnected, since it would occupy its worker.
        """
        context = self._request.context
        self._blocked_until = context.clock() + min(context.timeouts.idle, _MAX_BLOCKED_SECONDS)
        self._set_deadline()
        await self._request.writer.drain()
        self._blocked_until = math.inf
        self._set_deadline()

    async def _send_unary(self) -> None:
        """Send the response, when all of its events are there."""
        request, attempt = self._request, self._strategy
        body: bytes | None = None
        received: list[Event] = []
        for data, batch in await attempt.send_unary():
            body = data or body
            received += batch
        is_encoded = body is None
        if len(received) > _MANY_EVENTS:
            events = await self._read_many(received, is_encoded=is_encoded)
        else:
            events = attempt.process_events(received)
            self._record_events(events, is_encoded=is_encoded)
        self._check_complete()
        given = attempt.get_worker_headers() if request.context.worker_headers else ()
        build = attempt.build_response
        if request.context.offload_to_thread or (is_encoded and _is_long(events)):
            async with hold_slots(self._encoding_slots) as thread:
                response = await thread.call(build, events, body)
        else:
            response = build(events, body)
        request.record.unsupported_parameters = attempt.unsupported_parameters
        if request.store_response is not None:
            await self._save_response()
        if given:
            headers = merge_headers(response.headers, given, request.headers)
            response = replace(response, headers=headers)
        send_reply(request.writer, response, request.record, request.headers)

    async def _stream_events(self) -> None:
        """Write events as they come.

        The response begins with its first bytes, so that an earlier failure gets an error status.
        Its end is written with its last chunk.
        """
        encoder = self._strategy.get_heartbeat_encoder()
        if encoder is not None:
            self._heartbeat = HeartbeatTimer(encoder, self._deadline_timer, self._write_heartbeat)
        items = self._strategy.stream(self._write_events)
        try:
            async for data, events in items:
                more = self._write_events(data, events)
                del data, events  # they are written: a client that does not read holds no more
                if self._is_stream_complete:
                    if self._request.store_response is not None:
                        await self._save_response()
                    self._finish_stream()
                elif not more:
                    await self._drain()
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            await items.aclose()
        if self._request.store_response is not None:
            await self._save_response()
        self._finish_stream()

    async def _save_response(self) -> None:
        """Store a response that has ended, if it has to be, and then write its last chunk."""
        save, self._request.store_response = self._request.store_response, None
        response = self._strategy.get_stored_response()
        if save is not None and response is not None:
            await save(response)
        if chunk := self._last_chunk:
            self._last_chunk = b""
            self._request.writer.write(chunk)

    def _finish_stream(self) -> None:
        """Write the end of the stream. Raises StreamBroken if it is incomplete."""
        if self._is_end_written:
            return
        self._check_complete()
        self._request.record.unsupported_parameters = self._strategy.unsupported_parameters
        if not self._request.writer.started:
            self._start_response(self._get_elapsed())
        self._request.writer.finish()
        self._is_end_written = True

    def _write_events(self, data: bytes | None, events: Sequence[Event]) -> bool:
        """Write a batch of events. Returns whether the client takes more at once."""
        request, attempt = self._request, self._strategy
        writer, chunk = request.writer, data
        events = attempt.process_events(events)
        if data is None and events:
            chunk = attempt.get_encoder().encode_events(events)
            attempt.report_unwritten()
        request.record.tokens += self._record_events(events)
        if not self._has_content:
            self._has_content = self._begin_content(chunk, events)
        if chunk:
            if request.store_response is not None and self._is_stream_complete:
                self._last_chunk = chunk
            else:
                writer.write(chunk)
            if self._heartbeat is not None:
                self._heartbeat.has_output = True
        return not (writer.started and writer.needs_drain)

    def _write_heartbeat(self, data: bytes) -> None:
        """Write to a client that reads; begin the response if it has not begun."""
        if self._is_end_written or self._blocked_until < math.inf:
            return
        if not self._request.writer.started:
            self._start_response(self._get_elapsed())
        self._request.writer.write(data)
        self._request.writer.flush()

    async def _read_many(self, received: Sequence[Event], *, is_encoded: bool) -> Sequence[Event]:
        """The events of a large unary response, read in several turns of the event loop."""
        events: list[Event] = []
        for start in range(0, len(received), _MANY_EVENTS):
            await asyncio.sleep(0)
            batch = self._strategy.process_events(received[start : start + _MANY_EVENTS])
            self._record_events(batch, is_encoded=is_encoded)
            events += batch
        return events

    def _check_complete(self) -> None:
        """Raises StreamBroken unless the stream is complete."""
        if not self._is_stream_complete:
            raise StreamBroken(_TRUNCATED_MESSAGE)
        self._request.record.finish_reasons = tuple(self._finish_reasons)

    def _record_events(self, events: Sequence[Event], *, is_encoded: bool = False) -> int:
        """Note usage and finish reasons for the record. Returns the number of text tokens.

        ``is_encoded``: see ``TargetAttempt.report_lost_event``.
        """
        tokens = 0
        for event in events:
            if type(event) is TextDelta:
                tokens += event.tokens
            elif type(event) is Usage:
                self._request.record.usage = event
                if event.has_details:
                    self._report_lost_event(event)
            elif type(event) is ChoiceEnd:
                self._record_end(event)
            elif type(event) is StreamEnd:
                self._is_stream_complete = True
            elif type(event) in _PROTOCOL_EVENTS:
                self._report_lost_event(event, is_encoded=is_encoded)  # type: ignore[arg-type]
            elif type(event) in _PIECES:
                self._report_lost_piece(event)  # type: ignore[arg-type]
        return tokens

    def _record_end(self, event: ChoiceEnd) -> None:
        """Note the finish reason. Report one that the client does not get.

        A word that only the client may know is passed on, but it is no success.
        """
        self._finish_reasons.append(event.finish_reason)
        if event.own_word is not None and event.finish_reason == "unknown":
            record_error(self.record, UnknownFinishReason(event.own_word))
        elif event.lost_word is not None or event.finish_reason in INCOMPLETE_REASONS:
            self._report_lost_event(event)

    def _report_lost_piece(self, event: ReasoningDelta | RefusalDelta) -> None:
        """Report a piece of content once for each choice, and each signature."""
        whole = (type(event), event.index)
        if whole not in self._reported_content or (type(event) is ReasoningDelta and event.at):
            self._report_lost_event(event)
            if event.text:
                self._reported_content.add(whole)

    def _report_lost_event(self, event: LossyEvent, *, is_encoded: bool = False) -> None:
        self._strategy.report_lost_event(event, is_encoded=is_encoded)
        self._request.record.unsupported_parameters = self._strategy.unsupported_parameters

    def _begin_content(self, chunk: bytes | None, events: Sequence[Event]) -> bool:
        """Begin the response with its first bytes. Returns whether they have content."""
        has_content = self._has_unwritten_content or not _CONTENT_EVENTS.isdisjoint(
            map(type, events)
        )
        if not chunk:
            self._has_unwritten_content = has_content
            return False
        elapsed = self._get_elapsed()
        if not self._request.writer.started:
            self._start_response(elapsed)
        if has_content:
            self._request.record.first_token = elapsed
            self._strategy.release_body()
            self._request.release_body()
        return has_content

    def _start_response(self, elapsed: float) -> None:
        record = self._request.record
        record.status = 200
        record.first_byte = elapsed
        request, attempt = self._request, self._strategy
        given = attempt.get_worker_headers() if request.context.worker_headers else ()
        headers = attempt.get_stream_headers()
        if given:
            headers = merge_headers(headers, given, request.headers)
        request.writer.start(200, (("x-request-id", record.id), *request.headers, *headers))

    def _get_elapsed(self) -> float:
        return self._request.context.clock() - self._request.context.received_at

    def _abandon_client(self) -> None:
        """End without a further write, which the client would not read either."""
        record_error(self._request.record, ClientDisconnected("the client does not read"))
        self._request.record.outcome = "cancelled"

    async def _handle_error(self, error: GatewayError) -> None:
        if self._is_end_written:
            return
        if not self._request.writer.started:
            raise error
        record_error(self._request.record, error)
        self._request.record.outcome = "truncated"
        written = self._strategy.get_encoder().encode_error_event(error)
        self._last_chunk = restore_worker_keys(written, error, self._request.adapter.name)
        drop_tracebacks(error)
        await self._save_response()
        self._request.writer.finish()


def _is_long(events: Sequence[Event]) -> bool:
    """Whether it takes milliseconds to write these events, whatever backend they are of."""
    if len(events) > _MANY_EVENTS:
        return True
    if _LISTS.isdisjoint(map(type, events)):
        return False
    count = 0
    for event in events:
        if type(event) is Embedding:
            count += len(event.values)
        elif type(event) is TokenList:
            count += len(event.ids)
        elif type(event) is Classification:
            count += len(event.probabilities)
    return count > _MANY_VALUES


def send_reply(
    writer: ResponseWriter, response: HttpResponse, record: RequestRecord, extra: Headers = ()
) -> None:
    """Send a response in one piece. ``extra`` headers come before its own."""
    record.status = response.status
    headers = (("x-request-id", record.id), *extra, *response.headers)
    writer.send_response(response.status, headers, response.body)


def record_error(record: RequestRecord, error: GatewayError) -> None:
    """Note an error and its outcome in the record."""
    record.error = type(error).__name__
    if isinstance(error, ClientError):
        record.outcome = "client_error"
    else:
        record.outcome = "worker_error" if error.origin == "worker" else "gateway_error"
