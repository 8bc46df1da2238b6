"""Encodes responses of chat, unary and as a stream of events, and of rerank.

A stream has one block of content after the other; their indexes and those of calls count from 0.
Arguments of several calls may come in turns, so all calls end together, with the message.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType

from protocols.chat.responses import ResponseStyle
from protocols.cohere import errors
from protocols.cohere.decoder import SOURCE
from protocols.core.aggregate import UnaryChoice, UnaryResponse, is_end_of_calls
from protocols.core.call_arguments import make_function_call, write_text_argument
from protocols.core.errors import GatewayError
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.extra import write_extra_fields
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.json_text import decode_json, encode_ascii
from protocols.core.request import FieldPath, GenerationRequest
from protocols.core.response_losses import AS_TEXT
from protocols.core.sse import DONE_EVENT

FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    "eos": "COMPLETE",
    "stop": "STOP_SEQUENCE",
    "length": "MAX_TOKENS",
    "tool_calls": "TOOL_CALL",
    "content_filter": "ERROR",
    "unknown": "COMPLETE",
}
"""There is no word for filtered content: the answer is not complete."""
RERANK_STYLE: Final = ResponseStyle(encode_error_event=errors.format_error_event)


class TokenCounts(Struct):
    """The tokens of the prompt and of the response."""

    input_tokens: int
    output_tokens: int


class ChatUsage(Struct):
    """The token counts, of which the gateway bills none."""

    billed_units: TokenCounts
    tokens: TokenCounts
    cached_tokens: int | UnsetType = UNSET


class LogprobChunk(Struct):
    """The probabilities of the tokens of a piece of text."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class ContentBlock(Struct, omit_defaults=True):
    """A block of text or of reasoning."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET


class CalledFunction(Struct):
    """The function of a call; ``arguments`` is JSON text."""

    name: str
    arguments: str


class ToolCallEntry(Struct):
    """A call of a tool."""

    id: str
    type: str
    function: CalledFunction


class AssistantMessage(Struct):
    """The message of the model."""

    role: str
    content: list[ContentBlock] | UnsetType
    tool_calls: list[ToolCallEntry] | UnsetType


class ChatAnswer(Struct):
    """The unary response."""

    id: str
    finish_reason: str
    message: AssistantMessage
    usage: ChatUsage | UnsetType = UNSET
    logprobs: list[LogprobChunk] | UnsetType = UNSET


class MessageEnd(Struct):
    """The end of the message of a stream."""

    finish_reason: str
    usage: ChatUsage | UnsetType = UNSET


class ChatEncoder:
    """Encodes the response to one request of chat."""

    content_type = "text/event-stream; charset=utf-8"
    content_losses = AS_TEXT
    written_details = frozenset({"cached_tokens"})
    extra_source = SOURCE

    def __init__(self, request: GenerationRequest, about: ResponseContext) -> None:
        self._about, self._id = about, about.id
        self._hides_reasoning = request.response_options.hides_reasoning
        self._is_streamed = request.stream
        self._has_started = False
        self._open_block: str | None = None
        """The type of the block of content that has begun and not ended."""
        self._block_count = 0
        self._call_count = 0
        self._custom_inputs: dict[int, list[str]] = {}
        """The pieces of the input of each call of a custom tool, which becomes a function."""
        self._usage: Usage | None = None
        self._end = ChoiceEnd("unknown")

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return (("x-served-model", self._about.version),)

    def writes_key(self, event: ResponseExtra, path: FieldPath) -> bool:  # noqa: ARG002
        """See ``protocols.core.interfaces.SelectsResponseExtra``.

        Blocks of content are cut anew, as are the events of a stream: their keys have no place.
        """
        steps = (step for step in path if not step.startswith("tool_calls["))
        return not self._is_streamed and not any(step.endswith("]") for step in steps)

    # --- streams ----------------------------------------------------------------------------------

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        data = b"".join([self._encode_event(event) for event in events])
        if not data or self._has_started:
            return data
        self._has_started = True
        return _format_event("message-start", _START, id=self._id) + data

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return errors.format_error_event(error)

    def _encode_event(self, event: Event) -> bytes:
        match event:
            case TextDelta(text):
                return self._encode_content("text", text, event.logprobs)
            case RefusalDelta(text):
                return self._encode_content("text", text)
            case ReasoningDelta(text) if not self._hides_reasoning:
                return self._encode_content("thinking", text)
            case ToolCallStart(_, index, identifier, name, kind):
                self._call_count = max(self._call_count, index + 1)
                if kind == "custom":
                    self._custom_inputs[index] = []
                call = ToolCallEntry(identifier, "function", CalledFunction(name, ""))
                start = _format_event("tool-call-start", {"tool_calls": call}, index)
                return self._end_content() + start
            case ToolCallDelta(_, index, text) if index in self._custom_inputs:
                self._custom_inputs[index].append(text)
            case ToolCallDelta(_, index, text) if text:
                return _format_arguments(index, text)
            case ChoiceEnd():
                self._end = event
                inputs = [
                    _format_arguments(index, write_text_argument("".join(pieces)))
                    for index, pieces in self._custom_inputs.items()
                ]
                calls = [_format_end("tool-call-end", i) for i in range(self._call_count)]
                return self._end_content() + b"".join(inputs + calls)
            case Usage():
                self._usage = event
            case ResponseMetadata():
                self._id = event.get_identity(SOURCE).get("id", self._id)
            case StreamEnd():
                return self._encode_end()
            case _:
                pass
        return b""

    def _encode_content(self, kind: str, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """A piece of a block of this type, which begins with it if none is open."""
        if not text and not logprobs:
            return b""
        begin = b"" if kind == self._open_block else self._begin_content(kind)
        probabilities = _build_logprobs(logprobs) if logprobs else None
        delta = {"content": {kind: text}}
        return begin + _format_event(
            "content-delta", delta, self._block_count - 1, logprobs=probabilities
        )

    def _begin_content(self, kind: str) -> bytes:
        end = self._end_content()
        self._open_block, index = kind, self._block_count
        self._block_count += 1
        block = {"content": {"type": kind, kind: ""}}
        return end + _format_event("content-start", block, index)

    def _end_content(self) -> bytes:
        if self._open_block is None:
            return b""
        self._open_block = None
        return _format_end("content-end", self._block_count - 1)

    def _encode_end(self) -> bytes:
        reason = _get_finish_reason(self._end, called=self._call_count > 0)
        delta = MessageEnd(reason, _build_usage(self._usage))
        return errors.format_event({"type": "message-end", "delta": delta}) + DONE_EVENT

    # --- unary responses --------------------------------------------------------------------------

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choice = response.choices[0] if response.choices else UnaryChoice(0)
        end = ChoiceEnd(choice.finish_reason, own_word=choice.own_word)
        body = ChatAnswer(
            id=response.metadata.get_identity(SOURCE).get("id", self._id),
            finish_reason=_get_finish_reason(end, called=bool(choice.tool_calls)),
            message=self._build_message(choice),
            usage=_build_usage(response.usage),
        )
        if choice.logprobs:
            body.logprobs = [_build_logprobs((one,)) for one in choice.logprobs]
        values = {
            path: value
            for event in response.extra
            if event.source == SOURCE
            for path, value in event.values
            if self.writes_key(event, path)
        }
        if not values:
            return HttpResponse(200, encode_ascii(body))
        fields = decode_json(encode_ascii(body))
        write_extra_fields(fields, values)
        return HttpResponse(200, encode_ascii(fields))

    def _build_message(self, choice: UnaryChoice) -> AssistantMessage:
        calls = [
            ToolCallEntry(call.id, "function", CalledFunction(call.name, call.arguments))
            for call in map(make_function_call, choice.tool_calls)
        ]
        content = []
        if choice.reasoning and not self._hides_reasoning:
            content.append(ContentBlock("thinking", thinking=choice.reasoning))
        text = choice.text + choice.refusal
        if text or not calls:
            content.append(ContentBlock("text", text))
        return AssistantMessage("assistant", content or UNSET, calls or UNSET)


_START: Final[Mapping[str, Any]] = {
    "role": "assistant",
    "content": [],
    "tool_plan": "",
    "tool_calls": [],
    "citations": [],
}
"""The message with which a stream starts."""


def _format_event(
    kind: str,
    message: Any,
    index: int | None = None,
    *,
    id: str | None = None,  # noqa: A002 - the wire's word
    logprobs: LogprobChunk | None = None,
) -> bytes:
    """An event with a piece of the message."""
    fields = {
        "id": id,
        "type": kind,
        "index": index,
        "delta": {"message": message},
        "logprobs": logprobs,
    }
    return errors.format_event({key: one for key, one in fields.items() if one is not None})


def _format_arguments(index: int, text: str) -> bytes:
    """An event with a piece of a call's arguments."""
    message = {"tool_calls": {"function": {"arguments": text}}}
    return _format_event("tool-call-delta", message, index)


def _format_end(kind: str, index: int) -> bytes:
    return errors.format_event({"type": kind, "index": index})


def _get_finish_reason(end: ChoiceEnd, *, called: bool) -> str:
    if end.own_word is not None:
        return end.own_word
    if end.finish_reason in ("eos", "stop", "unknown") and is_end_of_calls(end, called=called):
        return FINISH_REASONS["tool_calls"]
    return FINISH_REASONS[end.finish_reason]


def _build_usage(usage: Usage | None) -> ChatUsage | UnsetType:
    if usage is None:
        return UNSET
    counts = TokenCounts(usage.prompt_tokens, usage.completion_tokens)
    cached = UNSET if usage.cached_tokens is None else usage.cached_tokens
    return ChatUsage(counts, counts, cached)


_LEAST_LOGPROB: Final = -9999.0
"""For a probability of 0, which JSON can't express."""


def _build_logprobs(tokens: Sequence[TokenLogprob]) -> LogprobChunk:
    return LogprobChunk(
        "".join([one.token for one in tokens]),
        [one.id for one in tokens if one.id is not None],
        [max(one.logprob or 0.0, _LEAST_LOGPROB) for one in tokens],
    )
