"""Encodes messages, unary and as a stream of events.

A stream has one block after the other: what belongs to a later block waits until the earlier one is
complete. Clients need every event's name, indexes without holes, the input of a tool as deltas, and
one message_delta with the full usage.
"""

import re
from base64 import b32encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from protocols.anthropic import errors
from protocols.anthropic.decoder import SOURCE
from protocols.anthropic.requests import OWN_SIGNATURE
from protocols.core.aggregate import UnaryChoice, UnaryResponse, cuts_calls, is_end_of_calls
from protocols.core.call_arguments import is_object
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
    StreamStart,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.extra import write_extra_fields
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.json_text import decode_json
from protocols.core.request import FieldPath, GenerationRequest
from protocols.core.response_losses import (
    ALL_WRITTEN,
    USAGE_DETAILS,
    WITHOUT_REASONING,
    CallLosses,
)

_encode = msgspec.json.Encoder().encode

STOP_REASONS: Final = (
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal",
    "model_context_window_exceeded",
)  # fmt: skip
FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    "eos": "end_turn",
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "end_turn",
    "content_filter": "refusal",
    "unknown": "end_turn",
}
"""A stop string is ``stop_sequence`` if it is known, and a message with calls is ``tool_use``."""
PING_EVENT: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_SILENCES_BEFORE_START: Final = 2
_SILENCES_BEFORE_DELTA: Final = 4
"""After how many intervals of silence a stream starts, and has an empty delta instead of a ping."""
_MESSAGE_STOP: Final = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class ThinkingTokens(Struct):
    """Details of the output's tokens."""

    thinking_tokens: int


class MessageUsage(Struct):
    """The token counts of a message. The three counts of the input add up to the prompt's."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning."""

    thinking: str
    signature: str


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning."""

    data: str


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A tool call; ``input`` is an object."""

    id: str
    name: str
    input: Raw


ContentBlock = ThinkingBlock | RedactedThinkingBlock | TextBlock | ToolUseBlock


class MessageBody(Struct):
    """A message: the unary response, and the start of a stream with no content."""

    id: str
    type: str
    role: str
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageOptions(Struct, frozen=True, kw_only=True):
    """How a response is written. ``discards``: the client wants no output at all."""

    thinking: Literal["none", "omitted", "shown"] = "none"
    discards: bool = False
    heartbeat_interval: float = 15.0
    """Seconds of silence before a ping."""


class MessageEncoder:
    """Encodes the response to one request. A refusal has its own stop reason."""

    content_type = "text/event-stream; charset=utf-8"
    written_details = USAGE_DETAILS
    writes_matched_stop = True
    extra_source = SOURCE

    def __init__(
        self, request: GenerationRequest, about: ResponseContext, options: MessageOptions
    ) -> None:
        self._about = about
        self._options = options
        is_hidden = options.thinking == "none" and not options.discards
        self.content_losses = WITHOUT_REASONING if is_hidden else ALL_WRITTEN
        self._id = f"msg_{about.id}"
        self._is_single_call = request.parallel_tools is False
        self._tool_call_ids = _ToolCallIds(request, about.id)
        self._prompt_tokens = 0
        self._usage: Usage | None = None
        self._end: ChoiceEnd | None = None
        self._has_refused = False
        self._has_started = False
        self.losses = CallLosses()
        self.heartbeat_interval = options.heartbeat_interval
        self._extra: dict[FieldPath, Any] = {}
        """The worker's keys that the next event of a message as a whole has."""
        self._blocks = BlockQueue(f"{OWN_SIGNATURE}{about.id}")

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return (
            ("request-id", errors.format_request_id(self._about.id)),
            ("x-served-model", self._about.version),
        )

    def writes_signature(self, event: ReasoningDelta) -> bool:  # noqa: ARG002
        """See ``protocols.core.interfaces.SupportsSignedReasoning``.

        The reasoning of a client that gets none is reported as a whole.
        """
        return True

    def writes_key(self, event: ResponseExtra, path: FieldPath) -> bool:
        """See ``protocols.core.interfaces.SelectsResponseExtra``.

        Keys of the message have a place; those of events and of blocks have none, since blocks
        are cut anew.
        """
        return event.scope == "response" and path[0] != "events" and not self._options.discards

    # --- streams ----------------------------------------------------------------------------------

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        blocks, out = self._blocks, []
        for event in events:
            if type(event) is TextDelta and blocks.is_text_open:
                if event.text:
                    out.append(blocks.encode_text(event.text))
            elif type(event) is StreamEnd:
                out = [self.encode_start(), *out, self._encode_end()]
            elif type(event) is ResponseMetadata:
                self._keep_id(event)
            elif type(event) is ResponseExtra:
                self._keep_extra(event)
            else:
                self._read_event(event)
                out.append(blocks.take_bytes())
        data = b"".join(out)
        if not data or self._has_started:
            return data
        return self.encode_start() + data

    def encode_start(self) -> bytes:
        """The first event, if it was not written."""
        if self._has_started:
            return b""
        self._has_started = True
        usage = _build_usage(Usage(self._prompt_tokens))
        body = MessageBody(
            id=self._id,
            type="message",
            role="assistant",
            model=self._about.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=usage,
        )
        message = self._encode_with_extra(body)
        start = b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n'
        return start % message + PING_EVENT

    def encode_heartbeat(self, silence: float) -> bytes:
        """See ``protocols.core.interfaces.SupportsHeartbeat``.

        Pings keep proxies waiting, and empty deltas of the open block all clients; without one, a
        block of the expected kind is opened.
        """
        count = round(silence / self.heartbeat_interval)
        if not self._has_started and count < _SILENCES_BEFORE_START:
            return b""
        if count % _SILENCES_BEFORE_DELTA:
            return self.encode_start() or PING_EVENT
        kind: BlockKind = "text" if self._options.thinking == "none" else "thinking"
        return self.encode_start() + self._blocks.encode_empty_delta(kind)

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return errors.format_error_event(error)

    def _read_event(self, event: Event) -> None:
        """Put what the event holds into its block."""
        match event:
            case StreamStart(prompt_tokens):
                self._prompt_tokens = prompt_tokens or 0
            case Usage():
                self._usage = event
            case ChoiceEnd():
                self._end = event
                if not cuts_calls(event):
                    for call in self._blocks.list_damaged_calls():
                        self.losses.add_damaged(call)
                self._blocks.close()
            case _ if self._options.discards:
                pass
            case TextDelta(text) if text:
                self._blocks.add("text", text)
            case RefusalDelta(text) if text:
                self._has_refused = True
                self._blocks.add("text", text)
            case ReasoningDelta() if self._options.thinking != "none":
                text = event.text if self._options.thinking == "shown" else ""
                self._blocks.add_reasoning(text, event.signature, event.redacted)
            case ToolCallStart() | ToolCallDelta():
                self._read_call(event)
            case _:
                pass

    def _read_call(self, event: ToolCallStart | ToolCallDelta) -> None:
        index = event.call_index
        is_left_out = self._is_single_call and index > 0
        if isinstance(event, ToolCallDelta):
            if event.text and not is_left_out:
                self._blocks.add_arguments(index, event.text)
        elif is_left_out:
            self.losses.add(index)
        else:
            self._blocks.add_call(index, self._tool_call_ids.get_id(event.id, index), event.name)

    def _keep_id(self, served: ResponseMetadata) -> None:
        """Show the id of a worker of this protocol."""
        self._id = served.get_identity(SOURCE).get("id", self._id)

    def _encode_end(self) -> bytes:
        self._blocks.close()
        end = self._end or ChoiceEnd("unknown")
        reason, stop = self._map_stop_reason(end, called=self._blocks.has_calls)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = self._finish_usage(self._usage)
        blocks = self._blocks.take_bytes()
        fields = self._encode_with_extra({"type": "message_delta", "delta": delta, "usage": usage})
        return b"%bevent: message_delta\ndata: %b\n\n%b" % (blocks, fields, _MESSAGE_STOP)

    # --- unary responses --------------------------------------------------------------------------

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choice = response.choices[0] if response.choices else UnaryChoice(0)
        if self._options.discards:
            choice = UnaryChoice(0, finish_reason="length")
        self._keep_id(response.metadata)
        self._has_refused = bool(choice.refusal)
        content = self._build_content(choice, response.events)
        called = any(isinstance(block, ToolUseBlock) for block in content)
        end = ChoiceEnd(choice.finish_reason, 0, choice.matched_stop, choice.own_word)
        reason, stop = self._map_stop_reason(end, called=called)
        body = MessageBody(
            id=self._id,
            type="message",
            role="assistant",
            model=self._about.model,
            content=content,
            stop_reason=reason,
            stop_sequence=stop,
            usage=self._finish_usage(response.usage),
        )
        for event in response.extra:
            self._keep_extra(event)
        return HttpResponse(200, self._encode_with_extra(body))

    def _build_content(self, choice: UnaryChoice, events: Sequence[Event]) -> list[ContentBlock]:
        content: list[ContentBlock] = []
        signed = [one for one in events if isinstance(one, ReasoningDelta) and one.signature]
        if signed[1:] and self._options.thinking != "none":
            content += self._list_signed_blocks(events)
            return content + self._build_calls(choice)
        if self._options.thinking != "none":
            if choice.reasoning or choice.reasoning_signature:
                text = choice.reasoning if self._options.thinking == "shown" else ""
                signature = choice.reasoning_signature or f"{OWN_SIGNATURE}{self._about.id}"
                content.append(ThinkingBlock(text, signature))
            content += [RedactedThinkingBlock(data) for data in choice.redacted_reasoning]
        if text := choice.text + choice.refusal:
            content.append(TextBlock(text))
        return content + self._build_calls(choice)

    def _list_signed_blocks(self, events: Sequence[Event]) -> list[ContentBlock]:
        """Reasoning and text as the worker's blocks: a signature is that of its own block."""
        blocks: list[ContentBlock] = []
        is_open = False
        """Whether the last block is reasoning without its signature."""
        for event in events:
            last = blocks[-1] if blocks else None
            match event:
                case ReasoningDelta(redacted=str() as data):
                    blocks.append(RedactedThinkingBlock(data))
                case ReasoningDelta(text, signature=signature) if text or signature:
                    if not isinstance(last, ThinkingBlock) or not is_open:
                        last = ThinkingBlock("", f"{OWN_SIGNATURE}{self._about.id}")
                        blocks.append(last)
                    last.thinking += text if self._options.thinking == "shown" else ""
                    last.signature = signature or last.signature
                    is_open = signature is None
                case TextDelta(text) | RefusalDelta(text) if text:
                    if isinstance(last, TextBlock):
                        last.text += text
                    else:
                        blocks.append(TextBlock(text))
                case _:
                    pass
        return blocks

    def _build_calls(self, choice: UnaryChoice) -> list[ContentBlock]:
        content: list[ContentBlock] = []
        for index, call in enumerate(choice.tool_calls):
            if index and self._is_single_call:
                self.losses.add(index)
                continue
            identifier = self._tool_call_ids.get_id(call.id, index)
            arguments = self.losses.read_object(call, index, is_cut=cuts_calls(choice))
            if arguments is not None:
                content.append(ToolUseBlock(identifier, call.name, arguments))
        return content

    # --- both -------------------------------------------------------------------------------------

    def _keep_extra(self, event: ResponseExtra) -> None:
        """Keep the keys of a worker of this protocol for what is written next."""
        if event.source == SOURCE:
            self._extra |= {
                path: value for path, value in event.values if self.writes_key(event, path)
            }

    def _encode_with_extra(self, body: Any) -> bytes:
        data = _encode(body)
        if not self._extra:
            return data
        fields = decode_json(data)
        is_end = "delta" in fields
        values = {path: one for path, one in self._extra.items() if is_end or path[0] != "delta"}
        write_extra_fields(fields, values)
        self._extra = {path: one for path, one in self._extra.items() if path not in values}
        return _encode(fields)

    def _map_stop_reason(self, end: ChoiceEnd, *, called: bool) -> tuple[str, str | None]:
        """The stop reason, and the stop sequence if one is known to have matched."""
        if self._options.discards:
            return "max_tokens", None
        if end.own_word is not None:
            return end.own_word, None
        reason = FINISH_REASONS[end.finish_reason]
        if reason == "max_tokens":
            return reason, None
        if self._has_refused or reason == "refusal":
            return "refusal", None
        if is_end_of_calls(end, called=called):
            return "tool_use", None
        if end.finish_reason == "stop" and isinstance(end.matched_stop, str):
            return "stop_sequence", end.matched_stop
        return reason, None

    def _finish_usage(self, usage: Usage | None) -> MessageUsage:
        shown = _build_usage(usage or Usage(self._prompt_tokens))
        if self._options.discards:
            shown.output_tokens = 0
        return shown


def _build_usage(usage: Usage) -> MessageUsage:
    read, written = usage.cached_tokens or 0, usage.cache_write_tokens or 0
    thought = usage.reasoning_tokens
    return MessageUsage(
        max(usage.prompt_tokens - read - written, 0),
        written,
        read,
        usage.completion_tokens,
        UNSET if thought is None else ThinkingTokens(thought),
    )


_VALID_ID: Final = re.compile(r"(?!call_\d+$)[A-Za-z0-9_-]{9,64}")


class _ToolCallIds:
    """Ids of tool calls: those of the worker unless clients could confuse or reject them."""

    def __init__(self, request: GenerationRequest, seed: str) -> None:
        self._request = request
        self._seed = seed
        self._used: set[str] | None = None

    def get_id(self, identifier: str, index: int) -> str:
        """The id to show for the call of this number. Call it once for each call."""
        if self._used is None:
            self._used = {call.id for one in self._request.messages for call in one.tool_calls}
        if identifier in self._used or not _VALID_ID.fullmatch(identifier):
            digest = sha256(f"{self._seed} {index}".encode()).digest()
            identifier = f"toolu_{b32encode(digest[:15]).decode()}"
        self._used.add(identifier)
        return identifier


class TokenCountEncoder:
    """Encodes the number of tokens of a conversation."""

    content_type = "application/json"

    def __init__(self, about: ResponseContext) -> None:
        self._headers = (("request-id", errors.format_request_id(about.id)),)

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._headers

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``; there is nothing to stream."""
        del events
        return b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return errors.format_error_event(error)

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return HttpResponse(200, _encode({"input_tokens": len(response.tokens.ids)}))


# --- blocks of a stream ---------------------------------------------------------------------------

BlockKind = Literal["text", "thinking", "redacted_thinking", "tool_use"]
_DELTA_FIELDS: Final = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}


class _Block(Struct, eq=False):
    """A block that has begun, with the pieces that are not written."""

    kind: BlockKind
    start: dict[str, Any]
    """The ``content_block`` of its start."""
    call_index: int | None = None
    pieces: list[str] = []
    arguments: list[str] = []
    """All pieces of a call's arguments so far."""
    signature: str | None = None
    index: int = -1
    """Its number in the message, once it is open."""

    @property
    def is_complete(self) -> bool:
        """Whether a block can follow: nothing can be added to a call only if its JSON is whole."""
        return self.kind != "tool_use" or (is_object("".join(self.arguments)))


class BlockQueue:
    """Writes blocks one after the other.

    The first one is open. The others wait with what they hold until those before them are complete,
    or until the message ends.
    """

    def __init__(self, signature: str) -> None:
        """``signature`` is that of reasoning whose worker gave none."""
        self.has_calls = False
        self.is_text_open = False
        """Whether a piece of text can be written at once."""
        self._signature = signature
        self._blocks: list[_Block] = []
        self._count = 0
        """The number of blocks that were opened."""
        self._out: list[bytes] = []

    def take_bytes(self) -> bytes:
        """The events since the last call."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    def encode_text(self, text: str) -> bytes:
        """A piece of text of the open block."""
        return _encode_delta("text", self._count - 1, text)

    def add(self, kind: BlockKind, text: str) -> None:
        """Add text or reasoning to the last block, or to a new one if that is of another kind."""
        if not self._blocks or self._blocks[-1].kind != kind:
            self._append(_Block(kind, {"type": kind, kind: ""}))
        if text:
            self._blocks[-1].pieces.append(text)
        self._advance()

    def add_reasoning(self, text: str, signature: str | None, redacted: str | None) -> None:
        """Add reasoning. A signature ends its block."""
        if redacted is not None:
            kind: BlockKind = "redacted_thinking"
            self._append(_Block(kind, {"type": kind, "data": redacted}))
        elif text or signature or not self._blocks or self._blocks[-1].kind != "thinking":
            if self._blocks and self._blocks[-1].signature is not None:
                self._append(_Block("thinking", _THINKING_START))
            self.add("thinking", text)
            self._blocks[-1].signature = signature
        self._advance()

    def add_call(self, call_index: int, identifier: str, name: str) -> None:
        """Begin a tool call."""
        self.has_calls = True
        start = {"type": "tool_use", "id": identifier, "name": name, "input": {}}
        self._append(_Block("tool_use", start, call_index))
        self._advance()

    def add_arguments(self, call_index: int, text: str) -> None:
        """Add a piece of the arguments of a call that has begun."""
        for block in self._blocks:
            if block.call_index == call_index:
                block.pieces.append(text)
                block.arguments.append(text)
        self._advance()

    def list_damaged_calls(self) -> list[int]:
        """The numbers of the calls whose arguments are no object."""
        return [
            block.call_index
            for block in self._blocks
            if block.call_index is not None and block.arguments and not block.is_complete
        ]

    def encode_empty_delta(self, kind: BlockKind) -> bytes:
        """A delta without content, in a block of ``kind`` if none is open."""
        if not self._blocks:
            self.add(kind, "")
        elif self._blocks[0].kind != "redacted_thinking":
            self._out.append(_encode_delta(self._blocks[0].kind, self._count - 1, ""))
        return self.take_bytes()

    def close(self) -> None:
        """Write and end all blocks."""
        while self._blocks:
            self._write(self._blocks[0])
            self._end_first()
        self.is_text_open = False

    def _append(self, block: _Block) -> None:
        if block.kind == "thinking":
            block.start = _THINKING_START
        self._blocks.append(block)

    def _advance(self) -> None:
        """Write what can be written now."""
        self._write(self._blocks[0])
        while len(self._blocks) > 1 and self._blocks[0].is_complete:
            self._end_first()
            self._write(self._blocks[0])
        self.is_text_open = len(self._blocks) == 1 and self._blocks[0].kind == "text"

    def _write(self, block: _Block) -> None:
        """Open the first block if it is not open, and write its pieces."""
        if block.index < 0:
            block.index = self._count
            self._count += 1
            start = {
                "type": "content_block_start",
                "index": block.index,
                "content_block": block.start,
            }
            self._out.append(b"event: content_block_start\ndata: %b\n\n" % _encode(start))
        self._out += [_encode_delta(block.kind, block.index, piece) for piece in block.pieces]
        block.pieces.clear()

    def _end_first(self) -> None:
        block = self._blocks.pop(0)
        if block.kind == "thinking":
            delta = {"type": "signature_delta", "signature": block.signature or self._signature}
            event = {"type": "content_block_delta", "index": block.index, "delta": delta}
            self._out.append(b"event: content_block_delta\ndata: %b\n\n" % _encode(event))
        self._out.append(
            b"event: content_block_stop\n"
            b'data: {"type":"content_block_stop","index":%d}\n\n' % block.index
        )


_THINKING_START: Final[dict[str, Any]] = {"type": "thinking", "thinking": "", "signature": ""}


def _encode_delta(kind: BlockKind, index: int, text: str) -> bytes:
    delta, field = _DELTA_FIELDS[kind]
    return (
        b"event: content_block_delta\n"
        b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
        % (index, delta, field, _encode(text))
    )
