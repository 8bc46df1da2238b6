"""The arguments of earlier tool calls, for targets that take them as an object.

Clients keep them as JSON text, and a call that was cut by a limit has half of it. Such a call must
not make the whole conversation invalid for ever: its text becomes one argument, and is reported.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from protocols.core.json_text import JsonDecoder
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
