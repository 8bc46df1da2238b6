"""Messages, tools and output formats, with the server's order of checks and error texts.

Source: openvinotoolkit/model_server, src/llm/apis/openai_completions.cpp and
openai_api_handler.cpp (parseMessages, parseTools, parseResponseFormat).
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, cast, get_args

import msgspec
from msgspec import Raw

from protocols.chat.content_parts import PART_KEYS
from protocols.chat.messages import CALL_KEYS
from protocols.chat.tools import FUNCTION_TOOL_KEYS
from protocols.core.errors import InvalidParameter
from protocols.core.extra import KeyTree, read_extra_fields
from protocols.core.json_text import decode_json
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
from protocols.json_body import decode_value

_encode = msgspec.json.Encoder().encode

_ROLES = frozenset(get_args(Role))


def build_param_error(text: str, param: str) -> InvalidParameter:
    """Build an error with a complete text."""
    return InvalidParameter(text, param=param)


def read_messages(raw: Raw | None) -> tuple[Message, ...]:
    """Read the messages. Raises InvalidParameter."""
    if raw is None:
        raise build_param_error("Messages missing in request", "messages")
    value = decode_value(raw)
    if not isinstance(value, list):
        raise build_param_error("Messages are not an array", "messages")
    if not value:
        raise build_param_error("Messages array cannot be empty", "messages")
    return tuple(_read_message(item, f"messages[{i}]") for i, item in enumerate(value))


_MESSAGE_KEYS: Final[KeyTree] = dict.fromkeys(
    ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
)


def _read_message(item: Any, at: str) -> Message:
    """Read one message. Ignore a field of an unexpected type, as the server does."""
    if not isinstance(item, dict):
        raise build_param_error("Message is not a JSON object", "messages")
    parts = _read_content(item.get("content", ""), f"{at}.content")
    role = item.get("role")
    if not isinstance(role, str):
        raise build_param_error("Every message must have 'role' field", "messages")
    calls = item.get("tool_calls")
    tool_calls = _read_tool_calls(calls, at) if isinstance(calls, list) else ()
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
        extra=read_extra_fields(item, at, _MESSAGE_KEYS),
    )


def _get_string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_content(content: Any, at: str) -> tuple[ContentPart, ...]:
    match content:
        case str():
            return (TextPart(content),)
        case list():
            return tuple(_read_part(entry, f"{at}[{k}]") for k, entry in enumerate(content))
        case _:
            return ()


def _read_part(entry: Any, at: str) -> ContentPart:
    if not isinstance(entry, dict):
        raise _build_message_error("content array should contain objects")
    part = _read_known_part(entry)
    extra = read_extra_fields(entry, at, PART_KEYS[entry["type"]])
    return part if extra is None else msgspec.structs.replace(part, extra=extra)


def _read_known_part(entry: dict[str, Any]) -> ContentPart:
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


def _read_string_member(container: dict[str, Any], name: str, text: str) -> str:
    value = container.get(name)
    if not isinstance(value, str):
        raise _build_message_error(text)
    return value


def _read_object_member(container: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    value = container.get(name)
    if not isinstance(value, dict):
        raise _build_message_error(text)
    return value


def _read_tool_calls(calls: list[Any], at: str) -> tuple[ToolCall, ...]:
    return tuple(_read_tool_call(call, f"{at}.tool_calls[{k}]") for k, call in enumerate(calls))


def _read_tool_call(call: Any, at: str) -> ToolCall:
    if not isinstance(call, dict):
        raise build_param_error("Each tool_call must be an object", "messages")
    function = call.get("function")
    if not isinstance(function, dict):
        raise build_param_error("Each tool_call must have a 'function' object", "messages")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = _encode(arguments).decode()
    extra = read_extra_fields(call, at, CALL_KEYS["function"])
    identifier, name = str(call.get("id") or ""), str(function.get("name") or "")
    return ToolCall(identifier, name, arguments, extra=extra)


def read_tools(fields: Mapping[str, Raw]) -> tuple[tuple[Tool, ...], ToolChoice | None]:
    """Read the tools and the tool choice. Raises InvalidParameter.

    The choice ``none`` removes the tools, and a named choice removes all others.
    """
    name, choice = _read_tool_choice(
        decode_value(fields["tool_choice"]) if "tool_choice" in fields else None
    )
    if choice == "none":
        return (), None
    value = decode_value(fields["tools"]) if "tools" in fields else None
    if value is None:
        return (), None
    if not isinstance(value, list):
        raise build_param_error("Tools are not an array", "tools")
    raws = decode_json(fields["tools"], kind=list[Raw])
    tools = tuple(
        _read_tool(item, raw, f"tools[{i}]")
        for i, (item, raw) in enumerate(zip(value, raws, strict=True))
    )
    if name is not None:
        tools = tuple(tool for tool in tools if tool.name == name)
    return tools, choice if tools else None


def _read_tool_choice(value: Any) -> tuple[str | None, ToolChoice | None]:
    """Return the name of the tool to keep, if one is named, and the choice."""
    match value:
        case None:
            return None, None
        case "none" | "auto" | "required":
            return None, cast('Literal["none", "auto", "required"]', value)
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


_TOOL_KEYS: Final[KeyTree] = {**FUNCTION_TOOL_KEYS, "type": frozenset({"function"})}
"""With a function, the server reads no type."""


def _read_tool(item: Any, raw: Raw, at: str) -> Tool:
    if not isinstance(item, dict):
        raise build_param_error("Tool is not a JSON object", "tools")
    function, inside = item, decode_json(raw, kind=dict[str, Raw])
    if "function" in item:
        function = item["function"]
        if not isinstance(function, dict):
            raise build_param_error("Function is not a valid JSON object", "tools")
        inside = decode_json(inside["function"], kind=dict[str, Raw])
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
        extra=read_extra_fields({"function": function, **item}, at, _TOOL_KEYS)
        if "function" in item
        else None,
    )


def read_response_format(raw: Raw | None) -> OutputFormat | None:
    """Read ``response_format``. Raises InvalidParameter."""
    value = None if raw is None else decode_value(raw)
    if raw is None or value is None:
        return None
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JsonObjectFormat()
        case {"type": "json_schema", "json_schema": {"schema": dict()} as schema}:
            schema_object = decode_json(raw, kind=dict[str, Raw])
            inside = decode_json(schema_object["json_schema"], kind=dict[str, Raw])
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
