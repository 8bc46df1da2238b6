"""Decodes messages of workers, streaming and unary.

Workers vary: any key may be missing or null, blocks may begin at any index, and a tool's input may
stand in the start of its block.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from protocols.anthropic.errors import read_event_error
from protocols.core import sse
from protocols.core.call_ids import CallIds
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import (
    Event,
    FieldValues,
    ReasoningDelta,
    ResponseExtra,
    ResponseMetadata,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.extra import KeyTree, find_unknown_keys
from protocols.core.finish_reasons import FinishReasonTable
from protocols.core.json_text import JsonDecoder
from protocols.core.request import GenerationRequest
from protocols.core.token_counts import UsageReader
from protocols.json_body import JSON_ERRORS, build_answer_error

_decode = JsonDecoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode

FINISH_REASONS: Final = FinishReasonTable(
    "anthropic",
    {
        "end_turn": "eos",
        "stop_sequence": "stop",
        "max_tokens": "length",
        "tool_use": "tool_calls",
        "refusal": "content_filter",
    },
    {"pause_turn": "eos", "model_context_window_exceeded": "length"},
)


_COUNT_KEYS: Final[KeyTree] = {
    **dict.fromkeys(
        ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    ),
    "output_tokens_details": {"thinking_tokens": None},
}
_MESSAGE_KEYS: Final[KeyTree] = {
    **dict.fromkeys(("id", "content", "model", "stop_reason", "stop_sequence")),
    "type": frozenset({"message"}),
    "role": frozenset({"assistant"}),
    "usage": _COUNT_KEYS,
}
_STOP_KEYS: Final[KeyTree] = {
    "type": None,
    "delta": dict.fromkeys(("stop_reason", "stop_sequence")),
    "usage": _COUNT_KEYS,
}
_EVENT_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "message_start": frozenset({"type", "message"}),
    "content_block_start": frozenset({"type", "index", "content_block"}),
    "content_block_delta": frozenset({"type", "index", "delta"}),
    "content_block_stop": frozenset({"type", "index"}),
    "message_stop": frozenset({"type"}),
}
"""The keys of the events of a stream; those of ``message_delta`` are in ``_STOP_KEYS``."""
_PART_KEYS: Final[Mapping[str, KeyTree]] = {
    "text": dict.fromkeys(("type", "text")),
    "thinking": dict.fromkeys(("type", "thinking", "signature")),
    "redacted_thinking": dict.fromkeys(("type", "data")),
    "tool_use": dict.fromkeys(("type", "id", "name", "input")),
    "text_delta": dict.fromkeys(("type", "text")),
    "input_json_delta": dict.fromkeys(("type", "partial_json")),
    "thinking_delta": dict.fromkeys(("type", "thinking")),
    "signature_delta": dict.fromkeys(("type", "signature")),
}
"""The keys of blocks and of their deltas that events represent."""
_DELTA_KEYS: Final = {"citations_delta": "citations"}
"""The key of a block that a delta adds to, if no event represents it."""
_TYPES: Final[Mapping[str, type]] = {
    **dict.fromkeys(("text", "thinking", "signature", "data", "id", "partial_json"), str),
    "input": dict,
}
"""The types of keys whose value is otherwise as good as unknown."""
SOURCE: Final = "anthropic"
"""The protocol of the keys that no event represents: its own clients get messages unchanged."""


def _add_unknown_keys(
    value: Mapping[str, Any], known: KeyTree | None, events: list[Event], place: Any = None
) -> None:
    """Add the keys that no event represents; all of a block or a delta of an unknown type."""
    values: FieldValues
    if known is None:
        kind = _as_text(value.get("type")) or "type"
        values = (((_DELTA_KEYS.get(kind, kind),), value),)
    else:
        unknown = find_unknown_keys(value, known)
        odd = {(name,): value[name] for name, kind in _TYPES.items() if _is_odd(value, name, kind)}
        values = tuple((path, one) for path, one in (unknown | odd).items() if one is not None)
    if values:
        scope: Literal["block", "response"] = "response" if place is None else "block"
        index = place if isinstance(place, int) else 0
        events.append(ResponseExtra(SOURCE, scope, values, index))


def _add_event_keys(fields: Mapping[str, Any], events: list[Event]) -> None:
    """Add the keys that an event has beside its content."""
    kind = _as_text(fields.get("type"))
    known = _EVENT_KEYS.get(kind)
    if known is not None and not fields.keys() <= known:
        values = tuple(
            [
                (("events", kind, name), value)
                for name, value in fields.items()
                if name not in known and value is not None
            ]
        )
        if values:
            events.append(ResponseExtra(SOURCE, "response", values))


def _locate_block(index: Any, name: str) -> str:
    """The path of something in a block; what has no place is that of the first one."""
    return f"response.content[{index if isinstance(index, int) else 0}].{name}"


def _is_odd(value: Mapping[str, Any], name: str, kind: type) -> bool:
    """Whether a key is there with a value of another type."""
    return value.get(name) is not None and not isinstance(value[name], kind)


class MessageDecoder(sse.StreamDecoder):
    """Decodes the response to one request, as a stream or as one JSON body."""

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(_raise_if_error)
        self._source = request.source
        self._call_ids = CallIds()
        self._usage_reader = UsageReader(request)
        self._counts: dict[str, Any] = {}
        """The token counts so far; the last one of each counts."""
        self._calls: dict[Any, int] = {}
        """The number of the tool call of each block, by the block's index."""
        self._call_count = 0
        self._block_count = 0
        self._unknown_blocks: dict[Any, str] = {}
        """The type of each block that no event represents, by its index."""
        self._inputs: dict[Any, Any] = {}
        """The input in the start of each tool's block, as long as no delta came."""
        self._reason: Any = None
        self._stop: Any = None

    # --- a stream ---------------------------------------------------------------------------------

    def _read_payload(self, payload: bytes, events: list[Event]) -> None:
        if self._is_done or not payload.startswith(b"{"):
            return
        fields = _read_object(payload)
        _add_event_keys(fields, events)
        match fields.get("type"):
            case "content_block_delta":
                self._read_delta(self._find_block(fields), _as_dict(fields.get("delta")), events)
            case "content_block_start":
                self._block_count += 1
                index = self._find_block(fields)
                self._read_block(index, _as_dict(fields.get("content_block")), events)
            case "content_block_stop":
                self._end_call(self._find_block(fields), events)
            case "message_start":
                message = _as_dict(fields.get("message"))
                events.append(_read_metadata(message))
                _add_unknown_keys(message, _MESSAGE_KEYS, events)
                self._add_counts(message)
            case "message_delta":
                _add_unknown_keys(fields, _STOP_KEYS, events)
                self._add_counts(fields)
                self._read_stop(_as_dict(fields.get("delta")))
            case "message_stop":
                events += self._build_end()
            case _ if "error" in fields:
                raise read_event_error(payload, fields)
            case "ping":
                pass
            case kind:
                values = ((("events", _as_text(kind) or "type"), fields),)
                events.append(ResponseExtra(SOURCE, "response", values))

    def _find_block(self, fields: Mapping[str, Any]) -> Any:
        """The block that an event is about: the last one that has begun if its index is odd."""
        index = fields.get("index")
        is_valid = isinstance(index, int | str) and not isinstance(index, bool)
        return index if is_valid else self._block_count - 1

    def _read_block(self, index: Any, block: Mapping[str, Any], events: list[Event]) -> None:
        kind = _as_text(block.get("type"))
        _add_unknown_keys(block, _PART_KEYS.get(kind), events, index)
        self._unknown_blocks.pop(index, None)
        if kind and kind not in _PART_KEYS:
            self._unknown_blocks[index] = kind
        match block:
            case {"type": "text", "text": str() as text} if text:
                events.append(TextDelta(text))
            case {"type": "thinking"}:
                thought = _as_text(block.get("thinking"))
                signature = _as_text(block.get("signature")) or None
                if thought or signature:
                    at = _locate_block(index, "signature") if signature else ""
                    events.append(ReasoningDelta(thought, 0, signature, at=at))
            case {"type": "redacted_thinking", "data": str() as data}:
                at = _locate_block(index, "redacted_thinking")
                events.append(ReasoningDelta("", redacted=data, at=at))
            case {"type": "tool_use", "name": str() as name}:
                self._end_call(index, events)  # of an earlier block with the same index
                call = self._calls[index] = self._call_count
                self._call_count += 1
                self._inputs[index] = block.get("input")
                identifier = self._call_ids.claim(
                    _as_text(block.get("id")) or f"call_{call}", 0, call
                )
                events.append(ToolCallStart(0, call, identifier, name))
            case {"type": "tool_use"}:
                raise StreamBroken("The worker called a tool without its name.")
            case _:
                pass

    def _read_delta(self, index: Any, delta: Mapping[str, Any], events: list[Event]) -> None:
        _add_unknown_keys(delta, _PART_KEYS.get(_as_text(delta.get("type"))), events, index)
        match delta:
            case {"type": "input_json_delta"} if index in self._unknown_blocks:
                # The input of a tool that the worker runs itself is lost with its block.
                values = (((self._unknown_blocks[index],), delta),)
                place = index if isinstance(index, int) else 0
                events.append(ResponseExtra(SOURCE, "block", values, place))
            case {"type": "text_delta", "text": str() as text} if text:
                events.append(TextDelta(text))
            case {"type": "input_json_delta", "partial_json": str() as text} if text:
                if not self._calls:
                    raise StreamBroken("The worker sent arguments of a call that has not begun.")
                begun = index if index in self._calls else next(reversed(self._calls))
                self._inputs.pop(begun, None)
                events.append(ToolCallDelta(0, self._calls[begun], text))
            case {"type": "thinking_delta", "thinking": str() as text} if text:
                events.append(ReasoningDelta(text))
            case {"type": "signature_delta", "signature": str() as signature} if signature:
                at = _locate_block(index, "signature")
                events.append(ReasoningDelta("", signature=signature, at=at))
            case _:
                pass

    def _end_call(self, index: Any, events: list[Event]) -> None:
        """Add the input in the start of a call's block, if no delta had it."""
        if index in self._inputs:
            arguments = _encode(_as_dict(self._inputs.pop(index))).decode()
            events.append(ToolCallDelta(0, self._calls[index], arguments))

    # --- one JSON body ----------------------------------------------------------------------------

    def _read_document(self, body: bytes | bytearray) -> Sequence[Event]:
        fields = _read_object(body)
        content = fields.get("content")
        if not isinstance(content, list):
            if "error" in fields:
                raise read_event_error(bytes(body), fields)
            raise WorkerFailed("The worker's answer has no content.")
        events: list[Event] = [_read_metadata(fields)]
        _add_unknown_keys(fields, _MESSAGE_KEYS, events)
        for index, block in enumerate(content):
            self._read_block(index, _as_dict(block), events)
            self._end_call(index, events)
        self._add_counts(fields)
        self._read_stop(fields)
        ending = self._build_end()
        tokens = next((one.completion_tokens for one in ending if type(one) is Usage), None)
        return [*_count_tokens(events, tokens), *ending]

    # --- both -------------------------------------------------------------------------------------

    def _read_stop(self, fields: Mapping[str, Any]) -> None:
        self._reason = fields.get("stop_reason") or self._reason
        if self._reason:
            FINISH_REASONS.read_word(self._reason, self._source)  # raises an error at once
        self._stop = fields.get("stop_sequence") or self._stop

    def _add_counts(self, fields: Mapping[str, Any]) -> None:
        usage = fields.get("usage")
        if isinstance(usage, dict):
            self._counts |= {name: value for name, value in usage.items() if value is not None}
        elif usage is not None:
            self._usage_reader.has_ignored = True

    def _build_end(self) -> list[Event]:
        self._is_done = True
        events: list[Event] = []
        for index in tuple(self._inputs):
            self._end_call(index, events)
        finish = FINISH_REASONS.read_word(self._reason, self._source)
        stop = self._stop if finish.reason == "stop" and isinstance(self._stop, str) else None
        end = finish.build_end(matched_stop=stop, called=bool(self._calls))
        is_own = self._source in ("", SOURCE)
        if is_own and ((end.finish_reason == "stop" and not stop) or self._lacks_call):
            end = replace(end, own_word=self._reason)  # which says more than the message
        if stop and not is_own:
            events.append(ResponseExtra(SOURCE, "response", ((("stop_sequence",), stop),)))
        return [*events, end, *self._usage_reader.build_end(self._usage())]

    @property
    def _lacks_call(self) -> bool:
        """Whether the message ends for a call that it does not have."""
        return self._reason == "tool_use" and not self._calls

    def _usage(self) -> Usage | None:
        """The usage; the prompt's tokens include those that a cache held or stores."""
        counts = self._counts
        prompt: Any = counts.get("input_tokens")
        read: Any = counts.get("cache_read_input_tokens")
        written: Any = counts.get("cache_creation_input_tokens")
        if type(prompt) is int:
            for count in (read, written):
                if type(count) is int and count >= 0:
                    prompt += count
        details = _as_dict(counts.get("output_tokens_details"))
        usage = self._usage_reader.read_usage(
            prompt, counts.get("output_tokens"), read or None, details.get("thinking_tokens")
        )
        stored = self._usage_reader.read_prompt_tokens(written or None)
        if usage is None or stored is None:
            return usage
        return replace(usage, cache_write_tokens=stored)


def _count_tokens(events: Sequence[Event], tokens: int | None) -> list[Event]:
    """The events of a message with its tokens counted in its first text."""
    texts = [event for event in events if type(event) is TextDelta]
    if tokens is None or not texts:
        return list(events)
    counted = {id(event): int(i == 0) * tokens for i, event in enumerate(texts)}
    return [
        replace(event, tokens=counted[id(event)]) if type(event) is TextDelta else event
        for event in events
    ]


def _raise_if_error(line: bytes) -> None:
    if b"error" in line:
        raise read_event_error(line, _read_object(line))


def _read_object(data: bytes | bytearray) -> dict[str, Any]:
    try:
        return _decode(data)
    except JSON_ERRORS as e:
        raise build_answer_error(e) from e


def _read_metadata(message: Mapping[str, Any]) -> ResponseMetadata:
    model, identifier = message.get("model"), message.get("id")
    return ResponseMetadata(_as_text(model) or None, id=_as_text(identifier) or None, source=SOURCE)


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""
