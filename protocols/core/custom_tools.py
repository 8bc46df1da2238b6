"""Custom tools, whose input is text, as functions, for targets that know functions only.

A custom tool becomes a function with one argument, ``input``; so do its calls in the conversation.
``CustomCallReader`` makes the calls of such a function calls of the custom tool again, so that the
client sees its own tool throughout.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeGuard, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from protocols.core.call_arguments import make_function_call
from protocols.core.errors import UnsupportedFeature
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FieldValues,
    ResponseExtra,
    ToolCallDelta,
    ToolCallStart,
)
from protocols.core.extra import KeyTree, find_unknown_keys, list_paths
from protocols.core.json_text import JsonDecoder
from protocols.core.loss import UnsupportedParameter
from protocols.core.places import locate_call, locate_tool
from protocols.core.request import (
    AnyRequest,
    ExtraFields,
    GenerationRequest,
    Message,
    TokenizeRequest,
    Tool,
)

TEXT_PARAMETERS: Final = Raw(
    b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],'
    b'"additionalProperties":false}'
)
"""The parameters of the function that stands for a custom tool."""

_FORMAT_KEYS: Final[KeyTree] = {
    "type": frozenset({"text", "grammar"}),
    "grammar": dict.fromkeys(("syntax", "definition")),
    **dict.fromkeys(("syntax", "definition")),
}
_decode_object = JsonDecoder(dict[str, Any]).decode
_decode_string = JsonDecoder(str).decode

# --- requests -------------------------------------------------------------------------------------


def has_custom_tools(request: AnyRequest) -> TypeGuard[GenerationRequest | TokenizeRequest]:
    """Whether it has a custom tool, or the call of one."""
    if type(request) is GenerationRequest or type(request) is TokenizeRequest:
        for tool in request.tools:
            if tool.kind == "custom":
                return True
        for message in request.messages:
            for call in message.tool_calls:
                if call.kind == "custom":
                    return True
    return False


RequestT = TypeVar("RequestT", bound=GenerationRequest | TokenizeRequest)


def replace_custom_tools(
    request: RequestT,
) -> tuple[RequestT, tuple[UnsupportedParameter, ...]]:
    """The request with functions in the place of custom tools and their calls, and the losses.

    A grammar is a hint in the function's description: the target does not enforce it. Raises
    UnsupportedFeature if a function has the name of a custom tool.
    """
    functions = {one.name for one in request.tools if one.kind == "function"}
    for i, one in enumerate(request.tools):
        if one.kind == "custom" and one.name in functions:
            text = f"The model's workers know functions only, and one is called {one.name[:64]!r}."
            raise UnsupportedFeature(text, param=f"{locate_tool(one, i)}.name")
    losses = tuple(_find_losses(request))
    tools = [make_text_function(one) if one.kind == "custom" else one for one in request.tools]
    messages = [_replace_calls(message) for message in request.messages]
    return replace(request, tools=tuple(tools), messages=tuple(messages)), losses


def make_text_function(tool: Tool) -> Tool:
    """The function that stands for a custom tool."""
    description = tool.description or ""
    if grammar := _read_grammar(tool.parameters):
        syntax, definition = grammar
        hint = f"The input must match this {syntax} grammar:\n{definition}"
        description = f"{description}\n\n{hint}".strip()
    return Tool(tool.name, description or None, TEXT_PARAMETERS, wraps_text=True)


def _read_grammar(form: Raw | None) -> tuple[Any, Any] | None:
    """The syntax and the definition of a custom tool's format; None of free text.

    They stand under ``grammar``. Some clients write them as in the Responses API, beside ``type``.
    """
    fields = {} if form is None else _decode_object(form)
    if fields.get("type") != "grammar":
        return None
    inner = fields.get("grammar")
    fields = inner if isinstance(inner, dict) else fields
    return fields.get("syntax"), fields.get("definition")


def _replace_calls(message: Message) -> Message:
    if all(call.kind == "function" for call in message.tool_calls):
        return message
    calls = [
        call if call.kind == "function" else replace(make_function_call(call), extra=None)
        for call in message.tool_calls
    ]
    return replace(message, tool_calls=tuple(calls))


def _find_losses(
    request: GenerationRequest | TokenizeRequest,
) -> Iterator[UnsupportedParameter]:
    for i, tool in enumerate(request.tools):
        if tool.kind == "custom":
            field = locate_tool(tool, i)
            yield UnsupportedParameter(field, "emulated", "a function")
            yield from _find_format_losses(tool.parameters, f"{field}.format")
            yield from _find_lost_keys(tool.extra)
    for i, message in enumerate(request.messages):
        for k, call in enumerate(message.tool_calls):
            if call.kind == "custom":
                field = locate_call(message, i, k)
                yield UnsupportedParameter(field, "emulated", "a call of a function")
                yield from _find_lost_keys(call.extra)


def _find_format_losses(form: Raw | None, at: str) -> Iterator[UnsupportedParameter]:
    """What a function's description does not say of a custom tool's format."""
    if _read_grammar(form):
        yield UnsupportedParameter(at, "approximated", "in the description")
    fields = {} if form is None else _decode_object(form)
    for path in list_paths(at, find_unknown_keys(fields, _FORMAT_KEYS).items()):
        yield UnsupportedParameter(path, "dropped")


def _find_lost_keys(extra: ExtraFields | None) -> Iterator[UnsupportedParameter]:
    if extra is not None:
        for path in list_paths(extra.at, extra.values.items()):
            yield UnsupportedParameter(path, "dropped")


# --- responses ------------------------------------------------------------------------------------


def knows_custom_tools(request: GenerationRequest, source: str) -> bool:
    """Whether the client can be told of a call of a custom tool by a worker of this protocol."""
    if request.source in ("", source):
        return True
    return any(tool.kind == "custom" for tool in request.tools)


class CustomCallReader:
    """Makes calls of functions that stand for custom tools calls of these tools."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.names = frozenset(tool.name for tool in tools if tool.wraps_text)
        """The functions that stand for custom tools."""
        self._readers: dict[tuple[int, int], CustomInputReader] = {}
        """Of each open call, by its choice and its number."""

    def apply(self, events: Sequence[Event]) -> Sequence[Event]:
        """The events for the client; the rest of an input comes before the end of its choice."""
        return [one for event in events for one in self._read(event)]

    def _read(self, event: Event) -> Iterator[Event]:
        match event:
            case ToolCallStart(index, call_index, _, name, "function") if name in self.names:
                self._readers[index, call_index] = CustomInputReader()
                yield replace(event, kind="custom")
            case ToolCallDelta(index, call_index, text) if (index, call_index) in self._readers:
                if piece := self._readers[index, call_index].feed(text):
                    yield ToolCallDelta(index, call_index, piece)
            case ChoiceEnd():
                for key in [one for one in self._readers if one[0] == event.index]:
                    reader = self._readers.pop(key)
                    if piece := reader.close():
                        yield ToolCallDelta(*key, piece)
                    if values := reader.list_further_arguments():
                        yield ResponseExtra("", "tool_call", values, *key)
                yield event
            case _:
                yield event


_INPUT_START: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_match_characters: Final = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*"
).match
"""Matches complete characters of a JSON string, maybe none."""
_BROKEN_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,4}|.?)", re.DOTALL)
_CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f]")


class _CustomArguments(Struct):
    input: str


_decode_arguments = JsonDecoder(_CustomArguments).decode


class CustomInputReader:
    """Reads the input of a custom tool out of the arguments of the function that stands for it.

    Only complete characters are returned, so that the pieces joined are exactly the input.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = -1
        """Where the undecoded rest of the string begins; -1 before the string."""

    def feed(self, text: str) -> str:
        """The characters that ``text`` completes."""
        self._text += text
        if self._position < 0:
            start = _INPUT_START.match(self._text)
            if start is None:
                return ""
            self._position = start.end()
        return self._decode_complete()

    def close(self) -> str:
        """The rest of the input. Arguments of another form are the input themselves."""
        if self._position < 0:
            try:
                return _decode_arguments(self._text.encode()).input
            except msgspec.DecodeError:
                return self._text
        pieces = []
        while (broken := _BROKEN_ESCAPE.match(self._text, self._position)) is not None:
            self._position = broken.end()
            pieces += ["\ufffd", self._decode_complete()]
        return "".join(pieces)

    def list_further_arguments(self) -> FieldValues:
        """The arguments beside the input, which a custom tool has not."""
        try:
            arguments = _decode_object(self._text.encode())
        except msgspec.DecodeError:
            return ()
        if not isinstance(arguments.get("input"), str):
            return ()  # the arguments are the input themselves
        found = ((name, value) for name, value in arguments.items() if name != "input")
        return tuple([(("function", "arguments", name), value) for name, value in found])

    def _decode_complete(self) -> str:
        start = self._position
        self._position = _match_characters(self._text, start).end()  # type: ignore[union-attr]
        piece = _CONTROL_CHARACTER.sub(_escape, self._text[start : self._position])
        return _decode_string(f'"{piece}"')


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
