"""Decodes workers' responses of the Responses API, streaming and unary.

Workers differ in their events: some send no numbers, no ``added`` events or other ids in the end.
So an item is known by its id or its index, and what its events left out is read from its end, or
from the final response.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from protocols.chat.wire_responses import WireLogprobs, read_logprobs, read_text
from protocols.chat.worker_errors import raise_worker_error
from protocols.core import sse
from protocols.core.call_arguments import write_text_argument
from protocols.core.call_ids import CallIds
from protocols.core.custom_tools import knows_custom_tools
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import (
    PART_SEPARATOR,
    ChoiceEnd,
    Event,
    FieldValues,
    HostedToolCall,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.extra import KeyTree, find_unknown_keys, has_content
from protocols.core.fieldwise import report_lost_fields
from protocols.core.finish_reasons import FinishReasonTable
from protocols.core.json_counts import FULL_EVENT_COUNTS
from protocols.core.json_text import JsonDecoder
from protocols.core.request import GenerationRequest
from protocols.core.token_counts import MAX_TIMESTAMP, UsageReader, read_integer
from protocols.json_body import build_answer_error
from protocols.openai.responses_api.requests import SOURCE
from protocols.openai.responses_api.tools import join_tool_name

_encode = msgspec.json.Encoder().encode

_Object = dict[str, Any]


class _WireEvent(Struct):
    """An event; any field may be missing."""

    type: str = ""
    delta: Any = None
    item_id: Any = None
    output_index: Any = None
    item: Any = None
    response: Any = None
    logprobs: Any = None
    content_index: Any = None
    summary_index: Any = None
    sequence_number: Any = None
    obfuscation: Any = None


class _KnownEvent(_WireEvent, forbid_unknown_fields=True):
    """An event without keys that nobody knows."""


_decode_known_event = JsonDecoder(_KnownEvent).decode
_decode_event = JsonDecoder(_WireEvent).decode
_decode_response = JsonDecoder(_Object).decode
_JSON_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError)
_DONE_PAYLOAD: Final = b"[DONE]"

_REASONING_DELTAS: Final = frozenset(
    {"response.reasoning_text.delta", "response.reasoning_summary_text.delta"}
)
_CALL_DELTAS: Final = frozenset(
    {"response.function_call_arguments.delta", "response.custom_tool_call_input.delta"}
)
_READ_EVENTS: Final = frozenset(
    {"response.output_text.delta", "response.refusal.delta", "response.output_item.added",
     "response.output_item.done", "response.created", "response.in_progress", "response.queued",
     "response.completed", "response.incomplete", *_REASONING_DELTAS, *_CALL_DELTAS}
)  # fmt: skip
"""The events that are read."""
_REPEATING_EVENTS: Final = frozenset(
    {"response.content_part.added", "response.content_part.done", "response.output_text.done",
     "response.output_text.annotation.added", "response.refusal.done",
     "response.reasoning_text.done", "response.reasoning_summary_text.done",
     "response.reasoning_summary_part.added", "response.reasoning_summary_part.done",
     "response.function_call_arguments.done", "response.custom_tool_call_input.done"}
)  # fmt: skip
"""The events that repeat what those, or the last form of an item, say. All others are passed on."""
_PLACE_KEYS: Final = ("item_id", "output_index")
_OWN_KEYS: Final = frozenset({"type", "sequence_number"})
_FRAMING_KEYS: Final = frozenset({*_PLACE_KEYS, "content_index", "summary_index", "obfuscation"})
"""The keys of events that have no content."""
_CALL_KEYS: Final[Mapping[str, str]] = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "tool_search_call": "arguments",
}
"""The types of calls, with the field of their arguments."""
_CONTENT_TYPES: Final = frozenset({"message", "reasoning"})
_COMMON_KEYS: Final[KeyTree] = {
    **dict.fromkeys(("id", "type")),
    "status": frozenset({"completed", "in_progress", "incomplete"}),
}
_CALL_FIELDS: Final = ("call_id", "name", "namespace", "execution")
_ITEM_KEYS: Final[Mapping[str, KeyTree]] = {
    "message": {**_COMMON_KEYS, "role": frozenset({"assistant"}), "content": None},
    "reasoning": {**_COMMON_KEYS, **dict.fromkeys(("summary", "content"))},
    **{
        kind: {**_COMMON_KEYS, **dict.fromkeys((*_CALL_FIELDS, key))}
        for kind, key in _CALL_KEYS.items()
    },
}
"""The keys of items that events represent."""
_PART_KEYS: Final[Mapping[str, KeyTree]] = {
    "output_text": dict.fromkeys(("type", "text", "logprobs")),
    "refusal": dict.fromkeys(("type", "refusal")),
    "reasoning_text": dict.fromkeys(("type", "text")),
    "summary_text": dict.fromkeys(("type", "text")),
}
"""The keys of parts of messages and of reasoning that events represent."""
ONLY_PART: Final = "content[0]"
"""Begins the path of unknown keys of a message's only part, such as the annotations of a text."""
_RESPONSE_KEYS: Final[KeyTree] = {
    **dict.fromkeys(
        ("id", "object", "created_at", "completed_at", "status", "error", "model", "output",
         "usage", "instructions", "max_output_tokens", "max_tool_calls",
         "parallel_tool_calls", "previous_response_id", "prompt", "prompt_cache_key",
         "safety_identifier", "store", "tool_choice", "tools", "user", "metadata", "background"),
    ),
    "incomplete_details": {"reason": None},
    "usage": {
        **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens")),
        "input_tokens_details": dict.fromkeys(("cached_tokens", "cache_write_tokens")),
        "output_tokens_details": {"reasoning_tokens": None},
    },
}  # fmt: skip
"""The keys of a response that events represent, or that repeat the request."""
_SETTING_KEYS: Final = frozenset(
    {"billing", "frequency_penalty", "presence_penalty", "prompt_cache_retention", "reasoning",
     "service_tier", "temperature", "text", "top_logprobs", "top_p", "truncation"}
)  # fmt: skip
"""Those that say what the worker made of the request: its own clients get them as they are."""
STATUSES: Final = FinishReasonTable(SOURCE, {"completed": "eos"})
INCOMPLETE_REASONS: Final = FinishReasonTable(
    SOURCE, {"max_output_tokens": "length", "content_filter": "content_filter"}
)
INCOMPLETE_PREFIX: Final = "incomplete: "
"""Starts the unknown word of a choice's end if that is the reason of an incomplete response; else
it is the response's status."""
_NO_STATUS: Final = ResponseExtra(
    SOURCE, "response", ((("status",), None), (("completed_at",), None))
)
"""A response whose worker does not say what became of it."""
_FAILED_STATUSES: Final = frozenset({"failed", "cancelled"})


class _OutputState(Struct):
    """An item of the output, as far as its events came."""

    has_output: bool = False
    call_index: int | None = None
    arguments: str = ""
    wraps_text: bool = False
    """Whether it is a call of a custom tool, of which the client does not know."""
    is_done: bool = False
    is_hosted: bool = False
    """Whether it is that of a tool that the worker runs, and is passed on as it is at its end."""
    hosted_events: list[tuple[str, _Object]] = []
    text_part: Any = None
    """The number of the part of a message that the last piece belongs to."""
    reasoning_part: tuple[Any, ...] | None = None
    """The part of its reasoning that the last piece belongs to."""


def _read_error_event(kind: str, payload: bytes) -> bytes:
    """The error of an event of this type, without what makes it an event; or any other event."""
    if kind != "error":
        return payload
    fields = _decode_response(payload)
    error = {key: one for key, one in fields.items() if key not in _OWN_KEYS}
    return _encode({"error": {**error, **_as_object(error.pop("error", None))}})


class ResponsesDecoder(sse.StreamDecoder):
    """Decodes the response to a request, as a stream or as one JSON body.

    ``complaint`` raises the error in a body that is no response.
    """

    def __init__(
        self, request: GenerationRequest, complaint: Callable[[bytes], None] = raise_worker_error
    ) -> None:
        super().__init__(complaint, counts=FULL_EVENT_COUNTS)
        self._source = request.source
        self._is_own = request.source in ("", SOURCE)
        """Whether the client speaks this API, so that it gets messages and parts as they are."""
        self._last_message: _OutputState | None = None
        self._keeps_custom = knows_custom_tools(request, SOURCE)
        self._usage_reader = UsageReader(request)
        self._items: dict[Any, _OutputState] = {}
        """By id and by index."""
        self._has_open_message = False
        """Whether the texts of a further message would continue the last one."""
        self._call_count = 0
        self._call_ids = CallIds()
        self._has_metadata = False

    def _read_document(self, body: bytes | bytearray) -> Sequence[Event]:
        try:
            response = _decode_response(body)
        except _JSON_ERRORS as e:
            raise build_answer_error(e) from e
        if not isinstance(response.get("output"), list):
            self._raise_if_error(bytes(body))
            raise WorkerFailed("The worker's answer has no output.")
        events: list[Event] = []
        self._end_response(response, events)
        return events

    # --- a stream ---------------------------------------------------------------------------------

    def _read_payload(self, payload: bytes, events: list[Event]) -> None:
        if self._is_done or not (text := payload.strip()) or text == _DONE_PAYLOAD:
            return
        try:
            event = _read_event(payload, events)
        except _JSON_ERRORS as e:
            raise build_answer_error(e) from e
        match event.type:
            case "response.output_text.delta" | "response.refusal.delta":
                self._read_delta(event, events)
            case kind if kind in _REASONING_DELTAS:
                self._read_reasoning_delta(event, events)
            case kind if kind in _CALL_DELTAS:
                self._read_call_delta(event, events)
            case "response.output_item.added":
                self._read_item(event, events, is_done=False)
            case "response.output_item.done":
                self._read_item(event, events, is_done=True)
            case "response.created" | "response.in_progress" | "response.queued":
                response = _as_object(event.response)
                self._read_metadata(response, events)
                self._add_response_keys(response, events)
            case "response.completed" | "response.incomplete":
                response = _as_object(event.response)
                status = response.get("status") or event.type.removeprefix("response.")
                self._end_response({**response, "status": status}, events)
            case "response.failed":
                self._end_response({**_as_object(event.response), "status": "failed"}, events)
            case kind:
                self._raise_if_error(_read_error_event(kind, payload))
                if kind not in _REPEATING_EVENTS:
                    self._read_other_event(event, _decode_response(payload), events)

    def _read_other_event(self, event: _WireEvent, fields: _Object, events: list[Event]) -> None:
        """Pass on an event that nobody knows; one with content is reported to other clients."""
        if not event.type:
            report_lost_fields(((("events", "type"), True),), events)
            return
        fields = {name: one for name, one in fields.items() if name not in _OWN_KEYS}
        has_item = any(name in fields for name in _PLACE_KEYS)
        keys = [key for key in (event.item_id, event.output_index) if isinstance(key, str | int)]
        state = next((self._items[key] for key in keys if key in self._items), None)
        if state is not None and state.is_hosted and not state.is_done:
            state.hosted_events.append((event.type, fields))
            return
        if state is not None and not state.is_hosted:  # the client has other ids and places
            fields |= dict.fromkeys([name for name in _PLACE_KEYS if name in fields])
        if self._is_own or not has_item or _has_event_content(fields):
            call = -1 if state is None or state.call_index is None else state.call_index
            values = (((event.type,), fields or True),)
            events.append(ResponseExtra(SOURCE, "event", values, call_index=call))

    def _find_item(self, event: _WireEvent, *, is_new: bool = False) -> _OutputState:
        """The item of an event. ``is_new``: none of those before, though it may have its id."""
        item = _as_object(event.item)
        keys = [
            key
            for key in (event.item_id, item.get("id"), event.output_index)
            if isinstance(key, str | int)
        ]
        if event.type == "response.output_item.added" and isinstance(event.output_index, int):
            is_new = is_new or event.output_index not in self._items
        known = () if is_new else [self._items[key] for key in keys if key in self._items]
        state = next(iter(known), None)
        if state is None:
            state = _OutputState()
        self._items |= dict.fromkeys(keys or [len(self._items)], state)
        return state

    def _read_delta(self, event: _WireEvent, events: list[Event]) -> None:
        state, text = self._find_item(event), _as_text(event.delta)
        state.has_output = True
        self._begin_part(state, event.content_index, events)
        if not isinstance(event.delta, str):
            report_lost_fields(((("delta",), event.delta),), events)
        if event.type == "response.refusal.delta":
            events.append(RefusalDelta(text))
            return
        logprobs = _read_logprobs(event.logprobs, events)
        events.append(TextDelta(text, tokens=len(logprobs) or 1, logprobs=logprobs))

    def _begin_part(self, state: _OutputState, part: Any, events: list[Event]) -> None:
        """End the last message, or the last part of this one, if another one begins."""
        last, self._last_message = self._last_message, state
        last_part, state.text_part = state.text_part, part
        if not self._is_own or last is None:
            return
        if last is not state:
            events.append(ResponseExtra(SOURCE, "item", (), call_index=-1))
        elif last_part != part:
            events.append(ResponseExtra(SOURCE, "part", (), call_index=-1))

    def _read_reasoning_delta(self, event: _WireEvent, events: list[Event]) -> None:
        state, text = self._find_item(event), _as_text(event.delta)
        part = event.type, event.summary_index, event.content_index
        is_new_part = state.reasoning_part not in (None, part)
        state.has_output, state.reasoning_part = True, part
        is_summary = event.type == "response.reasoning_summary_text.delta"
        events.append(
            _build_reasoning(text, event.item_id, is_new_part=is_new_part, is_summary=is_summary)
        )

    def _read_call_delta(self, event: _WireEvent, events: list[Event]) -> None:
        state, text = self._find_item(event), _as_text(event.delta)
        state.arguments += text
        if state.call_index is not None and text and not state.wraps_text:
            events.append(ToolCallDelta(0, state.call_index, text))

    def _read_item(self, event: _WireEvent, events: list[Event], *, is_done: bool) -> None:
        state, item = self._find_item(event), _as_object(event.item)
        key = _CALL_KEYS.get(_as_text(item.get("type")))
        if key is not None:
            self._read_call(state, item, key, events, is_done=is_done)
        else:
            self._read_other_item(state, item, event.output_index, events, is_done=is_done)
        if is_done and not state.is_done:
            self._add_extra(state, event.output_index, item, events)
        state.is_done = state.is_done or is_done

    def _read_other_item(
        self, state: _OutputState, item: _Object, place: Any, events: list[Event], *, is_done: bool
    ) -> None:
        """Read a message, reasoning, or what a tool of the worker did."""
        kind = _as_text(item.get("type"))
        state.is_hosted = bool(kind) and kind not in _CONTENT_TYPES
        if not is_done or state.has_output:
            return
        state.has_output = True
        content = _read_content(item) if kind in _CONTENT_TYPES else []
        if kind == "message" and not any(getattr(one, "text", "") for one in content):
            # nothing in it has an event of its own
            state.is_hosted = self._is_own or (not content and bool(_list_unknown_parts(item)))
            content = [] if state.is_hosted else content
        part = 0
        for one in content:
            if isinstance(one, TextDelta | RefusalDelta):
                self._begin_part(state, part, events)
                part += 1
            events.append(one)
        if state.is_hosted:
            index, between = place if isinstance(place, int) else 0, tuple(state.hosted_events)
            events.append(HostedToolCall(kind, Raw(_encode(item)), place=index, events=between))

    def _add_extra(
        self, state: _OutputState, place: Any, item: _Object, events: list[Event]
    ) -> None:
        """Add the keys of an item that no event represents."""
        index = place if isinstance(place, int) else 0
        kind = _as_text(item.get("type"))
        known = None if state.is_hosted else _ITEM_KEYS.get(kind)
        self._has_open_message = self._has_open_message and kind in _CONTENT_TYPES
        if known is None:
            if not kind:
                report_lost_fields((((f"output[{index}]",), item),), events)
            return
        values = tuple(
            (path, one) for path, one in find_unknown_keys(item, known).items() if one is not None
        )
        lost: list[tuple[tuple[str, ...], Any]] = []
        if kind == "message":
            values += _list_unknown_parts(item)
        for key in ("content", "summary"):
            found = item.get(key) if key in known else None
            parts = [_as_object(part) for part in found] if isinstance(found, list) else []
            if kind == "message":
                parts = [part for part in parts if part.get("type") in _PART_KEYS]
            is_only = len(parts) == 1 and not self._has_open_message
            for i, part in enumerate(parts):
                if kind == "message" and (self._is_own or is_only):
                    values += _list_part_keys(part, f"content[{i}]")
                else:
                    lost += _list_part_keys(part, f"output[{index}].{key}[{i}]")
        report_lost_fields(tuple(lost), events)
        if kind == "message":
            self._has_open_message = not values
        if values:
            call = -1 if state.call_index is None else state.call_index
            events.append(ResponseExtra(SOURCE, "item", values, index, call))

    def _read_call(
        self,
        state: _OutputState,
        item: _Object,
        key: str,
        events: list[Event],
        *,
        is_done: bool,
    ) -> None:
        """Start a call when its name is known; at its end, add what its deltas left out."""
        name = _as_text(item.get("name")) or (
            "tool_search" if item.get("type") == "tool_search_call" else ""
        )
        if state.call_index is None:
            if not name:
                if is_done:
                    raise StreamBroken("The worker called a tool without its name.")
                return
            flat = join_tool_name(read_text(item.get("namespace")), name)
            kind = "custom" if item.get("type") == "custom_tool_call" else "function"
            call_id = self._call_ids.claim(_as_text(item.get("call_id")), 0, self._call_count)
            state.call_index, self._call_count = self._call_count, self._call_count + 1
            if kind == "custom" and not self._keeps_custom:
                kind, state.wraps_text = "function", True
            events.append(ToolCallStart(0, state.call_index, call_id, flat, kind))
            if state.arguments and not state.wraps_text:
                events.append(ToolCallDelta(0, state.call_index, state.arguments))
        if not is_done:
            return
        value = item.get(key)
        complete = value if isinstance(value, str) else _encode(value or {}).decode()
        rest = complete.removeprefix(state.arguments)
        if state.wraps_text:
            if not state.is_done:
                text = write_text_argument(complete)
                events.append(ToolCallDelta(0, state.call_index, text))
        elif rest and complete.startswith(state.arguments):
            events.append(ToolCallDelta(0, state.call_index, rest))
        state.arguments = complete

    def _read_metadata(self, response: _Object, events: list[Event]) -> None:
        if self._has_metadata:
            return
        self._has_metadata = True
        created = response.get("created_at")
        events.append(
            ResponseMetadata(
                read_text(response.get("model")),
                None,
                read_text(response.get("id")),
                read_integer(
                    int(created) if isinstance(created, float) else created, MAX_TIMESTAMP
                ),
                SOURCE,
            )
        )

    def _add_response_keys(self, response: _Object, events: list[Event]) -> None:
        """Add the keys of the response that no event represents."""
        unknown = _list_unknown(response, _RESPONSE_KEYS)
        if self._source not in ("", SOURCE):
            unknown = tuple([one for one in unknown if one[0][0] not in _SETTING_KEYS])
        if unknown:
            events.append(ResponseExtra(SOURCE, "response", unknown))

    def _end_response(self, response: _Object, events: list[Event]) -> None:
        """The last events, from the final response. Raises the error of one that failed."""
        if response.get("error") is not None:
            self._raise_if_error(_encode({"error": response.get("error")}))
        if response.get("status") in _FAILED_STATUSES:
            raise WorkerFailed(f"The worker's response is {response['status']}.")
        self._read_metadata(response, events)
        self._add_response_keys(response, events)
        output = response.get("output")
        is_unary = not self._items
        for index, item in enumerate(output if isinstance(output, list) else ()):
            event = _WireEvent(output_index=index, item=item)
            if not self._find_item(event, is_new=is_unary).is_done:
                self._read_item(event, events, is_done=True)
        end = self._build_choice_end(response)
        if end.finish_reason == "unknown" and end.own_word is None:
            events.append(_NO_STATUS)
        events.append(end)
        self._is_done = True
        events += self._usage_reader.build_end(self._read_usage(response.get("usage")))

    def _build_choice_end(self, response: _Object) -> ChoiceEnd:
        """The end, whose unknown word is the status, or the reason of an incomplete response.

        Clients of the protocol may get neither: an agent's server sends no status.
        """
        status, is_own = response.get("status"), self._is_own
        why = _as_object(response.get("incomplete_details")).get("reason")
        if status is None and why is None and is_own:
            return ChoiceEnd("unknown")
        if status == "incomplete" or why is not None:
            if why is None and is_own:
                return ChoiceEnd("unknown", own_word=INCOMPLETE_PREFIX)
            end = INCOMPLETE_REASONS.read_word(why, self._source).build_end()
            if end.own_word is not None:
                end = replace(end, own_word=INCOMPLETE_PREFIX + end.own_word)
            return end
        finish = STATUSES.read_word(status, self._source)
        return finish.build_end(called=self._call_count > 0)

    def _read_usage(self, value: Any) -> Usage | None:
        counts = _as_object(value)
        inputs = _as_object(counts.get("input_tokens_details"))
        usage = self._usage_reader.read_usage(
            counts.get("input_tokens"),
            counts.get("output_tokens"),
            inputs.get("cached_tokens") or None,
            _as_object(counts.get("output_tokens_details")).get("reasoning_tokens") or None,
        )
        stored = inputs.get("cache_write_tokens") or None
        written = self._usage_reader.read_prompt_tokens(stored)
        return usage if usage is None else replace(usage, cache_write_tokens=written)


def _read_event(payload: bytes, events: list[Event]) -> _WireEvent:
    """The event; before it, its unknown keys if it is one of those that are read."""
    try:
        return _decode_known_event(payload)
    except msgspec.ValidationError:
        event = _decode_event(payload)
    if event.type in _READ_EVENTS:
        fields = _decode_response(payload)
        unknown = [name for name in fields if name not in _WireEvent.__struct_fields__]
        values = [((event.type, name), fields[name]) for name in unknown]
        events += [
            ResponseExtra(SOURCE, "event", (one,), call_index=-1)
            for one in values
            if has_content(one[1])
        ]
    return event


def _has_event_content(fields: _Object) -> bool:
    return any(has_content(one) for name, one in fields.items() if name not in _FRAMING_KEYS)


def _list_unknown_parts(item: _Object) -> FieldValues:
    """The parts of a message of which no event says anything."""
    content = item.get("content")
    parts = enumerate(content if isinstance(content, list) else ())
    return tuple(
        [
            ((f"content[{i}]",), part)
            for i, part in parts
            if _as_text(_as_object(part).get("type")) not in _PART_KEYS
        ]
    )


def _list_part_keys(part: _Object, at: str) -> FieldValues:
    """The unknown keys of a part, or all of a part of an unknown type."""
    known = _PART_KEYS.get(_as_text(part.get("type")))
    return (((at,), part),) if known is None else _list_unknown(part, known, at)


def _list_unknown(value: _Object, known: KeyTree, *at: str) -> FieldValues:
    unknown = find_unknown_keys(value, known).items()
    return tuple([((*at, *path), one) for path, one in unknown if has_content(one)])


def _build_reasoning(
    text: str, name: Any, *, is_new_part: bool, is_summary: bool
) -> ReasoningDelta:
    if is_new_part:
        text = PART_SEPARATOR + text
    identifier = read_text(name)
    return ReasoningDelta(text, id=identifier, is_new_part=is_new_part, is_summary=is_summary)


def _read_content(item: _Object) -> list[Event]:
    """The events of a complete message, or of complete reasoning."""
    events: list[Event] = []
    content, name = item.get("content"), read_text(item.get("id"))
    for value in content if isinstance(content, list) else ():
        part = _as_object(value)
        match part.get("type"):
            case "output_text":
                logprobs = _read_logprobs(part.get("logprobs"), events)
                text = _as_text(part.get("text"))
                if not isinstance(part.get("text"), str):
                    report_lost_fields(((("output", "text"), part.get("text")),), events)
                events.append(TextDelta(text, tokens=len(logprobs) or 1, logprobs=logprobs))
            case "refusal":
                events.append(RefusalDelta(_as_text(part.get("refusal"))))
            case "reasoning_text":
                text = _as_text(part.get("text"))
                events.append(
                    _build_reasoning(text, name, is_new_part=bool(events), is_summary=False)
                )
            case _:
                pass
    summary = item.get("summary")
    for value in summary if isinstance(summary, list) else ():
        if text := _as_text(_as_object(value).get("text")):
            events.append(_build_reasoning(text, name, is_new_part=bool(events), is_summary=True))
    if not events and item.get("encrypted_content"):
        events.append(ReasoningDelta("", id=name))
    return events


def _read_logprobs(value: Any, events: list[Event]) -> Any:
    if not value:
        return ()
    try:
        return read_logprobs(msgspec.convert({"content": value}, WireLogprobs))
    except msgspec.ValidationError:
        report_lost_fields(((("logprobs",), value),), events)
        return ()


def _as_object(value: Any) -> _Object:
    return value if isinstance(value, dict) else {}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""
