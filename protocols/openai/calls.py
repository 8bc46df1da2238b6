"""Tool calls in workers' answers, put in order: pieces without an index, an id or a name."""

import msgspec

from protocols.core.errors import StreamBroken
from protocols.core.events import Event, ToolCallDelta, ToolCallStart
from protocols.openai.incoming import WireDelta, WireFunction, WireToolCall

_encode = msgspec.json.Encoder().encode


class _PartialToolCall:
    __slots__ = ("call_index", "id", "pending_arguments")

    def __init__(self) -> None:
        self.id: str | None = None
        self.call_index: int | None = None
        """Its place in the choice, once it has a name."""
        self.pending_arguments = ""
        """Arguments that came before the name."""


class ToolCallAssembler:
    """The tool calls of one choice."""

    def __init__(self, index: int) -> None:
        self._choice_index = index
        self._calls: dict[int, _PartialToolCall] = {}
        self._started_count = 0

    def read_delta(self, delta: WireDelta) -> list[Event]:
        """The events of the calls in a message, or in a piece of one."""
        events: list[Event] = []
        for position, wire in enumerate(delta.tool_calls or ()):
            self._read_fragment(self._find_key(wire, position), wire, events)
        if delta.function_call is not None:
            self._read_fragment(0, WireToolCall(function=delta.function_call), events)
        return events

    @property
    def started_count(self) -> int:
        """How many have a name."""
        return self._started_count

    def close(self) -> None:
        """The choice has ended. Raises StreamBroken for a call that never got a name."""
        if self._calls and any(call.call_index is None for call in self._calls.values()):
            raise StreamBroken("The worker called a tool without its name.")

    def _find_key(self, wire: WireToolCall, position: int) -> int:
        """Which call a piece belongs to: by its index, else by its id, else the place it has."""
        if wire.index is not None:
            return wire.index
        if wire.id:
            for key, call in self._calls.items():
                if call.id == wire.id:
                    return key
            return max(self._calls, default=-1) + 1
        started = bool(wire.function and wire.function.name)
        if started and position in self._calls:
            return max(self._calls) + 1
        return position if position in self._calls or started else max(self._calls, default=0)

    def _read_fragment(self, key: int, wire: WireToolCall, events: list[Event]) -> None:
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _PartialToolCall()
        call.id = call.id or wire.id
        name, arguments = _read_function(wire)
        if call.call_index is None:
            call.pending_arguments += arguments
            if not name:
                return
            call.call_index, arguments = self._started_count, call.pending_arguments
            self._started_count += 1
            made_up = f"call_{self._choice_index}_{call.call_index}"
            events.append(
                ToolCallStart(self._choice_index, call.call_index, call.id or made_up, name)
            )
        if arguments:
            events.append(ToolCallDelta(self._choice_index, call.call_index, arguments))


def _read_function(wire: WireToolCall) -> tuple[str, str]:
    """The name and the arguments in a piece."""
    function = wire.function
    if function is None and wire.custom is not None:
        name, text = wire.custom.get("name"), wire.custom.get("input")
        function = WireFunction(name if isinstance(name, str) else None)
        function.arguments = text if isinstance(text, str) else None
    if function is None:
        return "", ""
    arguments = function.arguments
    if isinstance(arguments, dict):
        arguments = _encode(arguments).decode()
    return function.name or "", arguments or ""
