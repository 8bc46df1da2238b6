"""Orders the tool calls of a choice: deltas of workers may lack an index, an id or a name.

A call of an unknown type has no name that anybody could know. Its keys are joined, and come as
unknown keys of a call at the end of the choice.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from protocols.chat.wire_responses import WireDelta, WireFunction, WireToolCall, read_text
from protocols.core.call_arguments import write_text_argument
from protocols.core.call_ids import CallIds
from protocols.core.errors import StreamBroken
from protocols.core.events import Event, FieldValues, ResponseExtra, ToolCallDelta, ToolCallStart
from protocols.core.json_text import decode_json
from protocols.json_body import JSON_ERRORS

_encode = msgspec.json.Encoder().encode
_COMMON_TYPES: Final = (None, "", "function", "custom")


class _PartialToolCall:
    __slots__ = (
        "arguments", "call_index", "has_unknown_type", "id", "is_unknown", "kind", "pending_extra",
        "wraps_text",
    )  # fmt: skip

    def __init__(self) -> None:
        self.id: str | None = None
        self.kind: Literal["function", "custom"] = "function"
        self.wraps_text = False
        """Whether it is that of a custom tool, of which the client does not know."""
        self.call_index: int | None = None
        """Its position in the choice, once its name is known."""
        self.arguments: list[str] = []
        """The pieces of its arguments so far."""
        self.pending_extra: FieldValues = ()
        """Unknown keys that came before the name."""
        self.has_unknown_type = False
        """Whether it is a call of a type that nobody knows."""
        self.is_unknown = False
        """Whether its client got it as such."""


class ToolCallAssembler:
    """Orders the tool calls of one choice, and keeps them apart whatever their ids and indices are.

    Each element of a message is a call of its own. A fragment of a stream with a name begins a new
    call if its place is taken by a call that it can't continue.
    """

    def __init__(
        self, index: int, source: str = "", *, is_own: bool = False, keeps_custom: bool = False
    ) -> None:
        """``is_own``: the client speaks the worker's protocol.

        ``keeps_custom``: the client's protocol has calls of custom tools, too.
        """
        self._choice_index = index
        self._source = source
        self._is_own = is_own
        self._keeps_custom = keeps_custom
        self._calls: dict[int, _PartialToolCall] = {}
        """The latest call of each key."""
        self._ids = CallIds()
        self._keys_by_id: dict[str, int] = {}
        self._last_key = -1
        """The largest key of a call."""
        self._started_count = 0
        self._has_unknown = False
        """Whether a call of an unknown type may have to be ended."""
        self._has_nameless = False
        """Whether a call was replaced by another before its name was known."""

    def read_delta(self, delta: WireDelta, *, is_message: bool = False) -> list[Event]:
        """The events of the calls in a message or delta."""
        events: list[Event] = []
        found, seen = delta.tool_calls or [], set[int]()
        for position, wire in enumerate(found if isinstance(found, list) else [found]):
            key = position if is_message else self._find_key(wire, position)
            if self._has_unknown and key not in self._calls:
                events += self._end_unknown_calls()
            events += self._drop_finished(key, wire, is_repeated=key in seen)
            seen.add(key)
            if is_message and self._is_own and wire.index is not None:
                wire.extra += ((("index",), wire.index),)
            self._read_fragment(key, wire, events)
        if delta.function_call is not None:
            self._read_fragment(0, WireToolCall(function=delta.function_call), events)
        return events

    @property
    def started_count(self) -> int:
        """The number of calls with a name."""
        return self._started_count

    def close(self) -> list[Event]:
        """End the choice. Raises StreamBroken for a call without a name."""
        ends = [event for call in self._calls.values() for event in self._end_call(call)]
        nameless = [call for call in self._calls.values() if call.call_index is None]
        if nameless or self._has_nameless:
            raise StreamBroken("The worker called a tool without its name.")
        return ends

    def _end_call(self, call: _PartialToolCall) -> list[Event]:
        """The call of an unknown type, or the argument of one of a custom tool, once complete."""
        if call.has_unknown_type and call.call_index is None:
            return self._end_unknown_call(call)
        if not call.wraps_text or call.call_index is None:
            return []
        text = write_text_argument("".join(call.arguments))
        return [ToolCallDelta(self._choice_index, call.call_index, text)]

    def _end_unknown_calls(self) -> list[Event]:
        """Those before a further call, so that they stay before it."""
        self._has_unknown = False
        calls = [one for one in self._calls.values() if one.has_unknown_type]
        return [event for one in calls for event in self._end_call(one)]

    def _end_unknown_call(self, call: _PartialToolCall) -> list[Event]:
        call.is_unknown, call.wraps_text = True, False
        call.call_index, self._started_count = self._started_count, self._started_count + 1
        if call.id:
            call.pending_extra = ((("id",), call.id), *call.pending_extra)
        if arguments := "".join(call.arguments):
            call.pending_extra += ((("function", "arguments"), arguments),)
        call.pending_extra = _join_values(call.pending_extra)
        events: list[Event] = []
        self._add_extra(call, events)
        return events

    def _find_key(self, wire: WireToolCall, position: int) -> int:
        """The call of a delta: by index, else by id, else by position."""
        if wire.index is not None:
            return wire.index
        if wire.id:
            key = self._keys_by_id.get(wire.id)
            return self._last_key + 1 if key is None else key
        started = bool(wire.function and wire.function.name)
        if started and position in self._calls:
            return self._last_key + 1
        return position if position in self._calls or started else max(self._last_key, 0)

    def _drop_finished(self, key: int, wire: WireToolCall, *, is_repeated: bool) -> list[Event]:
        """End and forget the call of a key if this fragment begins another one.

        ``is_repeated``: an earlier fragment of the same delta has the key.
        """
        call = self._calls.get(key)
        name, arguments = _read_function(wire)
        if call is None or not (name or wire.type not in _COMMON_TYPES):
            return []
        has_other_id = bool(wire.id and call.id and wire.id != call.id)
        if is_repeated or has_other_id or (arguments.strip() and _is_complete(call.arguments)):
            del self._calls[key]
            ends = self._end_call(call)
            self._has_nameless = self._has_nameless or call.call_index is None
            return ends
        return []

    def _read_fragment(self, key: int, wire: WireToolCall, events: list[Event]) -> None:
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _PartialToolCall()
            self._last_key = max(self._last_key, key)
        if wire.id and not call.id:
            call.id = wire.id
            self._keys_by_id.setdefault(wire.id, key)
        if self._keeps_custom and wire.custom is not None and wire.function is None:
            call.kind = "custom"
        elif wire.custom is not None and wire.function is None:
            call.wraps_text = True
        if wire.type not in _COMMON_TYPES:
            call.has_unknown_type = self._has_unknown = True
        name, arguments = _read_function(wire)
        if call.is_unknown and arguments:
            call.pending_extra += ((("function", "arguments"), arguments),)
            arguments = ""
        call.pending_extra += wire.extra
        call.arguments.append(arguments)
        if call.call_index is None:
            if not name:
                return
            call.call_index, arguments = self._started_count, "".join(call.arguments)
            self._started_count += 1
            call_id = self._ids.claim(call.id, self._choice_index, call.call_index)
            self._add_extra(call, events)
            start = ToolCallStart(self._choice_index, call.call_index, call_id, name, call.kind)
            events.append(start)
        elif call.pending_extra:
            self._add_extra(call, events)
        if arguments and not call.wraps_text:
            events.append(ToolCallDelta(self._choice_index, call.call_index, arguments))

    def _add_extra(self, call: _PartialToolCall, events: list[Event]) -> None:
        """Add the unknown keys of a call, whose number is known."""
        if call.pending_extra and call.call_index is not None:
            place = self._choice_index, call.call_index
            scope: Literal["unknown_call", "tool_call"]
            scope = "unknown_call" if call.is_unknown else "tool_call"
            events.append(ResponseExtra(self._source, scope, call.pending_extra, *place))
            call.pending_extra = ()


def _join_values(values: FieldValues) -> FieldValues:
    """The values of all pieces of a call by their keys."""
    joined: dict[tuple[str, ...], Any] = {}
    for path, value in values:
        joined[path] = _join(joined.get(path), value, path[-1])
    return tuple(joined.items())


def _join(first: Any, second: Any, key: str) -> Any:
    """Two pieces of a value: texts are joined, but for those that name something."""
    match first, second:
        case dict(), dict():
            return first | {name: _join(first.get(name), one, name) for name, one in second.items()}
        case list(), list():
            return [*first, *second]
        case str(), str() if key not in _NAMING_KEYS:
            return first + second
        case _:
            return first if second is None else second


_NAMING_KEYS: Final = frozenset({"type", "id", "name", "status"})


def _is_complete(arguments: Sequence[str]) -> bool:
    """Whether these pieces are a whole JSON object."""
    text = "".join(arguments)
    if not text.rstrip().endswith("}"):
        return False
    try:
        decode_json(text)
    except JSON_ERRORS:
        return False
    return True


def _read_function(wire: WireToolCall) -> tuple[str, str]:
    """The name and the arguments in a delta."""
    function = wire.function
    if function is None and wire.custom is not None:
        function = WireFunction(read_text(wire.custom.get("name")), wire.custom.get("input"))
    if function is None:
        return "", ""
    arguments = "" if function.arguments is None else function.arguments
    if not isinstance(arguments, str):
        arguments = _encode(arguments).decode()
    return function.name or "", arguments
