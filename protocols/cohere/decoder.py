"""Decodes responses of chat, streaming and unary.

The plan that a model writes before it calls tools is text. Citations refer to documents that only
Cohere's clients know: like every key without an event, they are passed on or reported.

A stream is complete after its message-end. What follows is the mark ``[DONE]``, or the end of the
body: only then comes StreamEnd, so that nothing of the stream is left unread.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from protocols.chat.wire_responses import read_required_text
from protocols.chat.worker_errors import find_worker_error, map_worker_error, raise_worker_error
from protocols.core.call_ids import CallIds
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import (
    Event,
    FieldValues,
    ReasoningDelta,
    ResponseExtra,
    ResponseMetadata,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.extra import KeyTree, find_unknown_keys
from protocols.core.finish_reasons import FinishReasonTable
from protocols.core.json_text import JsonDecoder
from protocols.core.request import GenerationRequest
from protocols.core.sse import StreamDecoder
from protocols.core.token_counts import UsageReader
from protocols.json_body import JSON_ERRORS, build_answer_error

_decode = JsonDecoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode
SOURCE: Final = "cohere"
"""The protocol of the keys that no event represents: its own clients get responses unchanged."""

FINISH_REASONS: Final = FinishReasonTable(
    SOURCE,
    {
        "COMPLETE": "eos",
        "STOP_SEQUENCE": "stop",
        "MAX_TOKENS": "length",
        "TOOL_CALL": "tool_calls",
        "ERROR": None,
        "TIMEOUT": None,
    },
)

_COUNTS: Final = dict.fromkeys(("input_tokens", "output_tokens"))
_USAGE: Final[KeyTree] = {
    "billed_units": {**_COUNTS, "search_units": None, "classifications": None},
    "tokens": _COUNTS,
    "cached_tokens": None,
}
_LOGPROBS: Final = dict.fromkeys(("text", "token_ids", "logprobs"))
_FUNCTION: Final[KeyTree] = dict.fromkeys(("name", "arguments"))
_CALL: Final[KeyTree] = {"id": None, "type": frozenset({"function"}), "function": _FUNCTION}
_BLOCK: Final[KeyTree] = {
    "type": frozenset({"text", "thinking"}),
    **dict.fromkeys(("text", "thinking")),
}
_MESSAGE: Final[KeyTree] = {
    "role": frozenset({"assistant"}),
    **dict.fromkeys(("tool_plan", "content", "tool_calls", "citations")),
}
_ANSWER: Final[KeyTree] = {
    **dict.fromkeys(("id", "finish_reason", "logprobs")),
    "message": _MESSAGE,
    "usage": _USAGE,
}


def _describe_event(message: KeyTree | None = None, **more: KeyTree | None) -> KeyTree:
    delta = {} if message is None else {"delta": {"message": message}}
    return {"type": None, "index": None, "id": None, **delta, **more}


_EVENTS: Final[Mapping[str, KeyTree]] = {
    "message-start": _describe_event(_MESSAGE),
    "content-start": _describe_event({"content": _BLOCK}),
    "content-delta": _describe_event({"content": _BLOCK}, logprobs=_LOGPROBS),
    "content-end": _describe_event(),
    "tool-plan-delta": _describe_event({"tool_plan": None}),
    "tool-call-start": _describe_event({"tool_calls": _CALL}),
    "tool-call-delta": _describe_event({"tool_calls": _CALL}),
    "tool-call-end": _describe_event(),
    "citation-start": _describe_event({"citations": None}),
    "citation-end": _describe_event(),
    "message-end": _describe_event(delta={"finish_reason": None, "usage": _USAGE, "error": None}),
}
"""The keys of each event that events of the gateway represent, or that are framing."""


class ChatDecoder(StreamDecoder):
    """Decodes the response to one request of chat."""

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(raise_worker_error)
        self._source = request.source
        self._usage_reader = UsageReader(request)
        self._usage: Usage | None = None
        self._call_ids = CallIds()
        self._calls: dict[Any, int] = {}
        """The number of each call, by the worker's index."""
        self._has_ended = False
        """Whether the message has ended."""

    @property
    def has_ignored_usage(self) -> bool:
        """Whether the worker reported implausible token counts so far."""
        return self._usage_reader.has_ignored

    # --- a stream ---------------------------------------------------------------------------------

    def _read_payload(self, payload: bytes, events: list[Event]) -> None:
        if self._is_done:
            return
        if payload == b"[DONE]":
            events += self._build_missing_end()
            return
        if self._has_ended or not payload.startswith(b"{"):
            return
        fields = _read_object(payload)
        kind = fields.get("type")
        if not isinstance(kind, str) or kind not in _EVENTS:
            raise_worker_error(payload)
            values = (((kind if isinstance(kind, str) else "type",), fields),)
            events.append(ResponseExtra(SOURCE, "response", values))
            return
        _add_unknown_keys(fields, _EVENTS[kind], events)
        delta = _read_part(kind, fields, "delta", events)
        self._read_event(kind, fields, _read_part(kind, delta, "message", events), events)

    def _read_event(
        self, kind: str, fields: Mapping[str, Any], message: Mapping[str, Any], events: list[Event]
    ) -> None:
        match kind:
            case "content-delta":
                tokens = _read_logprobs(fields.get("logprobs"))
                _read_content(message.get("content"), events, tokens)
            case "content-start":
                content = _as_dict(message.get("content"))
                start = {name: _read_text(content, name, events) for name in ("text", "thinking")}
                _read_content(start or message.get("content"), events)
            case "tool-plan-delta":
                _read_plan(message, events)
            case "tool-call-start":
                self._begin_call(fields.get("index"), _as_dict(message.get("tool_calls")), events)
            case "tool-call-delta":
                self._read_arguments(
                    fields.get("index"), _as_dict(message.get("tool_calls")), events
                )
            case "citation-start":
                _add_citations(message.get("citations"), events)
            case "message-start":
                events.append(_read_metadata(fields))
            case "message-end":
                delta = _as_dict(fields.get("delta"))
                self._read_usage(delta.get("usage"))
                self._end_message(delta.get("finish_reason"), delta.get("error"), events)
            case _:
                pass

    def _begin_call(self, index: Any, call: Mapping[str, Any], events: list[Event]) -> None:
        function = _as_dict(call.get("function"))
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise StreamBroken("The worker called a tool without its name.")
        number = len(self._calls)
        self._calls[index if isinstance(index, int | str) else number] = number
        wire_id = call.get("id")
        identifier = self._call_ids.claim(wire_id if isinstance(wire_id, str) else None, 0, number)
        events.append(ToolCallStart(0, number, identifier, name))
        _add_arguments(number, function, events)

    def _read_arguments(self, index: Any, call: Mapping[str, Any], events: list[Event]) -> None:
        """A piece of the arguments: of the last call if its index is that of none."""
        if not self._calls:
            raise StreamBroken("The worker sent arguments of a call that has not begun.")
        is_known = isinstance(index, int | str) and index in self._calls
        number = self._calls[index] if is_known else len(self._calls) - 1
        _add_arguments(number, _as_dict(call.get("function")), events)

    # --- one JSON body ----------------------------------------------------------------------------

    def _read_document(self, body: bytes | bytearray) -> Sequence[Event]:
        fields = _read_object(body)
        message = fields.get("message")
        if not isinstance(message, dict):
            raise_worker_error(bytes(body))
            raise WorkerFailed("The worker's answer has no message.")
        events: list[Event] = [_read_metadata(fields)]
        _add_unknown_keys(fields, _ANSWER, events)
        self._read_usage(fields.get("usage"))
        texts = self._read_message(message)
        tokens = _read_logprob_list(fields.get("logprobs"), events)
        count = None if self._usage is None else self._usage.completion_tokens
        events += _count_tokens(texts, tokens, count)
        self._end_message(fields.get("finish_reason"), None, events)
        return [*events, *self._build_missing_end()]

    def _read_message(self, message: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        _read_content(message.get("content"), events)
        _read_plan(message, events)
        for i, call in enumerate(_read_list(message, "tool_calls", events)):
            _add_unknown_keys(_as_dict(call), _CALL, events, "message", f"tool_calls[{i}]")
            self._begin_call(None, _as_dict(call), events)
        _add_citations(_read_list(message, "citations", events) or None, events)
        return events

    # --- both -------------------------------------------------------------------------------------

    def _read_usage(self, usage: Any) -> None:
        """The counts of the model's tokens; without them, of those that are billed."""
        if usage is None:
            return
        if not isinstance(usage, dict):
            self._usage_reader.has_ignored = True
            return
        counts = _as_dict(usage.get("tokens")) or _as_dict(usage.get("billed_units"))
        prompt, completion, cached = (
            _as_integer(one)
            for one in (
                counts.get("input_tokens"),
                counts.get("output_tokens"),
                usage.get("cached_tokens"),
            )
        )
        self._usage = self._usage_reader.read_usage(prompt, completion, cached or None)

    def _end_message(self, word: Any, text: Any, events: list[Event]) -> None:
        """Add the end of the choice. Raises WorkerFailed for ERROR and TIMEOUT."""
        try:
            finish = FINISH_REASONS.read_word(word, self._source)
        except WorkerFailed as error:
            fault = find_worker_error({"error": text})
            if fault is not None:
                raise map_worker_error(0, fault) from error
            raise
        self._has_ended = True
        events.append(finish.build_end(called=bool(self._calls)))

    def _build_missing_end(self) -> Sequence[Event]:
        """The last events, if the message has ended."""
        if not self._has_ended:
            return ()
        self._is_done = True
        return self._usage_reader.build_end(self._usage)


# --- objects of both ------------------------------------------------------------------------------


def _read_metadata(fields: Mapping[str, Any]) -> ResponseMetadata:
    identifier = fields.get("id")
    return ResponseMetadata(id=identifier if isinstance(identifier, str) else None, source=SOURCE)


def _read_part(
    kind: str, fields: Mapping[str, Any], name: str, events: list[Event]
) -> Mapping[str, Any]:
    """An object in an event, or an empty one; a value of another type is reported.

    Raises WorkerFailed for one that held text.
    """
    value = fields.get(name)
    if isinstance(value, dict):
        return value
    if value is not None:
        if kind == "content-delta":
            raise WorkerFailed(f"The worker's text is in a {name} that is no object.")
        events.append(ResponseExtra(SOURCE, "response", (((kind, name), value),)))
    return {}


def _read_content(
    content: Any, events: list[Event], logprobs: tuple[TokenLogprob, ...] = ()
) -> None:
    """Add what a content holds: a text, a block or a piece of one, or a list of blocks.

    Raises WorkerFailed for anything else: the answer would be another one without it.
    """
    blocks = content if isinstance(content, list) else [content]
    for i, block in enumerate(blocks):
        if block is None or isinstance(block, str):
            _read_block({"text": block}, events, logprobs)
        elif isinstance(block, dict):
            if content is blocks:
                _add_unknown_keys(block, _BLOCK, events, "message", f"content[{i}]")
            _read_block(block, events, logprobs)
        else:
            raise WorkerFailed("The worker's answer has a part of its content that is no object.")
        logprobs = ()


def _read_block(
    block: Mapping[str, Any], events: list[Event], logprobs: tuple[TokenLogprob, ...]
) -> None:
    """Add the text and the reasoning of a block of content, or of a piece of one."""
    if thought := _read_text(block, "thinking", events):
        events.append(ReasoningDelta(thought))
    text = read_required_text(block.get("text"))
    if text or logprobs:
        events.append(TextDelta(text, 0, len(logprobs) or 1, logprobs=logprobs))


def _read_plan(message: Mapping[str, Any], events: list[Event]) -> None:
    if plan := _read_text(message, "tool_plan", events):
        events.append(TextDelta(plan))


def _add_arguments(call_index: int, function: Mapping[str, Any], events: list[Event]) -> None:
    """Add the arguments: their text, or any other JSON as one."""
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = _encode(arguments).decode()
    if arguments:
        events.append(ToolCallDelta(0, call_index, arguments))


def _add_citations(citations: Any, events: list[Event]) -> None:
    if citations is not None:
        events.append(ResponseExtra(SOURCE, "response", ((("message", "citations"), citations),)))


def _read_text(fields: Mapping[str, Any], name: str, events: list[Event]) -> str:
    """A text, or ""; a value of another type is as good as an unknown key."""
    value = fields.get(name)
    if isinstance(value, str):
        return value
    if value is not None:
        events.append(ResponseExtra(SOURCE, "response", ((("message", name), value),)))
    return ""


def _read_list(message: Mapping[str, Any], name: str, events: list[Event]) -> list[Any]:
    """A list, or an empty one; a value of another type is as good as an unknown key."""
    value = message.get(name)
    if isinstance(value, list):
        return value
    if value is not None:
        events.append(ResponseExtra(SOURCE, "response", ((("message", name), value),)))
    return []


def _add_unknown_keys(
    value: Mapping[str, Any], known: KeyTree, events: list[Event], *at: str
) -> None:
    """Report the unknown keys of an object, which stands at this path."""
    unknown = find_unknown_keys(value, known).items()
    values: FieldValues = tuple(((*at, *path), one) for path, one in unknown if one is not None)
    if values:
        events.append(ResponseExtra(SOURCE, "response", values))


def _read_logprobs(value: Any) -> tuple[TokenLogprob, ...]:
    """The tokens of a piece of text; the first one has its text."""
    fields = _as_dict(value)
    numbers, ids = fields.get("logprobs"), fields.get("token_ids")
    if not isinstance(numbers, list) or not all(type(one) in (int, float) for one in numbers):
        return ()
    known = isinstance(ids, list) and len(ids) == len(numbers) and all(type(i) is int for i in ids)
    text = fields.get("text")
    return tuple(
        TokenLogprob(
            text if isinstance(text, str) and not i else "",
            float(number),
            id=ids[i] if known and ids is not None else None,
        )
        for i, number in enumerate(numbers)
    )


def _read_logprob_list(value: Any, events: list[Event]) -> tuple[TokenLogprob, ...]:
    chunks = value if isinstance(value, list) else ()
    for i, chunk in enumerate(chunks):
        _add_unknown_keys(_as_dict(chunk), _LOGPROBS, events, f"logprobs[{i}]")
    return tuple(token for one in chunks for token in _read_logprobs(one))


def _count_tokens(
    events: Sequence[Event], logprobs: tuple[TokenLogprob, ...], count: int | None
) -> list[Event]:
    """The events of a message with its tokens, and their probabilities, at its first text."""
    texts = [event for event in events if type(event) is TextDelta]
    if not texts:
        return list(events)
    first = replace(texts[0], logprobs=logprobs)
    if count is not None:
        first = replace(first, tokens=count)
    rest = 1 if count is None else 0
    return [
        first
        if event is texts[0]
        else replace(event, tokens=rest)
        if type(event) is TextDelta
        else event
        for event in events
    ]


def _as_integer(value: Any) -> Any:
    """A whole number as an integer: the API's type of counts is a number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_object(data: bytes | bytearray) -> dict[str, Any]:
    try:
        return _decode(data)
    except JSON_ERRORS as e:
        raise build_answer_error(e) from e
