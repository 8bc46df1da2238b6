"""The arguments of tool calls, for targets and clients that take them as an object.

Most protocols have them as JSON text, and a call that was cut by a limit has half of it. Such a
call must not cost the whole answer, nor make a conversation invalid for ever: its text becomes one
argument, and is reported.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from protocols.core.json_text import JsonDecoder, decode_json
from protocols.core.loss import UnsupportedParameter
from protocols.core.places import locate_call
from protocols.core.request import GenerationRequest, ToolCall

_TEXT_KEY: Final = "arguments"
_decode_object = JsonDecoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


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
