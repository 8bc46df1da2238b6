"""Answers of generate, generate_stream and infer.

An event is ``data:`` without a blank, and a stream ends without a mark of its own: with ``details``
the last event names the finish reason, and without them nothing does. Times are in milliseconds,
``queue_wait_time`` is in microseconds.

Source: MindIE-LLM 0695772, single_req_triton_text_infer_interface.cpp (FillResponseBody) and
single_req_triton_token_infer_interface.cpp; for 1.0.RC1 the published page of generate_stream.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from protocols.core.aggregate import UnaryChoice, UnaryResponse
from protocols.core.errors import ClientDisconnected, GatewayError
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    TextDelta,
    Timing,
    Usage,
)
from protocols.core.interfaces import ClientRequest, Clock, Headers, HttpResponse, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.mindie import errors
from protocols.mindie.profiles import MindieProfile

encode_json = msgspec.json.Encoder().encode

STREAM_CONTENT_TYPE = "text/event-stream"
_FINISH_REASONS: dict[FinishReason, str] = {
    "eos": "eos_token",
    "stop": "eos_token",
    "tool_calls": "eos_token",
    "length": "length",
    "content_filter": "stop_sequence",
}

STOPPED_FINISH_REASON: Final = "stop_sequence"
"""The finish reason of what its client stopped: a true end, since the client asked for it."""


def map_finish_reason(reason: FinishReason, profile: MindieProfile) -> str:
    """A finish reason, as every endpoint says it that is not OpenAI's."""
    unknown = "invalid flag" if profile.early else "invalid finishReason"
    return _FINISH_REASONS.get(reason, unknown)


def build_headers(call: ClientRequest) -> Headers:
    """What the server adds to every answer. ``startTime`` is in nanoseconds of Unix time."""
    return ("RequestUUID", call.id), ("startTime", str(round(call.started_at * 1e9)))


def build_json_response(body: bytes) -> HttpResponse:
    """A whole answer, after which the server closes the connection."""
    return HttpResponse(200, body, errors.JSON_HEADERS)


def join_choice_text(choice: UnaryChoice) -> str:
    """All that a choice says, where reasoning has no place of its own."""
    return choice.reasoning + choice.text + choice.refusal


def get_only_choice(answer: UnaryResponse) -> UnaryChoice:
    """The choice of an answer that has one."""
    return answer.choices[0] if answer.choices else UnaryChoice(0)


class ChunkTimer:
    """Milliseconds since the last piece: the backend's figure where it tells one, else measured.

    The first piece counts from the request.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_time = clock()
        self._is_first = True
        self._backend_timing: Timing | None = None

    def set_backend_timing(self, timing: Timing) -> None:
        """The backend's figures for the piece that comes."""
        self._backend_timing = timing

    def measure_chunk(self) -> tuple[int | None, int | None]:
        """The times of prefill and decoding, of which a piece has one."""
        now = self._clock()
        first, told = self._is_first, self._backend_timing
        seconds = now - self._last_time
        if told is not None:
            figure = told.prefill if first else told.decode
            seconds = seconds if figure is None else figure
        self._last_time, self._is_first, self._backend_timing = now, False, None
        spent = round(seconds * 1000)
        return (spent, None) if first else (None, spent)


class _TextDetails(Struct, kw_only=True):
    finish_reason: str | UnsetType = UNSET
    generated_tokens: int
    first_token_cost: None = None
    decode_cost: None = None
    batch_size: int | list[int]
    queue_wait_time: int | list[int]


class _ChunkTimes(Struct):
    prefill_time: int | None
    decode_time: int | None


class _PendingChunk(Struct):
    """An event that may yet turn out to be the last."""

    text: str
    details: _TextDetails
    times: _ChunkTimes | None


class TextEncoder:
    """Writes the answer to generate or generate_stream.

    With details an event is held back until the next has come: the finish reason belongs in the
    last event and nowhere else, and the server has one event for each token, so that an event of
    ours with no text would count as one more. Without details nothing is held.
    """

    content_type = STREAM_CONTENT_TYPE

    def __init__(
        self,
        profile: MindieProfile,
        request: GenerationRequest,
        about: ResponseContext,
        headers: Headers,
    ) -> None:
        self._profile, self._request, self._headers = profile, request, headers
        head = b'{"id":%b,"model_name":%b,"model_version":null,"text_output":'
        self._head = head % (encode_json(request.client_id), encode_json(about.model))
        self._event_head = b"data:" + self._head
        self._with_details = request.want.details
        self._timer = ChunkTimer(about.clock)
        self._pending: _PendingChunk | None = None
        self._finish_reason: str | None = None
        self._token_count = 0
        self._batch_size, self._queue_microseconds = 1, 0
        self._started = False

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._headers

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return b"".join([self._encode_event(event) for event in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """Bare text. What was held back is text all the same, and goes before it."""
        if isinstance(error, ClientDisconnected):
            self._finish_reason = STOPPED_FINISH_REASON
            return self._encode_end()
        return self._flush_pending() + errors.encode_stream_error(error, self._request.timeout)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choice = get_only_choice(answer)
        body = self._head + encode_json(join_choice_text(choice))
        if self._with_details:
            tokens = answer.usage.completion_tokens if answer.usage else choice.tokens
            steps = _list_step_timings(answer.timings, tokens)
            details = _TextDetails(
                finish_reason=map_finish_reason(choice.finish_reason, self._profile),
                generated_tokens=tokens,
                batch_size=[step.batch_size or 1 for step in steps],
                queue_wait_time=[_to_microseconds(step.queue) for step in steps],
            )
            body += b',"details":' + encode_json(details)
        return build_json_response(body + b"}")

    def _encode_event(self, event: Event) -> bytes:
        match event:
            case TextDelta(text):
                return self._encode_text(text, event.tokens)
            case ReasoningDelta(text) | RefusalDelta(text):
                return self._encode_text(text, 1)
            case Timing():
                self._timer.set_backend_timing(event)
                self._batch_size = event.batch_size or self._batch_size
                self._queue_microseconds = (
                    self._queue_microseconds
                    if event.queue is None
                    else _to_microseconds(event.queue)
                )
            case ChoiceEnd(reason):
                self._finish_reason = map_finish_reason(reason, self._profile)
            case Usage():
                self._token_count = max(event.completion_tokens, self._token_count)
            case StreamEnd():
                return self._encode_end()
            case _:
                pass
        return b""

    def _encode_text(self, text: str, tokens: int) -> bytes:
        self._started = True
        if not self._with_details:
            return self._event_head + encode_json(text) + b"}\n\n"
        before = self._flush_pending()
        self._token_count += tokens
        details = _TextDetails(
            generated_tokens=self._token_count,
            batch_size=self._batch_size,
            queue_wait_time=self._queue_microseconds,
        )
        times = None if self._profile.early else _ChunkTimes(*self._timer.measure_chunk())
        self._pending = _PendingChunk(text, details, times)
        return before

    def _encode_end(self) -> bytes:
        """The last event. An answer without any text still has one."""
        out = b"" if self._started else self._encode_text("", 0)
        if self._pending is not None and self._finish_reason is not None:
            self._pending.details.finish_reason = self._finish_reason
            self._pending.details.generated_tokens = self._token_count
        return out + self._flush_pending()

    def _flush_pending(self) -> bytes:
        if self._pending is None:
            return b""
        held, self._pending = self._pending, None
        body = (
            self._event_head + encode_json(held.text) + b',"details":' + encode_json(held.details)
        )
        if held.times is not None:
            body += b"," + encode_json(held.times)[1:-1]
        return body + b"}\n\n"


def _list_step_timings(timings: Sequence[Timing], tokens: int) -> Sequence[Timing]:
    """What was measured of each step. Who measured the answer as a whole waited for it once."""
    if len(timings) > 1:
        return timings
    first = timings[0] if timings else Timing()
    return [first, *[Timing(batch_size=first.batch_size)] * (tokens - 1)][:tokens]


def _to_microseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1_000_000)


class TokensEncoder:
    """Writes the answer to infer, which is never streamed."""

    content_type = STREAM_CONTENT_TYPE

    def __init__(self, request: GenerationRequest, headers: Headers, output: str) -> None:
        self._request, self._headers, self._output_name = request, headers, output

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._headers

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """Nothing: there is no stream of this endpoint."""
        del events
        return b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return errors.encode_stream_error(error, self._request.timeout)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """The ids. A backend that tells none has not answered the question."""
        choice = get_only_choice(answer)
        ids = choice.token_ids
        if choice.tokens and not ids:
            return errors.build_engine_error_response()
        tensor = {
            "name": self._output_name,
            "shape": [1, len(ids)],
            "datatype": "UINT32",
            "data": ids,
        }
        return build_json_response(
            encode_json({"id": self._request.client_id, "outputs": [tensor]})
        )
