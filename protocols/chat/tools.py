"""Tools, tool_choice, the older functions, and response_format.

Readers convert a request's fields to the internal form, writers convert it to a worker's JSON::

    tools = read_tools(fields, most=32)
    choice = read_tool_choice(fields, tools)
    output = read_response_format(fields)
"""

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from protocols.chat.field_types import TOOLS, NamedFunctionChoice
from protocols.chat.params import (
    as_array,
    as_object,
    as_object_field,
    as_optional_bool,
    as_optional_text,
    as_text,
    conflict_error,
    empty_value_error,
    invalid_type_error,
    invalid_value_error,
    missing_error,
    null_to_none,
    too_long_error,
)
from protocols.core.extra import KeyTree, find_unknown_keys, write_extra
from protocols.core.json_text import JsonDecoder
from protocols.core.request import (
    AllowedTools,
    ExtraFields,
    FieldPath,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    OutputFormat,
    Tool,
    ToolChoice,
)
from protocols.json_body import JSON_ERRORS, decode_value

FORMAT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_encode = msgspec.json.Encoder().encode
_decode_tools = JsonDecoder(TOOLS).decode

# --- tools ----------------------------------------------------------------------------------------


def read_tools(
    fields: Mapping[str, Raw],
    *,
    most: int | None = None,
    kinds: tuple[str, ...] = ("function", "custom"),
) -> tuple[Tool, ...]:
    """The tools of a request."""
    raw = null_to_none(fields.get("tools"))
    if raw is None:
        return ()
    try:
        tools = tuple([tool.to_tool() for tool in _decode_tools(raw)])
    except JSON_ERRORS:
        tools = ()  # some have another form, or are invalid
    if tools and (most is None or len(tools) <= most):
        return tools
    items = as_array(raw, "tools")
    if not items:
        raise empty_value_error("tools", items)
    if most is not None and len(items) > most:
        raise too_long_error("tools", most, items)
    return tuple(_read_tool(item, f"tools[{i}]", kinds) for i, item in enumerate(items))


def _read_tool(raw: Raw, at: str, kinds: tuple[str, ...]) -> Tool:
    fields = as_object(raw, at)
    kind = as_text(fields, "type", at)
    if kind not in kinds:
        raise invalid_value_error(f"{at}.type", kind, kinds)
    body, path = as_object_field(fields, kind, at), f"{at}.{kind}"
    extra = _read_extra({**fields, kind: body}, at, _TOOL_KEYS[kind])
    if kind == "function":
        return msgspec.structs.replace(read_function(body, path), extra=extra)
    form = null_to_none(body.get("format"))
    if form is not None:
        as_object(form, f"{path}.format")
    return Tool(
        _read_name(body, path),
        as_optional_text(body, "description", path),
        form,
        kind="custom",
        extra=extra,
    )


_FUNCTION_KEYS: Final[KeyTree] = dict.fromkeys(("name", "description", "parameters", "strict"))
FUNCTION_TOOL_KEYS: Final[KeyTree] = {"type": None, "function": _FUNCTION_KEYS}
_TOOL_KEYS: Final[Mapping[str, KeyTree]] = {
    "function": FUNCTION_TOOL_KEYS,
    "custom": {"type": None, "custom": dict.fromkeys(("name", "description", "format"))},
}


def _read_extra(
    fields: Mapping[str, Any], at: str, known: KeyTree, inside: FieldPath = ()
) -> ExtraFields | None:
    """The unknown keys of a tool, whose values are not decoded yet."""
    unknown = find_unknown_keys(fields, known)
    if not unknown:
        return None
    return ExtraFields(at, {key: decode_value(raw) for key, raw in unknown.items()}, inside)


def read_function(fields: Mapping[str, Raw], at: str) -> Tool:
    """A function with its name, description, parameters and ``strict``."""
    parameters = null_to_none(fields.get("parameters"))
    if parameters is not None:
        as_object(parameters, f"{at}.parameters")
    return Tool(
        _read_name(fields, at),
        as_optional_text(fields, "description", at),
        parameters,
        as_optional_bool(fields, "strict", at),
    )


def _read_name(fields: Mapping[str, Raw], at: str) -> str:
    name = as_text(fields, "name", at)
    if not name:
        raise empty_value_error(f"{at}.name", name)
    return name


def write_tools(
    tools: Sequence[Tool], *, requires_descriptions: bool = False
) -> list[dict[str, Any]]:
    """``tools`` as workers accept them; a missing description can become an empty one."""
    if requires_descriptions:
        tools = [
            msgspec.structs.replace(tool, description=tool.description or "") for tool in tools
        ]
    return [_write_tool(tool) for tool in tools]


def _write_tool(tool: Tool) -> dict[str, Any]:
    written = {"type": tool.kind, tool.kind: _write_function(tool)}
    if tool.extra is not None:
        write_extra(written, tool.extra)
    return written


def _write_function(tool: Tool) -> dict[str, Any]:
    schema = "parameters" if tool.kind == "function" else "format"
    fields = {
        "name": tool.name,
        "description": tool.description,
        schema: tool.parameters,
        "strict": tool.strict,
    }
    return {name: value for name, value in fields.items() if value is not None}


# --- tool_choice ----------------------------------------------------------------------------------


def read_tool_choice(fields: Mapping[str, Raw], tools: Sequence[Tool]) -> ToolChoice | None:
    """The tool choice. Raises InvalidParameter also for a tool that is not in ``tools``."""
    raw = null_to_none(fields.get("tool_choice"))
    if raw is None:
        return None
    choice = _read_tool_choice_value(raw)
    if not tools and choice != "none":
        raise _unknown_tool_error("'tool_choice' is only allowed when 'tools' are specified.")
    offered = {tool.name for tool in tools}
    for name in _list_required_names(choice):
        if name not in offered:
            raise _unknown_tool_error(f"Tool choice '{name[:64]}' not found in 'tools' parameter.")
    return choice


def _list_required_names(choice: ToolChoice) -> tuple[str, ...]:
    match choice:
        case NamedTool(name):
            return (name,)
        case AllowedTools(_, names):
            return names
        case _:
            return ()


def _unknown_tool_error(text: str) -> Exception:
    error = conflict_error("tool_choice", text)
    error.problem = "value"
    return error


def _read_tool_choice_value(raw: Raw) -> ToolChoice:
    value = decode_value(raw)
    match value:
        case "none" | "auto" | "required":
            return _TOOL_CHOICE_MODES[value]
        case str():
            raise invalid_value_error("tool_choice", value, ("none", "auto", "required"))
        case dict():
            return _read_object_choice(as_object(raw, "tool_choice"))
        case _:
            raise invalid_type_error("tool_choice", "one of a string or object", value)


_TOOL_CHOICE_MODES: Mapping[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
}


def _read_object_choice(fields: Mapping[str, Raw]) -> ToolChoice:
    at = "tool_choice"
    kind = as_text(fields, "type", at)
    match kind:
        case "function" | "custom":
            return NamedTool(_read_tool_name(fields, kind, at))
        case "allowed_tools":
            return _read_allowed_tools(fields)
        case _:
            raise invalid_value_error(f"{at}.type", kind, ("function", "custom", "allowed_tools"))


def _read_allowed_tools(fields: Mapping[str, Raw]) -> AllowedTools:
    at = "tool_choice.allowed_tools"
    inner = as_object_field(fields, "allowed_tools", "tool_choice")
    mode = as_text(inner, "mode", at)
    if mode not in ("auto", "required"):
        raise invalid_value_error(f"{at}.mode", mode, ("auto", "required"))
    tools = null_to_none(inner.get("tools"))
    if tools is None:
        raise missing_error(f"{at}.tools")
    names = []
    for i, raw in enumerate(as_array(tools, f"{at}.tools")):
        path = f"{at}.tools[{i}]"
        item = as_object(raw, path)
        names.append(_read_tool_name(item, as_text(item, "type", path), path))
    return AllowedTools(mode, tuple(names))  # type: ignore[arg-type]


def _read_tool_name(fields: Mapping[str, Raw], kind: str, at: str) -> str:
    return as_text(as_object_field(fields, kind, at), "name", f"{at}.{kind}")


def write_tool_choice(choice: ToolChoice, tools: Sequence[Tool]) -> Any:
    """``tool_choice`` as workers accept it; ``tools`` distinguishes function and custom tools."""
    kinds = {tool.name: tool.kind for tool in tools}

    def reference(name: str) -> dict[str, Any]:
        kind = kinds.get(name, "function")
        return {"type": kind, kind: {"name": name}}

    match choice:
        case NamedTool(name):
            return reference(name)
        case AllowedTools(mode, names):
            body = {"mode": mode, "tools": [reference(name) for name in names]}
            return {"type": "allowed_tools", "allowed_tools": body}
        case _:
            return choice


def restrict_tools(
    choice: ToolChoice | None, tools: tuple[Tool, ...]
) -> tuple[ToolChoice | None, tuple[Tool, ...]]:
    """The same without ``allowed_tools``, for workers that lack it: only the allowed tools."""
    if not isinstance(choice, AllowedTools):
        return choice, tools
    return choice.mode, tuple(tool for tool in tools if tool.name in choice.names)


# --- the older functions --------------------------------------------------------------------------


def read_functions(
    fields: Mapping[str, Raw],
) -> tuple[tuple[Tool, ...], ToolChoice | None]:
    """``functions`` and ``function_call`` as tools and a tool choice."""
    raw = null_to_none(fields.get("functions"))
    if raw is None:
        if null_to_none(fields.get("function_call")) is not None:
            text = "'function_call' is only allowed when 'functions' are specified."
            raise conflict_error("function_call", text)
        return (), None
    items = as_array(raw, "functions")
    if not items:
        raise empty_value_error("functions", items)
    tools = tuple(_read_legacy_function(item, f"functions[{i}]") for i, item in enumerate(items))
    return tools, _read_function_call(fields, tools)


def _read_legacy_function(raw: Raw, at: str) -> Tool:
    """A function as the tool that workers get."""
    fields = as_object(raw, at)
    extra = _read_extra(fields, at, _FUNCTION_KEYS, inside=("function",))
    return msgspec.structs.replace(read_function(fields, at), extra=extra)


def _read_function_call(fields: Mapping[str, Raw], tools: Sequence[Tool]) -> ToolChoice | None:
    raw = null_to_none(fields.get("function_call"))
    if raw is None:
        return None
    value = decode_value(raw)
    if isinstance(value, str):
        if value not in ("none", "auto"):
            raise invalid_value_error("function_call", value, ("none", "auto"))
        return _TOOL_CHOICE_MODES[value]
    name = as_text(as_object(raw, "function_call"), "name", "function_call")
    if name not in {tool.name for tool in tools}:
        raise invalid_value_error("function_call", name, tuple(tool.name for tool in tools))
    return NamedTool(name)


# --- response_format ------------------------------------------------------------------------------


def read_response_format(fields: Mapping[str, Raw]) -> OutputFormat | None:
    """The output format; None is plain text."""
    raw = null_to_none(fields.get("response_format"))
    if raw is None:
        return None
    inner = as_object(raw, "response_format")
    kind = as_text(inner, "type", "response_format")
    match kind:
        case "text":
            return None
        case "json_object":
            return JsonObjectFormat()
        case "json_schema":
            return _read_json_schema(inner)
        case _:
            kinds = ("json_object", "json_schema", "text")
            raise invalid_value_error("response_format.type", kind, kinds)


def _read_json_schema(fields: Mapping[str, Raw]) -> JsonSchemaFormat:
    at = "response_format.json_schema"
    inner = as_object_field(fields, "json_schema", "response_format")
    name = as_text(inner, "name", at)
    if not FORMAT_NAME.fullmatch(name):
        text = f"Invalid '{at}.name': string does not match pattern '^[a-zA-Z0-9_-]{{1,64}}$'."
        error = conflict_error(f"{at}.name", text)
        error.problem = "value"
        raise error
    schema = null_to_none(inner.get("schema"))
    if schema is not None:
        as_object(schema, f"{at}.schema")
    return JsonSchemaFormat(
        Raw(b"{}") if schema is None else schema,
        name,
        as_optional_text(inner, "description", at),
        as_optional_bool(inner, "strict", at),
    )


def write_response_format(output: OutputFormat | None) -> dict[str, Any] | None:
    """``response_format`` as workers accept it; None if it can't express this format."""
    match output:
        case JsonObjectFormat():
            return {"type": "json_object"}
        case JsonSchemaFormat(schema, name, description, strict):
            body = {"name": name, "description": description, "schema": schema, "strict": strict}
            body = {key: value for key, value in body.items() if value is not None}
            return {"type": "json_schema", "json_schema": body}
        case _:
            return None


# --- pass-through ---------------------------------------------------------------------------------

_TOOL_DEPENDENT_FIELDS: Final = frozenset({"tool_choice", "parallel_tool_calls"})
_CHECKED_FIELDS: Final = _TOOL_DEPENDENT_FIELDS | {
    "top_logprobs",
    "max_completion_tokens",
    "response_format",
}


def is_valid_chat(body: Any, fields: AbstractSet[str]) -> bool:
    """OpenAI's rules between the fields of a chat request, each valid.

    Raises InvalidParameter for an invalid ``response_format``.
    """
    if _CHECKED_FIELDS.isdisjoint(fields):
        return True
    if "top_logprobs" in fields and body.logprobs is not True:
        return False
    if "max_tokens" in fields and "max_completion_tokens" in fields:
        return False  # the gateway decides which of the two counts
    if "response_format" in fields:
        read_response_format({"response_format": body.response_format})
    if "tools" not in fields:
        return _TOOL_DEPENDENT_FIELDS.isdisjoint(fields)
    if "tool_choice" not in fields:  # some workers' bodies have no such field
        return True
    choice = body.tool_choice
    return not isinstance(choice, NamedFunctionChoice) or any(
        tool.function.name == choice.function.name for tool in body.tools
    )
