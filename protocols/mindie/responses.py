"""Events to responses: generate and infer; native, TGI and vLLM style.

A generate event is ``data:`` without a space. A stream has no end marker: with ``details``, the
last event holds the finish reason. Times are in milliseconds, ``queue_wait_time`` is in
microseconds.

Streams of native and TGI style end with an event that repeats the whole text. The gateway adds this
event, which has no token, so no text needs to be held back.

Source: MindIE-LLM 0695772, single_req_triton_text_infer_interface.cpp (FillResponseBody),
single_req_triton_token_infer_interface.cpp, single_req_self_develop_infer_interface.cpp,
single_req_tgi_text_infer_interface.cpp, single_req_vllm_infer_interface.cpp; for 1.0.RC1 the
published page of generate_stream.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

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
    StreamStart,
    TextDelta,
    Timing,
    Usage,
)
from protocols.core.interfaces import (
    ClientRequest,
    Clock,
    Headers,
    HttpResponse,
    ResponseContext,
    ResponseEncoder,
)
from protocols.core.request import GenerationRequest
from protocols.core.response_losses import (
    NOTHING_WRITTEN,
    ONE_TEXT,
    get_content_losses,
    get_single_losses,
    get_written_details,
)
from protocols.core.sse import format_event as framed
from protocols.mindie import errors
from protocols.mindie.params import MindieProfile

encode_json = msgspec.json.Encoder().encode

STREAM_CONTENT_TYPE = "text/event-stream"
FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    "eos": "eos_token",
    "stop": "eos_token",
    "tool_calls": "eos_token",
    "length": "length",
    "content_filter": "stop_sequence",
    "unknown": "invalid finishReason",
}
EARLY_FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    **FINISH_REASONS,
    "unknown": "invalid flag",
}

STOPPED_FINISH_REASON: Final = "stop_sequence"
"""The finish reason of a request that its client cancelled."""


def map_finish_reason(end: ChoiceEnd | UnaryChoice, profile: MindieProfile) -> str:
    """Map a finish reason to the names of the endpoints that are not OpenAI-style."""
    reasons = EARLY_FINISH_REASONS if profile.early else FINISH_REASONS
    return end.own_word or reasons[end.finish_reason]


def build_headers(call: ClientRequest) -> Headers:
    """The headers of every response. ``startTime`` is in nanoseconds of Unix time."""
    return ("RequestUUID", call.id), ("startTime", str(round(call.started_at * 1e9)))


def build_json_response(body: bytes) -> HttpResponse:
    """Build a unary response, after which the server closes the connection."""
    return HttpResponse(200, body, errors.JSON_HEADERS)


class KeepAliveEncoder:
    """Encodes a unary response as another encoder does, but keeps the connection."""

    hidden_reasons = frozenset({"content_filter"})

    def __init__(self, encoder: ResponseEncoder) -> None:
        self.content_type = encoder.content_type
        self.extra_source = getattr(encoder, "extra_source", "")
        self.content_losses = get_content_losses(encoder)
        self.written_details = get_written_details(encoder)
        self.losses = get_single_losses(encoder)
        self.headers = encoder.headers
        self.encode_events = encoder.encode_events
        self.encode_error_event = encoder.encode_error_event
        self._encode_unary = encoder.encode_unary

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        reply = self._encode_unary(response)
        return HttpResponse(reply.status, reply.body, errors.keep_connection(reply.headers))


def join_choice_text(choice: UnaryChoice) -> str:
    """The whole text of a choice, including reasoning, which has no field of its own."""
    return choice.reasoning + choice.text + choice.refusal


def get_only_choice(answer: UnaryResponse) -> UnaryChoice:
    """Return the only choice."""
    return answer.choices[0] if answer.choices else UnaryChoice(0)


class ChunkTimer:
    """Milliseconds since the last chunk: the backend's value if it reports one, else measured.

    The first chunk counts from the start of the request.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_time = clock()
        self._is_first = True
        self._backend_timing: Timing | None = None

    def set_backend_timing(self, timing: Timing) -> None:
        """Set the backend's timing of the next chunk."""
        self._backend_timing = timing

    def measure_chunk(self) -> tuple[int | None, int | None]:
        """Return prefill time and decode time in milliseconds; a chunk has only one of them."""
        now = self._clock()
        first, timing = self._is_first, self._backend_timing
        seconds = now - self._last_time
        if timing is not None:
            reported = timing.prefill if first else timing.decode
            seconds = seconds if reported is None else reported
        self._last_time, self._is_first, self._backend_timing = now, False, None
        milliseconds = round(seconds * 1000)
        return (milliseconds, None) if first else (None, milliseconds)


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
    """An event that may be the last of the stream."""

    text: str
    details: _TextDetails
    times: _ChunkTimes | None


class BaseEncoder:
    """What the encoders share: the headers, and the end of a stream that breaks off."""

    content_type = STREAM_CONTENT_TYPE
    hidden_reasons = frozenset({"content_filter"})
    content_losses = ONE_TEXT

    def __init__(self, request: GenerationRequest, headers: Headers) -> None:
        self._request, self._headers = request, headers

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._headers

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return b"".join([self._encode_event(event) for event in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """Encode an error as plain text. A request that its client cancelled ends normally."""
        if isinstance(error, ClientDisconnected):
            return self._encode_stopped()
        return errors.encode_stream_error(error, self._request.timeout)

    def _encode_event(self, event: Event) -> bytes:
        """Encode an event of a stream; empty for an endpoint without streams."""
        del event
        return b""

    def _encode_stopped(self) -> bytes:
        """Encode the end of a request that its client cancelled."""
        return b""


class TextEncoder(BaseEncoder):
    """Encodes a generate or generate_stream response.

    With details, each event is held until the next one: only the last event holds the finish
    reason, and the server sends one event for each token, so an extra event without text would
    count as a token. Without details, nothing is held.
    """

    def __init__(
        self,
        profile: MindieProfile,
        request: GenerationRequest,
        context: ResponseContext,
        headers: Headers,
    ) -> None:
        super().__init__(request, headers)
        self._profile = profile
        head = b'{"id":%b,"model_name":%b,"model_version":null,"text_output":'
        self._head = head % (encode_json(request.client_id), encode_json(context.model))
        self._event_head = b"data:" + self._head
        self._with_details = request.response_options.details
        self._timer = ChunkTimer(context.clock)
        self._pending: _PendingChunk | None = None
        self._finish_reason: str | None = None
        self._token_count = 0
        self._batch_size, self._queue_microseconds = 1, 0
        self._started = False

    def encode_error_event(self, error: GatewayError) -> bytes:
        """Encode an error, after the held event."""
        text = super().encode_error_event(error)
        return self._flush_pending() + text

    def _encode_stopped(self) -> bytes:
        self._finish_reason = STOPPED_FINISH_REASON
        return self._encode_end()

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choice = get_only_choice(answer)
        body = self._head + encode_json(join_choice_text(choice))
        if self._with_details:
            tokens = answer.usage.completion_tokens if answer.usage else choice.tokens
            steps = _list_step_timings(answer.timings, tokens)
            details = _TextDetails(
                finish_reason=map_finish_reason(choice, self._profile),
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
                waited, known = event.queue, self._queue_microseconds
                self._queue_microseconds = known if waited is None else _to_microseconds(waited)
            case ChoiceEnd():
                self._finish_reason = map_finish_reason(event, self._profile)
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
        """Encode the last event. A response without text still has one."""
        out = b"" if self._started else self._encode_text("", 0)
        if self._pending is not None and self._finish_reason is not None:
            self._pending.details.finish_reason = self._finish_reason
            self._pending.details.generated_tokens = self._token_count
        return out + self._flush_pending()

    def _flush_pending(self) -> bytes:
        if self._pending is None:
            return b""
        chunk, self._pending = self._pending, None
        body = self._event_head + encode_json(chunk.text)
        body += b',"details":' + encode_json(chunk.details)
        if chunk.times is not None:
            body += b"," + encode_json(chunk.times)[1:-1]
        return body + b"}\n\n"


_MAX_STEPS: Final = 1 << 16
"""How many steps are listed: their number is the worker's claim."""


def _list_step_timings(timings: Sequence[Timing], tokens: int) -> Sequence[Timing]:
    """The timing of each step; a backend that timed only the whole response gives one value."""
    if len(timings) > 1:
        return timings
    first, tokens = timings[0] if timings else Timing(), min(tokens, _MAX_STEPS)
    return [first, *[Timing(batch_size=first.batch_size)] * (tokens - 1)][:tokens]


def _to_microseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1_000_000)


class TokensEncoder(BaseEncoder):
    """Encodes an infer response, which is never streamed."""

    content_losses = NOTHING_WRITTEN

    def __init__(self, request: GenerationRequest, headers: Headers, output: str) -> None:
        super().__init__(request, headers)
        self._output_name = output

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """Encode the token ids; an error response if the backend reported none."""
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


# --- shared objects ---------------------------------------------------------------------------


class _RepeatingEncoder(BaseEncoder, ABC):
    """An encoder whose last event repeats what the stream has sent."""

    def __init__(
        self, profile: MindieProfile, request: GenerationRequest, headers: Headers
    ) -> None:
        super().__init__(request, headers)
        self._profile = profile
        self._texts: list[str] = []
        self._token_count = 0
        self._prompt_tokens = 0
        self._finish_reason = ""

    def _encode_event(self, event: Event) -> bytes:
        match event:
            case TextDelta(text):
                self._texts.append(text)
                self._token_count += event.tokens
                return self._encode_token(text, list(event.token_ids))
            case ReasoningDelta(text) | RefusalDelta(text):
                self._texts.append(text)
                self._token_count += 1
                return self._encode_token(text, [])
            case StreamStart(prompt_tokens):
                self._prompt_tokens = prompt_tokens or 0
            case Usage(prompt_tokens, completion_tokens):
                self._prompt_tokens = prompt_tokens
                self._token_count = max(self._token_count, completion_tokens)
            case ChoiceEnd():
                self._finish_reason = map_finish_reason(event, self._profile)
            case StreamEnd():
                return self._encode_end()
            case _:
                pass
        return b""

    def _encode_stopped(self) -> bytes:
        self._finish_reason = STOPPED_FINISH_REASON
        return self._encode_end()

    @abstractmethod
    def _encode_token(self, text: str, token_ids: list[int]) -> bytes: ...

    @abstractmethod
    def _encode_end(self) -> bytes: ...


# --- native ---------------------------------------------------------------------------------------


class _NativeDetails(Struct):
    finish_reason: str
    generated_tokens: int
    generated_token_ids: list[int] | UnsetType
    seed: int | None


class _NativeToken(Struct):
    id: list[int]
    text: str | None


class _NativeChunk(Struct, kw_only=True):
    prefill_time: int | None
    decode_time: int | None
    generated_text: str | UnsetType = UNSET
    details: _NativeDetails | UnsetType | None = UNSET
    token: _NativeToken


class NativeEncoder(_RepeatingEncoder):
    """Encodes /infer and /infer_token responses."""

    def __init__(
        self,
        profile: MindieProfile,
        request: GenerationRequest,
        context: ResponseContext,
        headers: Headers,
    ) -> None:
        super().__init__(profile, request, headers)
        self._timer = ChunkTimer(context.clock)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choice = get_only_choice(answer)
        body: dict[str, Any] = {"generated_text": join_choice_text(choice)}
        if self._request.response_options.details:
            tokens = answer.usage.completion_tokens if answer.usage else choice.tokens
            reason = map_finish_reason(choice, self._profile)
            body["details"] = self._build_details(reason, tokens, choice.token_ids)
        return build_json_response(encode_json(body))

    def _encode_event(self, event: Event) -> bytes:
        if isinstance(event, Timing):
            self._timer.set_backend_timing(event)
        return super()._encode_event(event)

    def _encode_token(self, text: str, token_ids: list[int]) -> bytes:
        return self._encode_chunk(token=_NativeToken(token_ids, text))

    def _encode_end(self) -> bytes:
        details = None
        if self._request.response_options.details:
            details = self._build_details(self._finish_reason, self._token_count, UNSET)
        return self._encode_chunk(
            token=_NativeToken([], None), generated_text="".join(self._texts), details=details
        )

    def _encode_chunk(self, **fields: Any) -> bytes:
        prefill, decode = self._timer.measure_chunk()
        chunk = _NativeChunk(prefill_time=prefill, decode_time=decode, **fields)
        return framed(encode_json(chunk))

    def _build_details(
        self, reason: str, tokens: int, token_ids: list[int] | UnsetType
    ) -> _NativeDetails:
        return _NativeDetails(reason, tokens, token_ids, self._request.sampling.seed)


# --- TGI style ------------------------------------------------------------------------------------


class _TgiToken(Struct):
    id: list[int]
    text: str
    logprob: None = None
    special: None = None


class _TgiStreamDetails(Struct):
    prompt_tokens: int
    finish_reason: str
    generated_tokens: int
    seed: int | None


class _TgiChunk(Struct):
    token: _TgiToken
    generated_text: str | None = None
    details: _TgiStreamDetails | None = None


class _TgiUnaryToken(Struct):
    id: int
    logprob: None = None
    special: None = None
    text: None = None


class _TgiUnaryDetails(Struct):
    prompt_tokens: int
    finish_reason: str
    generated_tokens: int
    prefill: list[_TgiUnaryToken]
    seed: int | None
    tokens: list[_TgiUnaryToken] | UnsetType


class TgiStyleEncoder(_RepeatingEncoder):
    """Encodes TGI-style responses; ``listed``: a unary response is a list of one object."""

    def __init__(
        self,
        profile: MindieProfile,
        request: GenerationRequest,
        headers: Headers,
        *,
        listed: bool = False,
    ) -> None:
        super().__init__(profile, request, headers)
        self._as_list = listed

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choice = get_only_choice(answer)
        body: dict[str, Any] = {}
        if self._request.response_options.details:
            body["details"] = self._build_details(answer, choice)
        body["generated_text"] = join_choice_text(choice)
        return build_json_response(encode_json([body] if self._as_list else body))

    def _build_details(self, answer: UnaryResponse, choice: UnaryChoice) -> _TgiUnaryDetails:
        usage = answer.usage
        return _TgiUnaryDetails(
            usage.prompt_tokens if usage else 0,
            map_finish_reason(choice, self._profile),
            usage.completion_tokens if usage else choice.tokens,
            [],
            self._request.sampling.seed,
            [_TgiUnaryToken(one) for one in choice.token_ids] or UNSET,
        )

    def _encode_token(self, text: str, token_ids: list[int]) -> bytes:
        return framed(encode_json(_TgiChunk(_TgiToken(token_ids, text))))

    def _encode_end(self) -> bytes:
        details = None
        if self._request.response_options.details:
            seed = self._request.sampling.seed
            details = _TgiStreamDetails(
                self._prompt_tokens, self._finish_reason, self._token_count, seed
            )
        return framed(encode_json(_TgiChunk(_TgiToken([], ""), "".join(self._texts), details)))


# --- vLLM style -----------------------------------------------------------------------------------


class VllmStyleEncoder(BaseEncoder):
    """Encodes vLLM-style responses: JSON objects, each followed by a NUL byte."""

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """Return the prompt, with which every text begins."""
        request = self._request
        prompt = str(request.prompts[0]) if request.prompts else request.messages[0].text
        texts = [prompt + join_choice_text(choice) for choice in answer.choices]
        return build_json_response(encode_json({"text": texts}))

    def _encode_event(self, event: Event) -> bytes:
        match event:
            case TextDelta(text, index) | ReasoningDelta(text, index) | RefusalDelta(text, index):
                texts = [""] * self._request.choice_count
                texts[index] = text
                return encode_json({"text": texts}) + b"\0"
            case _:
                return b""
