"""One try at an answer: from a target's events to a sink.

What goes wrong before the first byte is raised, so that it can be told with a true status, or made
up for by another target. After that it is told in the stream, which then ends without its normal
end. An end is never made up.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from backends.aio import DeadlineTimer
from backends.interfaces import EventSink, RequestContext, StreamItem, StreamItems
from gateway.observability.record import RequestRecord
from gateway.pipeline.http import ResponseWriter
from protocols.core.errors import (
    ClientDisconnected,
    ClientError,
    DeadlineExceeded,
    GatewayError,
    StreamBroken,
)
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    TextDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import Headers, HttpResponse, ResponseEncoder
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import Request

_CONTENT_EVENTS = frozenset({TextDelta, ReasoningDelta, RefusalDelta, ToolCallStart})
"""What begins an answer that streams."""
_TRUNCATED_MESSAGE: Final = "the answer stopped before its end"


class ResponseStrategy(Protocol):
    """How the answer comes about: translated, or relayed."""

    unsupported_parameters: tuple[UnsupportedParameter, ...]
    """What of the request is lost, and told."""

    @property
    def request(self) -> Request:
        """What is asked, as far as it was read."""

    def get_encoder(self) -> ResponseEncoder:
        """What writes the answer; the same one each time."""

    def get_stream_headers(self) -> Headers:
        """A stream's headers, once its first events are there."""

    def process_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """What these events of a stream come to; each batch is told once, in its turn."""

    def build_response(self, events: Sequence[Event], body: bytes | None) -> HttpResponse:
        """An answer in one piece; ``body`` where a worker wrote it already.

        Raises StreamBroken where the events are not those of a whole answer.
        """

    async def collect(self) -> StreamItem:
        """All of an answer in one piece, heard; its last event is Done, or it broke off."""

    def stream(self, take: EventSink | None = None) -> StreamItems:
        """The answer; ends with Done or raises. Closing it stops the work at once.

        See ``backends.interfaces.SupportsPush`` for ``take``.
        """


class Responder(Struct, eq=False):
    """One request, one target, one sink."""

    _strategy: ResponseStrategy
    _context: RequestContext
    _writer: ResponseWriter
    _record: RequestRecord
    _deadline_timer: DeadlineTimer
    """It has the context's clock."""
    _headers: Headers = ()
    """Headers of the response beside the strategy's: the rate-limit headers."""
    _task: asyncio.Task[Any] | None = None
    """What answers, as long as it may be ended."""
    _is_cancelled: bool = False
    """Whether it was ended."""
    _stop_reason: GatewayError | None = None
    """Why it was stopped, if it was."""
    _write_blocked_since: float = math.inf
    """Since when the client is to take what was written, by the context's clock."""
    _is_client_stalled: bool = False
    _has_content: bool = False
    """Whether some of the answer itself was written."""
    _is_stream_complete: bool = False
    _is_end_written: bool = False
    """Whether a stream's end was written: whatever fails now, its client misses nothing."""
    _finish_reasons: list[FinishReason] = []

    @property
    def record(self) -> RequestRecord:
        """What is known of it so far."""
        return self._record

    @property
    def age(self) -> float:
        """Seconds since its request was read."""
        return self._get_elapsed()

    @property
    def started(self) -> bool:
        """Whether some of its answer was passed on."""
        return self._writer.started

    def stop(self, why: GatewayError | None = None) -> None:
        """End it, since its client says so, or who runs the gateway: that is ``why``."""
        self._stop_reason = why or ClientDisconnected("the request was stopped")
        self._cancel_task()

    async def run(self, live: set["Responder"], *, stream: bool) -> None:
        """Answer, as one of those that are ``live``. Raises GatewayError while nothing was sent."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        cancelled, context = task.cancelling(), self._context
        live.add(self)
        try:
            self._deadline_timer.add(self, context.deadline.expiry_within(context.timeouts.idle))
            self._task = task
            if stream:
                await self._stream_events()
            else:
                self._send_unary(*await self._strategy.collect())
        except asyncio.CancelledError:
            if self._is_end_written:
                return
            if (
                not self._is_cancelled or task.cancelling() > cancelled + 1
            ):  # others want it to end, too
                raise
            if self._is_client_stalled:
                self._abandon_client()
            else:
                self._handle_error(
                    self._stop_reason or DeadlineExceeded("the request's time is up")
                )
        except GatewayError as error:
            self._handle_error(error)
        finally:
            self._task = None
            live.discard(self)
            if self._is_cancelled:
                task.uncancel()
            self._deadline_timer.remove(self)
            if context.first_attempt_at is not None:
                self._record.overhead = context.first_attempt_at - context.received_at

    def _cancel_task(self) -> None:
        """Let what answers run no further."""
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    def on_deadline(self, now: float) -> None:
        """Look whether time is up, and whether the client still takes what is written.

        One that holds up a write for as long as a worker may be silent would keep its worker's
        place, and is let go.
        """
        ends, idle = self._context.deadline.expires_at, self._context.timeouts.idle
        self._is_client_stalled = self._write_blocked_since + idle <= now
        if ends <= now or self._is_client_stalled:
            self._cancel_task()
        else:
            self._deadline_timer.add(self, min(ends, self._write_blocked_since + idle, now + idle))

    async def _stream_events(self) -> None:
        """Write events as they come.

        The answer is opened by its first bytes, so that what fails before them gets a true status.
        Its end is written with its last piece.
        """
        sink = self._writer
        pieces = self._strategy.stream(self._write_events)
        try:
            async for data, events in pieces:
                more = self._write_events(data, events)
                if self._is_stream_complete:
                    self._finish_stream()
                elif not more:
                    self._write_blocked_since = self._context.clock()
                    await sink.drain()
                    self._write_blocked_since = math.inf
        finally:
            await pieces.aclose()
        self._finish_stream()

    def _finish_stream(self) -> None:
        """All has been said. Raises StreamBroken where it has not."""
        if self._is_end_written:
            return
        self._check_complete()
        if not self._writer.started:
            self._start_response(self._get_elapsed())
        self._writer.finish()
        self._is_end_written = True

    def _write_events(self, data: bytes | None, events: Sequence[Event]) -> bool:
        """Write what came; whether the client takes more at once."""
        events = self._strategy.process_events(events)
        out = (
            self._strategy.get_encoder().encode_events(events) if data is None and events else data
        )
        self._record.tokens += self._record_events(events)
        if out:
            if not self._has_content:
                self._has_content = self._begin_content(events)
            self._writer.write(out)
        return not (self._writer.started and self._writer.needs_drain)

    def _send_unary(self, body: bytes | None, said: Sequence[Event]) -> None:
        """Send an answer in one piece."""
        if not said or type(said[-1]) is not StreamEnd:
            raise StreamBroken(_TRUNCATED_MESSAGE)
        record, reasons = self._record, []
        for event in said:
            if type(event) is ChoiceEnd:
                reasons.append(event.finish_reason)
            elif type(event) is Usage:
                record.usage = event
        record.finish_reasons = tuple(reasons)
        send_reply(self._writer, self._strategy.build_response(said, body), record, self._headers)

    def _check_complete(self) -> None:
        """Raises StreamBroken unless all has been said."""
        if not self._is_stream_complete:
            raise StreamBroken(_TRUNCATED_MESSAGE)
        self._record.finish_reasons = tuple(self._finish_reasons)

    def _record_events(self, events: Sequence[Event]) -> int:
        """Keep what an exchange is told by; gives how many tokens were said."""
        tokens = 0
        for event in events:
            if type(event) is TextDelta:
                tokens += event.tokens
            elif type(event) is Usage:
                self._record.usage = event
            elif type(event) is ChoiceEnd:
                self._finish_reasons.append(event.finish_reason)
            elif type(event) is StreamEnd:
                self._is_stream_complete = True
        return tokens

    def _begin_content(self, events: Sequence[Event]) -> bool:
        """Open the answer, if it is not open; whether these events say something of it."""
        elapsed = self._get_elapsed()
        if not self._writer.started:
            self._start_response(elapsed)
        if said := not _CONTENT_EVENTS.isdisjoint(map(type, events)):
            self._record.first_token = elapsed
        return said

    def _start_response(self, elapsed: float) -> None:
        record = self._record
        record.status = 200
        record.first_byte = elapsed
        headers = (
            ("x-request-id", record.id),
            *self._headers,
            *self._strategy.get_stream_headers(),
        )
        self._writer.start(200, headers)

    def _get_elapsed(self) -> float:
        return self._context.clock() - self._context.started_at

    def _abandon_client(self) -> None:
        """Leave the answer as it is: what more is written would not be read either."""
        record_error(self._record, ClientDisconnected("the client does not read"))
        self._record.outcome = "cancelled"

    def _handle_error(self, error: GatewayError) -> None:
        if self._is_end_written:
            return
        if not self._writer.started:
            raise error
        record_error(self._record, error)
        self._record.outcome = "truncated"
        self._writer.write(self._strategy.get_encoder().encode_error_event(error))
        self._writer.finish()


def send_reply(
    writer: ResponseWriter, response: HttpResponse, record: RequestRecord, extra: Headers = ()
) -> None:
    """Send a response in one piece. ``extra`` headers come before its own."""
    record.status = response.status
    headers = (("x-request-id", record.id), *extra, *response.headers)
    writer.send_response(response.status, headers, response.body)


def record_error(record: RequestRecord, error: GatewayError) -> None:
    """What went wrong, for the record."""
    record.error = type(error).__name__
    if isinstance(error, ClientError):
        record.outcome = "client_error"
    else:
        record.outcome = "worker_error" if error.origin == "worker" else "gateway_error"
