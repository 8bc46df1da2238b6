"""Messages, tools and output formats, checked in the server's order and refused in its words.

Source: openvinotoolkit/model_server, src/llm/apis/openai_completions.cpp and
openai_api_handler.cpp (parseMessages, parseTools, parseResponseFormat).
"""

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import msgspec
from msgspec import Raw

from protocols.body import decode_value
from protocols.core.errors import InvalidParameter
from protocols.core.request import (
    AudioPart,
    ContentPart,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    OutputFormat,
    ReasoningPart,
    Role,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)

_ROLES = frozenset(get_args(Role))
_encode = msgspec.json.Encoder().encode


def build_param_error(text: str, param: str) -> InvalidParameter:
    """A complaint whose text is complete."""
    return InvalidParameter(text, param=param)


def read_messages(raw: Raw | None) -> tuple[Message, ...]:
    """The conversation. Raises InvalidParameter."""
    if raw is None:
        raise build_param_error("Messages missing in request", "messages")
    got = decode_value(raw)
    if not isinstance(got, list):
        raise build_param_error("Messages are not an array", "messages")
    if not got:
        raise build_param_error("Messages array cannot be empty", "messages")
    return tuple(_read_message(item) for item in got)


def _read_message(item: Any) -> Message:
    """One message. A field of an unexpected type is passed over, as the server does."""
    if not isinstance(item, dict):
        raise build_param_error("Message is not a JSON object", "messages")
    parts = _read_content(item.get("content", ""))
    role = item.get("role")
    if not isinstance(role, str):
        raise build_param_error("Every message must have 'role' field", "messages")
    calls = item.get("tool_calls")
    tool_calls = _read_tool_calls(calls) if isinstance(calls, list) else ()
    if role not in _ROLES:
        raise build_param_error("Invalid message structure - unknown role", "messages")
    thought = item.get("reasoning_content")
    if isinstance(thought, str) and thought:
        parts = (ReasoningPart(thought), *parts)
    return Message(
        cast("Role", role),
        parts,
        name=_get_string(item.get("name")),
        tool_calls=tool_calls,
        tool_call_id=_get_string(item.get("tool_call_id")),
    )


def _get_string(got: Any) -> str | None:
    return got if isinstance(got, str) else None


def _read_content(content: Any) -> tuple[ContentPart, ...]:
    match content:
        case str():
            return (TextPart(content),)
        case list():
            return tuple(_read_part(entry) for entry in content)
        case _:
            return ()


def _read_part(entry: Any) -> ContentPart:
    if not isinstance(entry, dict):
        raise _build_message_error("content array should contain objects")
    match entry.get("type"):
        case "text":
            return TextPart(_read_string_member(entry, "text", "content text missing"))
        case "image_url":
            image = _read_object_member(entry, "image_url", "content image_url missing")
            url = _read_string_member(image, "url", "image_url does not have url field")
            return ImagePart(url, _get_string(image.get("detail")))
        case "input_audio":
            audio = _read_object_member(entry, "input_audio", "input_audio object missing")
            data = _read_string_member(
                audio, "data", "input_audio does not have a valid data field"
            )
            return AudioPart(data, _get_string(audio.get("format")))
        case str():
            raise build_param_error("Unsupported content type", "messages")
        case _:
            raise _build_message_error("content object type missing")


def _build_message_error(text: str) -> InvalidParameter:
    return build_param_error(f"Invalid message structure - {text}", "messages")


def _read_string_member(holder: dict[str, Any], name: str, text: str) -> str:
    got = holder.get(name)
    if not isinstance(got, str):
        raise _build_message_error(text)
    return got


def _read_object_member(holder: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    got = holder.get(name)
    if not isinstance(got, dict):
        raise _build_message_error(text)
    return got


def _read_tool_calls(calls: list[Any]) -> tuple[ToolCall, ...]:
    return tuple(_read_tool_call(call) for call in calls)


def _read_tool_call(call: Any) -> ToolCall:
    if not isinstance(call, dict):
        raise build_param_error("Each tool_call must be an object", "messages")
    function = call.get("function")
    if not isinstance(function, dict):
        raise build_param_error("Each tool_call must have a 'function' object", "messages")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = _encode(arguments).decode()
    return ToolCall(str(call.get("id") or ""), str(function.get("name") or ""), arguments)


# --- tools ----------------------------------------------------------------------------------------


def read_tools(fields: Mapping[str, Raw]) -> tuple[tuple[Tool, ...], ToolChoice | None]:
    """The tools that may be called, and the choice among them. Raises InvalidParameter.

    The choice ``none`` takes the tools away, and a named one all the others.
    """
    name, choice = _read_tool_choice(
        decode_value(fields["tool_choice"]) if "tool_choice" in fields else None
    )
    if choice == "none":
        return (), None
    got = decode_value(fields["tools"]) if "tools" in fields else None
    if got is None:
        return (), None
    if not isinstance(got, list):
        raise build_param_error("Tools are not an array", "tools")
    raws = msgspec.json.decode(fields["tools"], type=list[Raw])
    tools = tuple(_read_tool(item, raw) for item, raw in zip(got, raws, strict=True))
    if name is not None:
        tools = tuple(tool for tool in tools if tool.name == name)
    return tools, choice if tools else None


def _read_tool_choice(got: Any) -> tuple[str | None, ToolChoice | None]:
    """The name of the one tool that stays, if one is named, and the choice."""
    match got:
        case None:
            return None, None
        case "none" | "auto" | "required":
            return None, cast('Literal["none", "auto", "required"]', got)
        case str():
            text = "tool_choice should be either 'none' or 'auto' or 'required'"
        case {"function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name, NamedTool(name)
        case {"function": dict()}:
            text = "tool_choice.function.name is not a valid string"
        case {"type": "function"}:
            text = "tool_choice.name is not a valid string"
        case dict():
            text = "tool_choice.function is not a valid JSON object"
        case _:
            text = "tool_choice is not a valid JSON object or string"
    raise build_param_error(text, "tool_choice")


def _read_tool(item: Any, raw: Raw) -> Tool:
    if not isinstance(item, dict):
        raise build_param_error("Tool is not a JSON object", "tools")
    function, inside = item, msgspec.json.decode(raw, type=dict[str, Raw])
    if "function" in item:
        function = item["function"]
        if not isinstance(function, dict):
            raise build_param_error("Function is not a valid JSON object", "tools")
        inside = msgspec.json.decode(inside["function"], type=dict[str, Raw])
    elif not isinstance(item.get("type"), str):
        raise build_param_error("Tool type is missing or invalid", "tools")
    elif item["type"] != "function":
        raise build_param_error("Only function tools are supported", "tools")
    name = function.get("name")
    if not isinstance(name, str):
        raise build_param_error("Function object does not contain a valid name field", "tools")
    if "parameters" in function and not isinstance(function["parameters"], dict):
        raise build_param_error("Function parameters are not a valid JSON object", "tools")
    strict = function.get("strict")
    return Tool(
        name,
        _get_string(function.get("description")),
        inside.get("parameters"),
        strict if isinstance(strict, bool) else None,
    )


# --- output ---------------------------------------------------------------------------------------


def read_response_format(raw: Raw | None) -> OutputFormat | None:
    """``response_format``. Raises InvalidParameter."""
    got = None if raw is None else decode_value(raw)
    if raw is None or got is None:
        return None
    match got:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JsonObjectFormat()
        case {"type": "json_schema", "json_schema": {"schema": dict()} as schema}:
            whole = msgspec.json.decode(raw, type=dict[str, Raw])
            inside = msgspec.json.decode(whole["json_schema"], type=dict[str, Raw])
            strict = schema.get("strict")
            return JsonSchemaFormat(
                inside["schema"],
                _get_string(schema.get("name")) or "schema",
                _get_string(schema.get("description")),
                strict if isinstance(strict, bool) else None,
            )
        case dict():
            raise build_param_error("response_format type is not supported", "response_format")
        case _:
            raise build_param_error("response_format is not an object", "response_format")
