"""Answers to conversations and completions, whole and streamed, in a configurable style.

A family makes one ``Style`` of its own and hands it to the encoders; all else comes with it::

    STYLE = Style(
        answer=("choices", "created", "model", "object", "usage"),     # keys, in their order
        opening=b'{"role":"assistant","content":null}',
        usage="finish",
        absent={"logprobs": b"null"},                                  # keys there without a value
        error_event=lambda error: ...,
    )
    encoder = ChatEncoder(STYLE, request, about, model=about.served_model)

Bytes in a style are JSON. What the events and the style leave constant in a chunk is encoded once
for each choice, so that a token costs one string and three joins.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from msgspec import Raw, Struct

from protocols.core.aggregate import UnaryChoice, UnaryResponse
from protocols.core.errors import GatewayError
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.openai.chunks import (
    ChunkWriter,
    build_choice_fields,
    build_common_fields,
    build_unary_response,
    create_header_builder,
)
from protocols.openai.pieces import (
    FunctionCallItem,
    ToolCallItem,
    build_chat_logprobs,
    build_completion_logprobs,
    build_tool_calls,
    encode_json,
    map_finish_reason,
)
from protocols.openai.style import FINISH_REASONS, ResponseStyle

__all__ = ["FINISH_REASONS", "ChatEncoder", "CompletionEncoder", "ResponseStyle"]


class ChatEncoder:
    """Writes the answer to a conversation.

    ``id`` and ``model`` replace what would come from ``about``; ``headers`` are added to those of
    the style.
    """

    def __init__(
        self,
        style: ResponseStyle,
        request: GenerationRequest,
        about: ResponseContext,
        *,
        id: str | None = None,  # noqa: A002 - the wire's word
        model: str | None = None,
        headers: Headers = (),
    ) -> None:
        self.content_type = style.content_type
        self._response_style, self._request = style, request
        self._common_fields = build_common_fields(style.chat_prefix, about, id, model)
        self._build_headers = create_header_builder(style, about, headers)
        self._open_choices: set[int] = set()
        self._tool_calling_choices: set[int] = set()

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._build_headers()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        write = self._encode_event
        return write(events[0]) if len(events) == 1 else b"".join([write(one) for one in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._response_style.encode_error_event(error)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choices = [self._build_choice(choice) for choice in answer.choices]
        return build_unary_response(
            self._response_style.chat_factories, answer, choices, self._common_fields
        )

    @cached_property
    def _chunk_writer(self) -> ChunkWriter:
        """Frames a stream. A whole answer does without."""
        shared = {**self._common_fields, "object": self._response_style.chat_chunk_object}
        return ChunkWriter(self._response_style, self._request, shared, chat=True)

    def _encode_event(self, event: Event) -> bytes:
        if type(event) is TextDelta:
            return (
                self._encode_text(event) if event.text or event.logprobs or event.token_ids else b""
            )
        match event:
            case ResponseMetadata():
                self._chunk_writer.set_metadata(event)
            case ChoiceEnd():
                return self._encode_choice_end(event)
            case Usage():
                self._chunk_writer.set_usage(event)
            case StreamEnd():
                return self._chunk_writer.write_end()
            case ReasoningDelta(text, index) if text:
                return self._encode_delta(index, b'"reasoning_content":' + encode_json(text))
            case RefusalDelta(text, index) if text:
                return self._encode_delta(index, b'"refusal":' + encode_json(text))
            case PromptEcho(index, text):
                return self._encode_delta(index, b'"content":' + encode_json(text))
            case ToolCallStart() | ToolCallDelta():
                return self._encode_tool_call(event)
            case _:
                pass
        return b""

    def _encode_text(self, event: TextDelta) -> bytes:
        index = event.index
        before = b"" if index in self._open_choices else self._encode_first_delta(index)
        if not event.logprobs and not event.token_ids:
            head, tail = self._chunk_writer.build_template(index)
            return b'%b%b{"content":%b}%b' % (before, head, encode_json(event.text), tail)
        more = {}
        if event.logprobs:
            more["logprobs"] = encode_json(build_chat_logprobs(event.logprobs))
        if event.token_ids and self._request.want.token_ids:
            more["token_ids"] = encode_json(event.token_ids)
        delta = b'{"content":%b}' % encode_json(event.text)
        return before + self._chunk_writer.write_chunk(index, delta, **more)

    def _encode_delta(self, index: int, fields: bytes) -> bytes:
        before = b"" if index in self._open_choices else self._encode_first_delta(index)
        head, tail = self._chunk_writer.build_template(index)
        return b"%b%b{%b}%b" % (before, head, fields, tail)

    def _encode_first_delta(self, index: int, *, call: bool = False) -> bytes:
        self._open_choices.add(index)
        delta = (
            self._response_style.first_tool_call_delta if call else self._response_style.first_delta
        )
        return self._chunk_writer.write_chunk(index, delta)

    def _encode_tool_call(self, event: ToolCallStart | ToolCallDelta) -> bytes:
        index = event.index
        before = b"" if index in self._open_choices else self._encode_first_delta(index, call=True)
        self._tool_calling_choices.add(index)
        if isinstance(event, ToolCallStart):
            function = FunctionCallItem(event.name, "")
            piece = ToolCallItem(event.call_index, event.id, "function", function)
        else:
            function = FunctionCallItem(arguments=event.text)
            piece = ToolCallItem(event.call_index, function=function)
        if self._request.legacy_functions:
            return before + self._encode_delta(index, b'"function_call":' + encode_json(function))
        return before + self._encode_delta(index, b'"tool_calls":[' + encode_json(piece) + b"]")

    def _encode_choice_end(self, event: ChoiceEnd) -> bytes:
        index = event.index
        before = b"" if index in self._open_choices else self._encode_first_delta(index)
        reason = self._map_finish_reason(
            event.finish_reason, called=index in self._tool_calling_choices
        )
        more = {"finish_reason": encode_json(reason)}
        return before + self._chunk_writer.write_finish(
            index, self._response_style.last_delta, more
        )

    def _map_finish_reason(self, reason: FinishReason, *, called: bool) -> str:
        legacy = self._request.legacy_functions
        return map_finish_reason(
            self._response_style.finish_reasons, reason, called=called, legacy=legacy
        )

    def _build_choice(self, choice: UnaryChoice) -> Struct:
        values = build_choice_fields(self._response_style, self._request, choice)
        values["message"] = self._build_message(choice)
        values["finish_reason"] = self._map_finish_reason(
            choice.finish_reason, called=bool(choice.tool_calls)
        )
        if choice.logprobs:
            values["logprobs"] = build_chat_logprobs(choice.logprobs)
        return self._response_style.chat_factories.choice(values)

    def _build_message(self, choice: UnaryChoice) -> Struct:
        silent = not choice.text and bool(choice.tool_calls or choice.refusal)
        values: dict[str, Any] = {
            "content": Raw(self._response_style.empty_content) if silent else choice.text
        }
        if choice.reasoning:
            values["reasoning_content"] = choice.reasoning
        if choice.refusal:
            values["refusal"] = choice.refusal
        if choice.tool_calls and self._request.legacy_functions:
            call = choice.tool_calls[0]
            values["function_call"] = FunctionCallItem(call.name, call.arguments)
        elif choice.tool_calls:
            values["tool_calls"] = build_tool_calls(choice.tool_calls)
        return self._response_style.chat_factories.message(values)


class CompletionEncoder:
    """Writes the answer to a completion; the arguments are those of ``ChatEncoder``."""

    def __init__(
        self,
        style: ResponseStyle,
        request: GenerationRequest,
        about: ResponseContext,
        *,
        id: str | None = None,  # noqa: A002 - the wire's word
        model: str | None = None,
        headers: Headers = (),
    ) -> None:
        self.content_type = style.content_type
        self._response_style, self._request = style, request
        self._common_fields = build_common_fields(style.text_prefix, about, id, model)
        self._build_headers = create_header_builder(style, about, headers)
        self._offsets: dict[int, int] = {}

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._build_headers()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        write = self._encode_event
        return write(events[0]) if len(events) == 1 else b"".join([write(one) for one in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._response_style.encode_error_event(error)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choices = [self._build_choice(choice) for choice in answer.choices]
        return build_unary_response(
            self._response_style.text_factories, answer, choices, self._common_fields
        )

    @cached_property
    def _chunk_writer(self) -> ChunkWriter:
        """Frames a stream. A whole answer does without."""
        shared = {**self._common_fields, "object": self._response_style.text_chunk_object}
        return ChunkWriter(self._response_style, self._request, shared, chat=False)

    def _encode_event(self, event: Event) -> bytes:
        if type(event) is TextDelta:
            ids = event.token_ids if self._request.want.token_ids else ()
            return self._encode_text(event.index, event.text, event.logprobs, ids)
        match event:
            case PromptEcho(index, text, logprobs):
                return self._encode_text(index, text, logprobs, ())
            case ChoiceEnd(reason, index):
                more = {"finish_reason": encode_json(self._response_style.finish_reasons[reason])}
                return self._chunk_writer.write_finish(index, b'""', more)
            case Usage():
                self._chunk_writer.set_usage(event)
            case ResponseMetadata():
                self._chunk_writer.set_metadata(event)
            case StreamEnd():
                return self._chunk_writer.write_end()
            case _:
                pass
        return b""

    def _encode_text(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], ids: Sequence[int]
    ) -> bytes:
        if not text and not logprobs and not ids:
            return b""
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        if not logprobs and not ids:
            head, tail = self._chunk_writer.build_template(index)
            return b"%b%b%b" % (head, encode_json(text), tail)
        more = {}
        if logprobs:
            more["logprobs"] = encode_json(build_completion_logprobs(logprobs, offset))
        if ids:
            more["token_ids"] = encode_json(ids)
        return self._chunk_writer.write_chunk(index, encode_json(text), **more)

    def _build_choice(self, choice: UnaryChoice) -> Struct:
        values = build_choice_fields(self._response_style, self._request, choice)
        values["text"] = choice.text
        values["finish_reason"] = self._response_style.finish_reasons[choice.finish_reason]
        if choice.logprobs:
            values["logprobs"] = build_completion_logprobs(choice.logprobs)
        return self._response_style.text_factories.choice(values)
