"""Tool calls in conversations.

What a chat template does not show is written as text: functions are listed in the system message,
and calls are part of their message, in the family's format if it has one, else in that of Hermes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from backends.torch.call_formats import HERMES_FORMAT, PARSE_ERRORS, CallFormat
from backends.torch.ipc import ChatTurn, FunctionCall, FunctionDefinition
from backends.torch.template_features import TemplateFeatures
from protocols.core.call_arguments import read_arguments
from protocols.core.json_text import decode_json

# --- conversations ------------------------------------------------------------------------------


def build_function_schema(
    function: FunctionDefinition, *, needs_description: bool = False
) -> dict[str, Any]:
    """A function definition for chat templates."""
    schema: dict[str, Any] = {"name": function.name}
    if function.description is not None or needs_description:
        schema["description"] = function.description or ""
    return {**schema, "parameters": decode_json(function.parameters)}


def build_messages(
    turns: Sequence[ChatTurn],
    functions: Sequence[FunctionDefinition],
    features: TemplateFeatures,
) -> Iterator[dict[str, Any]]:
    """The messages for a chat template; what it would not show of tools becomes text."""
    messages = list(turns)
    call_format = features.call_format or HERMES_FORMAT
    if functions and not features.shows_functions:
        is_first = bool(messages) and messages[0].role == "system"
        first = messages.pop(0).content + "\n\n" if is_first else ""
        yield {"role": "system", "content": first + _describe_functions(functions, call_format)}
    for turn in messages:
        message = _build_message(turn, features)
        if turn.role == "tool" and not features.shows_results:
            content = f"<tool_response>\n{turn.content}\n</tool_response>"
            message = {"role": "user", "content": content}
        elif turn.calls and features.writes_calls:
            message["tool_calls"] = [
                _build_call(call, call_format, as_text=features.text_arguments)
                for call in turn.calls
            ]
        elif turn.calls:
            calls_text = _format_calls(turn.calls, call_format)
            message["content"] = "\n".join(filter(None, (turn.content, calls_text)))
        if turn.call_id is not None and message["role"] == "tool":
            message["tool_call_id"] = _make_call_id(turn.call_id, call_format)
        yield message


def _build_call(call: FunctionCall, call_format: CallFormat, *, as_text: bool) -> dict[str, Any]:
    arguments = call.arguments if as_text else read_arguments(call.arguments)
    return {
        "id": _make_call_id(call.id, call_format),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _format_calls(calls: Sequence[FunctionCall], call_format: CallFormat) -> str:
    """The calls as the model writes them; in Hermes' format if their arguments are no object."""
    try:
        return call_format.format_calls(calls)
    except PARSE_ERRORS:
        return HERMES_FORMAT.format_calls(calls)


def _describe_functions(functions: Sequence[FunctionDefinition], call_format: CallFormat) -> str:
    definitions = "\n".join(
        msgspec.json.encode(build_function_schema(function)).decode() for function in functions
    )
    example = call_format.describe_call()
    return f"You can call these functions:\n{definitions}\nTo call one, write:\n{example}"


def _build_message(turn: ChatTurn, features: TemplateFeatures) -> dict[str, Any]:
    message = {"role": turn.role, "content": turn.content}
    if turn.reasoning and features.reasoning_key is not None:
        message[features.reasoning_key] = turn.reasoning
    return message if turn.name is None else {**message, "name": turn.name}


def _make_call_id(call_id: str, call_format: CallFormat) -> str:
    """A call id that the chat template accepts, the same for a call and its result."""
    if call_format.id_length is None:
        return call_id
    plain_id = "".join(c for c in call_id if c.isascii() and c.isalnum())
    return plain_id[-call_format.id_length :].rjust(call_format.id_length, "0")
