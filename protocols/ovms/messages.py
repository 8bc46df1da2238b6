"""Messages, tools and output formats, checked in the server's order and refused in its words.

Source: openvinotoolkit/model_server, src/llm/apis/openai_completions.cpp and
openai_api_handler.cpp (parseMessages, parseTools, parseResponseFormat).
"""

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import msgspec
from msgspec import Raw

from gateway.core.errors import InvalidParameter
from gateway.core.types import (
    AudioPart,
    ImagePart,
    JsonObject,
    JsonSchema,
    Message,
    NamedTool,
    OutputFormat,
    Part,
    ReasoningPart,
    Role,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from protocols.body import value

_ROLES = frozenset(get_args(Role))
_encode = msgspec.json.Encoder().encode


def wrong(text: str, param: str) -> InvalidParameter:
    """A complaint whose text is complete."""
    return InvalidParameter(text, param=param)


def read_messages(raw: Raw | None) -> tuple[Message, ...]:
    """The conversation. Raises InvalidParameter."""
    if raw is None:
        raise wrong("Messages missing in request", "messages")
    got = value(raw)
    if not isinstance(got, list):
        raise wrong("Messages are not an array", "messages")
    if not got:
        raise wrong("Messages array cannot be empty", "messages")
    return tuple(_message(item) for item in got)


def _message(item: Any) -> Message:
    """One message. A field of an unexpected type is passed over, as the server does."""
    if not isinstance(item, dict):
        raise wrong("Message is not a JSON object", "messages")
    parts = _content(item.get("content", ""))
    role = item.get("role")
    if not isinstance(role, str):
        raise wrong("Every message must have 'role' field", "messages")
    calls = item.get("tool_calls")
    tool_calls = _calls(calls) if isinstance(calls, list) else ()
    if role not in _ROLES:
        raise wrong("Invalid message structure - unknown role", "messages")
    thought = item.get("reasoning_content")
    if isinstance(thought, str) and thought:
        parts = (ReasoningPart(thought), *parts)
    return Message(
        cast("Role", role),
        parts,
        name=_text(item.get("name")),
        tool_calls=tool_calls,
        tool_call_id=_text(item.get("tool_call_id")),
    )


def _text(got: Any) -> str | None:
    return got if isinstance(got, str) else None


def _content(content: Any) -> tuple[Part, ...]:
    match content:
        case str():
            return (TextPart(content),)
        case list():
            return tuple(_part(entry) for entry in content)
        case _:
            return ()


def _part(entry: Any) -> Part:
    if not isinstance(entry, dict):
        raise _broken("content array should contain objects")
    match entry.get("type"):
        case "text":
            return TextPart(_inside(entry, "text", "content text missing"))
        case "image_url":
            image = _object(entry, "image_url", "content image_url missing")
            url = _inside(image, "url", "image_url does not have url field")
            return ImagePart(url, _text(image.get("detail")))
        case "input_audio":
            audio = _object(entry, "input_audio", "input_audio object missing")
            data = _inside(audio, "data", "input_audio does not have a valid data field")
            return AudioPart(data, _text(audio.get("format")))
        case str():
            raise wrong("Unsupported content type", "messages")
        case _:
            raise _broken("content object type missing")


def _broken(text: str) -> InvalidParameter:
    return wrong(f"Invalid message structure - {text}", "messages")


def _inside(holder: dict[str, Any], name: str, text: str) -> str:
    got = holder.get(name)
    if not isinstance(got, str):
        raise _broken(text)
    return got


def _object(holder: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    got = holder.get(name)
    if not isinstance(got, dict):
        raise _broken(text)
    return got


def _calls(calls: list[Any]) -> tuple[ToolCall, ...]:
    return tuple(_call(call) for call in calls)


def _call(call: Any) -> ToolCall:
    if not isinstance(call, dict):
        raise wrong("Each tool_call must be an object", "messages")
    function = call.get("function")
    if not isinstance(function, dict):
        raise wrong("Each tool_call must have a 'function' object", "messages")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = _encode(arguments).decode()
    return ToolCall(str(call.get("id") or ""), str(function.get("name") or ""), arguments)


# --- tools ----------------------------------------------------------------------------------------


def read_tools(fields: Mapping[str, Raw]) -> tuple[tuple[Tool, ...], ToolChoice | None]:
    """The tools that may be called, and the choice among them. Raises InvalidParameter.

    The choice ``none`` takes the tools away, and a named one all the others.
    """
    name, choice = _choice(value(fields["tool_choice"]) if "tool_choice" in fields else None)
    if choice == "none":
        return (), None
    got = value(fields["tools"]) if "tools" in fields else None
    if got is None:
        return (), None
    if not isinstance(got, list):
        raise wrong("Tools are not an array", "tools")
    raws = msgspec.json.decode(fields["tools"], type=list[Raw])
    tools = tuple(_tool(item, raw) for item, raw in zip(got, raws, strict=True))
    if name is not None:
        tools = tuple(tool for tool in tools if tool.name == name)
    return tools, choice if tools else None


def _choice(got: Any) -> tuple[str | None, ToolChoice | None]:
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
    raise wrong(text, "tool_choice")


def _tool(item: Any, raw: Raw) -> Tool:
    if not isinstance(item, dict):
        raise wrong("Tool is not a JSON object", "tools")
    function, inside = item, msgspec.json.decode(raw, type=dict[str, Raw])
    if "function" in item:
        function = item["function"]
        if not isinstance(function, dict):
            raise wrong("Function is not a valid JSON object", "tools")
        inside = msgspec.json.decode(inside["function"], type=dict[str, Raw])
    elif not isinstance(item.get("type"), str):
        raise wrong("Tool type is missing or invalid", "tools")
    elif item["type"] != "function":
        raise wrong("Only function tools are supported", "tools")
    name = function.get("name")
    if not isinstance(name, str):
        raise wrong("Function object does not contain a valid name field", "tools")
    if "parameters" in function and not isinstance(function["parameters"], dict):
        raise wrong("Function parameters are not a valid JSON object", "tools")
    strict = function.get("strict")
    return Tool(
        name,
        _text(function.get("description")),
        inside.get("parameters"),
        strict if isinstance(strict, bool) else None,
    )


# --- output ---------------------------------------------------------------------------------------


def read_format(raw: Raw | None) -> OutputFormat | None:
    """``response_format``. Raises InvalidParameter."""
    got = None if raw is None else value(raw)
    if raw is None or got is None:
        return None
    match got:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JsonObject()
        case {"type": "json_schema", "json_schema": {"schema": dict()} as schema}:
            whole = msgspec.json.decode(raw, type=dict[str, Raw])
            inside = msgspec.json.decode(whole["json_schema"], type=dict[str, Raw])
            strict = schema.get("strict")
            return JsonSchema(
                inside["schema"],
                _text(schema.get("name")) or "schema",
                _text(schema.get("description")),
                strict if isinstance(strict, bool) else None,
            )
        case dict():
            raise wrong("response_format type is not supported", "response_format")
        case _:
            raise wrong("response_format is not an object", "response_format")
