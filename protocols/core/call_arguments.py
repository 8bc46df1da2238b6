"""The arguments of tool calls, for targets and clients that take them as an object.

Most protocols have them as JSON text, and a call that was cut by a limit has half of it. Such a
call must not cost the whole answer, nor make a conversation invalid for ever: its text becomes one
argument, and is reported. The schema of the arguments is that of an object, too, and says so.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from protocols.core.errors import UnsupportedFeature
from protocols.core.json_text import JsonDecoder, decode_json
from protocols.core.loss import UnsupportedParameter
from protocols.core.places import locate_call, locate_tool
from protocols.core.request import GenerationRequest, Tool, ToolCall

_TEXT_KEY: Final = "arguments"
_OBJECT: Final = "object"
_decode_object = JsonDecoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class _SchemaType(Struct):
    type: Any = None


_decode_schema_type = JsonDecoder(_SchemaType).decode
_NO_ARGUMENTS: Final = Raw(b'{"type":"object","properties":{}}')


def complete_schemas(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The functions with the schema of an object, for workers that require one; other tools as is.

    A schema without a type gets one. Raises UnsupportedFeature for a schema of another type.
    """
    return tuple(
        replace(tool, parameters=_complete_schema(tool, i)) if tool.kind == "function" else tool
        for i, tool in enumerate(tools)
    )


def _complete_schema(tool: Tool, i: int) -> Raw:
    schema = tool.parameters
    if schema is None:
        return _NO_ARGUMENTS
    kind = _decode_schema_type(schema).type
    if kind == _OBJECT:
        return schema
    if kind is not None and not (isinstance(kind, list) and _OBJECT in kind):
        text = "The arguments of a tool are an object: the type of their schema must be 'object'."
        raise UnsupportedFeature(text, param=f"{locate_tool(tool, i)}.parameters.type")
    fields = _decode_object(schema)
    return Raw(_encode({**fields, "type": _OBJECT})) if fields else _NO_ARGUMENTS


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments as an object; other text under a key of its own."""
    try:
        return _decode_object(text) if text.strip() else {}
    except (msgspec.DecodeError, UnicodeError):
        return {_TEXT_KEY: text}


def is_object(text: str) -> bool:
    """Whether the text is a JSON object."""
    try:
        _decode_object(text)
    except (msgspec.DecodeError, UnicodeError):
        return False
    return True


def read_object(text: str) -> Raw | None:
    """The arguments of a call, if they are an object; some workers write it as a string."""
    text = text.strip() or "{}"
    try:
        inner = decode_json(text, kind=str) if text.startswith('"') else text
    except (msgspec.DecodeError, UnicodeError):
        return None
    return Raw(inner.encode()) if is_object(inner) else None


def wrap_text(text: str) -> Raw:
    """Arguments that are no object as one."""
    return Raw(_encode({_TEXT_KEY: text}))


def write_text_argument(text: str) -> str:
    """The arguments of a function that stands for a custom tool, whose input is text."""
    return _encode({"input": text}).decode()


def make_function_call(call: ToolCall) -> ToolCall:
    """The call, of a function for a side that has no custom tools."""
    if call.kind == "function":
        return call
    return replace(call, kind="function", arguments=write_text_argument(call.arguments))


def find_half_written_calls(request: GenerationRequest) -> Iterator[UnsupportedParameter]:
    """The loss of each call whose arguments are no object."""
    for i, message in enumerate(request.messages):
        for k, call in enumerate(message.tool_calls):
            if _is_half_written(call):
                path = f"{locate_call(message, i, k)}.arguments"
                yield UnsupportedParameter(path, "approximated", "no JSON object")


def _is_half_written(call: ToolCall) -> bool:
    return call.kind == "function" and read_arguments(call.arguments).get(_TEXT_KEY) == (
        call.arguments
    )
