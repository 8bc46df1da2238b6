"""Events to responses: JSON, or a stream of JSON lines.

A stream has one line for each piece and a last one with ``done`` and the durations. All lines are
ASCII, since ollama-python also splits them at Unicode's line ends, and none is empty. Durations are
integers of nanoseconds. Source: ollama 0.9, api/types.go and server/routes.go.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from protocols.core.aggregate import UnaryChoice, UnaryResponse, cuts_calls
from protocols.core.errors import GatewayError
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
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import Clock, Headers, HttpResponse, ResponseContext
from protocols.core.json_text import encode_ascii
from protocols.core.request import ToolCall
from protocols.core.response_losses import AS_TEXT, CallLosses
from protocols.core.vectors import encode_array
from protocols.ollama.errors import JSON_HEADERS, OllamaError, get_error_text
from protocols.openapi import NDJSON_CONTENT_TYPE

_NANOSECONDS: Final = 1_000_000_000


class LogprobItem(Struct):
    """A token's probability; an alternative has no further ones."""

    token: str
    logprob: float
    bytes: list[int] | UnsetType = UNSET
    top_logprobs: "list[LogprobItem] | UnsetType" = UNSET


class CalledFunction(Struct):
    """A call; its arguments are a JSON object."""

    index: int
    name: str
    arguments: Raw


class ToolCallEntry(Struct):
    """A tool call."""

    id: str
    function: CalledFunction


class AnswerMessage(Struct):
    """The model's message."""

    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCallEntry] | UnsetType = UNSET


class AnswerMetrics(Struct, kw_only=True):
    """The end of a response. A duration that was not measured is 1 ns, since none may be 0."""

    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[LogprobItem] | UnsetType = UNSET


class ChatAnswer(Struct):
    """A response of ``/api/chat``, or a line of one; followed by ``AnswerMetrics``."""

    model: str
    created_at: str
    message: AnswerMessage
    done: bool


class GenerateAnswer(Struct):
    """A response of ``/api/generate``, or a line of one; followed by ``AnswerMetrics``."""

    model: str
    created_at: str
    response: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCallEntry] | UnsetType = UNSET
    done: bool = False


class EmbedAnswer(Struct):
    """The response of ``/api/embed``."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET


class EmbeddingsAnswer(Struct):
    """The response of ``/api/embeddings``."""

    embedding: Sequence[float]


def build_json_response(body: Any) -> HttpResponse:
    """A response with this body."""
    return HttpResponse(200, encode_ascii(body), JSON_HEADERS)


def format_time(seconds: float) -> str:
    """Unix time in RFC 3339, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class ResponseTimer:
    """The durations of one response, from its request's arrival on."""

    def __init__(self, clock: Clock, started_at: float) -> None:
        """``started_at`` is the request's Unix time."""
        self._clock = clock
        self._started_at = started_at
        self._start = clock()
        self._load: float | None = None
        self._first_token: float | None = None
        self._timing: Timing | None = None

    def format_now(self) -> str:
        """The current time, as ``created_at``."""
        return format_time(self._started_at + self._clock() - self._start)

    def record_events(self, events: Sequence[Event]) -> None:
        """Note when the worker took the request, and when it sent its first token."""
        if self._first_token is not None:
            return
        now = self._clock()
        for event in events:
            if type(event) is StreamStart:
                self._load = now - self._start
            elif type(event) is Timing:
                self.set_timing(event)
            elif type(event) in _CONTENT_EVENTS:
                self._first_token = now - self._start

    def set_timing(self, timing: Timing) -> None:
        """Use the durations that the backend has measured."""
        self._timing = timing

    def measure(self) -> tuple[int, int, int, int]:
        """The total, and its parts: load, prompt and generation. In nanoseconds."""
        total = max(round((self._clock() - self._start) * _NANOSECONDS), _PARTS)
        timing = self._timing or Timing()
        load = timing.queue if timing.queue is not None else self._load or 0.0
        prompt = timing.prefill
        if prompt is None:
            prompt = 0.0 if self._first_token is None else self._first_token - load
        load_time = _clip(load, total - 2)
        prompt_time = _clip(prompt, total - load_time - 1)
        return total, load_time, prompt_time, total - load_time - prompt_time


_PARTS: Final = 3
_CONTENT_EVENTS: Final = frozenset({TextDelta, ReasoningDelta, RefusalDelta, ToolCallStart})


def _clip(seconds: float, most: int) -> int:
    """Nanoseconds, from 1 to ``most``."""
    return max(1, min(round(seconds * _NANOSECONDS), most))


FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "tool_calls": "stop",
    "content_filter": "stop",
    "unknown": "stop",
}
"""There is no word for tool calls or filtered content."""


class GenerationEncoder:
    """Encodes a response of ``/api/chat`` or ``/api/generate``."""

    content_type = NDJSON_CONTENT_TYPE
    hidden_reasons = frozenset({"content_filter"})
    content_losses = AS_TEXT

    def __init__(
        self,
        context: ResponseContext,
        model: str,
        started_at: float,
        *,
        is_chat: bool,
        hides_reasoning: bool = False,
    ) -> None:
        """``model`` is the name that the client sent, ``started_at`` is the request's Unix time."""
        self._hides_reasoning = hides_reasoning
        self._model = model
        self._is_chat = is_chat
        self._timer = ResponseTimer(context.clock, started_at)
        self._usage: Usage | None = None
        self._reason = "stop"
        self.losses = CallLosses()
        self._calls: list[tuple[ToolCallStart, list[str]]] = []
        """The calls, with the pieces of their arguments."""
        head = encode_ascii({"model": model})[:-1] + b',"created_at":"'
        field = b'"message":{"role":"assistant","content":' if is_chat else b'"response":'
        self._line_head, self._field = head, b'",' + field
        self._line_tail = b'},"done":false}\n' if is_chat else b',"done":false}\n'

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        self._timer.record_events(events)
        return b"".join([self._encode_event(event) for event in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return encode_ascii(OllamaError(get_error_text(error))) + b"\n"

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choice = response.choices[0] if response.choices else UnaryChoice(0)
        self._usage = response.usage
        self._reason = FINISH_REASONS[choice.finish_reason]
        if response.timings:
            self._timer.set_timing(response.timings[0])
        calls = self._build_calls(choice.tool_calls, choice)
        text = choice.text + choice.refusal
        thinking = "" if self._hides_reasoning else choice.reasoning
        answer = self._build_answer(text, thinking, calls, done=True)
        metrics = self._build_metrics()
        if choice.logprobs:
            metrics.logprobs = [_build_logprob(one) for one in choice.logprobs]
        return HttpResponse(200, _join(answer, metrics), JSON_HEADERS)

    def _encode_event(self, event: Event) -> bytes:
        match event:
            case TextDelta(text):
                return self._encode_text(text, event.logprobs)
            case RefusalDelta(text):
                return self._encode_text(text, ())
            case ReasoningDelta(text) if text and not self._hides_reasoning:
                return self._encode_line("", text)
            case ToolCallStart():
                self._calls.append((event, []))
            case ToolCallDelta(_, call_index, text):
                self._calls[call_index][1].append(text)
            case ChoiceEnd(reason):
                self._reason = FINISH_REASONS[reason]
                return self._encode_calls(event)
            case Usage():
                self._usage = event
            case StreamEnd():
                answer = self._build_answer("", "", (), done=True)
                return _join(answer, self._build_metrics()) + b"\n"
            case _:
                pass
        return b""

    def _encode_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        if logprobs:
            items = [_build_logprob(one) for one in logprobs]
            answer = self._build_answer(text, "", (), done=False)
            return _join(answer, AnswerMetrics(logprobs=items)) + b"\n"
        if not text:
            return b""
        time = self._timer.format_now().encode()
        return b"".join((self._line_head, time, self._field, encode_ascii(text), self._line_tail))

    def _encode_line(
        self, text: str, thinking: str = "", calls: Sequence[ToolCallEntry] = ()
    ) -> bytes:
        return encode_ascii(self._build_answer(text, thinking, calls, done=False)) + b"\n"

    def _encode_calls(self, end: ChoiceEnd) -> bytes:
        """The line of all calls."""
        calls = [ToolCall(start.id, start.name, "".join(pieces)) for start, pieces in self._calls]
        entries = self._build_calls(calls, end)
        return self._encode_line("", calls=entries) if entries else b""

    def _build_calls(
        self, calls: Sequence[ToolCall], end: ChoiceEnd | UnaryChoice
    ) -> list[ToolCallEntry]:
        """The calls, without one that was cut: it has no form in this protocol."""
        entries = []
        for index, call in enumerate(calls):
            arguments = self.losses.read_object(call, index, is_cut=cuts_calls(end))
            if arguments is not None:
                compact = Raw(msgspec.json.format(arguments, indent=-1))
                entries.append(ToolCallEntry(call.id, CalledFunction(index, call.name, compact)))
        return entries

    def _build_answer(
        self, text: str, thinking: str, calls: Sequence[ToolCallEntry], *, done: bool
    ) -> ChatAnswer | GenerateAnswer:
        shown = (thinking or UNSET, list(calls) or UNSET)
        time = self._timer.format_now()
        if self._is_chat:
            return ChatAnswer(self._model, time, AnswerMessage("assistant", text, *shown), done)
        return GenerateAnswer(self._model, time, text, *shown, done)

    def _build_metrics(self) -> AnswerMetrics:
        total, load, prompt, generation = self._timer.measure()
        usage = self._usage
        return AnswerMetrics(
            done_reason=self._reason,
            total_duration=total,
            load_duration=load,
            prompt_eval_count=UNSET if usage is None else usage.prompt_tokens,
            prompt_eval_duration=prompt,
            eval_count=UNSET if usage is None else usage.completion_tokens,
            eval_duration=generation,
        )


def _join(answer: Struct, metrics: AnswerMetrics) -> bytes:
    """One object of the fields of both."""
    return encode_ascii(answer)[:-1] + b"," + encode_ascii(metrics)[1:]


def build_load_answer(model: str, time: str, *, unload: bool, is_chat: bool) -> HttpResponse:
    """The response to a request without messages or prompt, which loads or unloads a model."""
    metrics = AnswerMetrics(done_reason="unload" if unload else "load")
    answer: ChatAnswer | GenerateAnswer
    if is_chat:
        answer = ChatAnswer(model, time, AnswerMessage("assistant", ""), done=True)
    else:
        answer = GenerateAnswer(model, time, "", done=True)
    return HttpResponse(200, _join(answer, metrics), JSON_HEADERS)


def _build_logprob(token: TokenLogprob) -> LogprobItem:
    item = _build_logprob_item(token.token, token.logprob, token.data)
    if token.top:
        item.top_logprobs = [_build_logprob_item(o.token, o.logprob, o.data) for o in token.top]
    return item


_LEAST_LOGPROB: Final = -9999.0
"""For a probability of 0, which JSON can't express."""


def _build_logprob_item(token: str, logprob: float | None, data: bytes | None) -> LogprobItem:
    value = _LEAST_LOGPROB if logprob is None else max(logprob, _LEAST_LOGPROB)
    return LogprobItem(token, value, list(token.encode() if data is None else data))


class EmbeddingEncoder:
    """Encodes embeddings, which are always unary.

    Those of ``/api/embed`` have length 1 and at most ``dimensions`` values.
    """

    content_type = "application/json"

    def __init__(
        self, context: ResponseContext, model: str, *, is_single: bool, dimensions: int | None
    ) -> None:
        """``is_single``: for ``/api/embeddings``, which has one vector as the worker made it."""
        self._model = model
        self._is_single = is_single
        self._dimensions = dimensions
        self._timer = ResponseTimer(context.clock, 0.0)

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """Empty: embeddings are never streamed."""
        del events
        return b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """The error body."""
        return encode_ascii(OllamaError(get_error_text(error)))

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        if self._is_single:
            values = next(iter(response.embeddings), ())
            return build_json_response(EmbeddingsAnswer(encode_array(values)))
        total, load, _, _ = self._timer.measure()
        usage = response.usage
        vectors = [
            encode_array(normalize(values[: self._dimensions])) for values in response.embeddings
        ]
        tokens = UNSET if usage is None else usage.prompt_tokens
        return build_json_response(EmbedAnswer(self._model, vectors, total, load, tokens))


def normalize(values: Sequence[float]) -> list[float]:
    """The vector with length 1; a zero vector stays as it is."""
    length = math.hypot(*values)
    return [value / length for value in values] if length else list(values)
