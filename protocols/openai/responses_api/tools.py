"""Tools and tool_choice of the Responses API, and the names under which workers see them.

Workers know no namespaces, so their members are called ``NAMESPACE__NAME``, and the client's tool
search is a function. A ``ToolCatalog`` maps the names back.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from protocols.chat.params import (
    NULL,
    as_array,
    as_object,
    as_object_field,
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
from protocols.chat.tool_names import limit_name, shorten_name
from protocols.chat.tools import read_function
from protocols.core.errors import InvalidParameter, UnsupportedFeature
from protocols.core.extra import KeyTree, find_unknown_keys
from protocols.core.request import AllowedTools, ExtraFields, NamedTool, Tool, ToolChoice
from protocols.json_body import decode_value

_encode = msgspec.json.Encoder().encode

MAX_TOOLS: Final = 1024
"""The largest number of tools, over all namespaces."""

_SEARCH_PARAMETERS: Final = Raw(
    b'{"type":"object","properties":{"query":{"type":"string"}},"required":["query"]}'
)

OPTIONAL_HOSTED_TOOLS: Final = frozenset(
    {
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Hosted tools without which a request still makes sense: workers that lack them do not get them,
and the response reports it. Codex sends ``web_search`` with every request."""
REQUIRED_HOSTED_TOOLS: Final = frozenset(
    {
        "file_search",
        "code_interpreter",
        "image_generation",
        "computer",
        "computer_use_preview",
        "mcp",
        "programmatic_tool_calling",
        "local_shell",
        "shell",
        "apply_patch",
    }
)
"""Tools on which the client's task depends: without them the request is rejected."""
_CLIENT_TOOLS: Final = ("function", "custom", "namespace", "tool_search")

ToolKind = Literal["function", "custom", "tool_search"]


class ToolIdentity(Struct, frozen=True):
    """A tool as the client knows it."""

    kind: ToolKind
    name: str
    namespace: str | None = None


class ToolCatalog:
    """The tools of one request, by the names that workers see."""

    def __init__(self, *, allows_hosted: bool = False) -> None:
        """``allows_hosted``: the worker gets the client's own tools, hosted ones among them."""
        self._allows_hosted = allows_hosted
        self._tools: dict[str, Tool] = {}
        self._identities: dict[str, ToolIdentity] = {}
        self._flat_names: dict[tuple[str | None, str], str] = {}
        self.dropped_tools: dict[str, Raw] = {}
        """What workers of other protocols do not get: hosted tools, by ``tools.KIND``, and unknown
        keys, by their path."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools for the internal request."""
        return tuple(self._tools.values())

    def identify(self, name: str) -> ToolIdentity:
        """The client's tool for the name that a worker called; a function if it is unknown."""
        return self._identities.get(name) or ToolIdentity("function", name)

    def flatten_name(self, namespace: str | None, name: str) -> str:
        """The name under which workers see a tool."""
        known = self._flat_names.get((namespace, name))
        return known or join_tool_name(namespace, name)

    def read_tools(self, raw: Raw, at: str, *, replaces: bool = False) -> None:
        """Add an array of tools. ``replaces``: a tool may replace one of the same name.

        Raises InvalidParameter, or UnsupportedFeature for a tool that no worker has.
        """
        items = as_array(raw, at)
        if len(items) > MAX_TOOLS:
            raise too_long_error(at, MAX_TOOLS, items)
        for i, item in enumerate(items):
            self._read_tool(item, f"{at}[{i}]", replaces=replaces)

    def _read_tool(
        self, raw: Raw, at: str, *, replaces: bool, namespace: tuple[str, str] | None = None
    ) -> None:
        fields = as_object(raw, at)
        kind = as_text(fields, "type", at)
        match kind:
            case "function":
                tool = _add_extra(_read_function_tool(fields, at), fields, at, "parameters")
                self._add(tool, "function", namespace, at, replaces=replaces)
            case "custom":
                self._add_unknown_keys(*_find_format(fields, at), _FORMAT_KEYS)
                tool = _add_extra(_read_custom_tool(fields, at), fields, at, "format")
                self._add(tool, "custom", namespace, at, replaces=replaces)
            case "namespace" if namespace is None:
                self._read_namespace(fields, at, replaces=replaces)
            case "tool_search" if decode_value(fields.get("execution", Raw(b"null"))) == "client":
                description = as_optional_text(fields, "description", at)
                parameters = null_to_none(fields.get("parameters")) or _SEARCH_PARAMETERS
                as_object(parameters, f"{at}.parameters")
                tool = Tool("tool_search", description, parameters)
                self._add(tool, "tool_search", None, at, replaces=replaces)
            case "tool_search":
                self.dropped_tools["tools.tool_search"] = raw
            case _ if kind in OPTIONAL_HOSTED_TOOLS:
                self.dropped_tools[f"tools.{kind}"] = raw
            case _ if kind in REQUIRED_HOSTED_TOOLS and self._allows_hosted:
                pass
            case _ if kind in REQUIRED_HOSTED_TOOLS:
                text = f"The tool '{kind}' is not supported by this model."
                raise UnsupportedFeature(text, param=f"{at}.type")
            case _:
                allowed = (*_CLIENT_TOOLS, *sorted(OPTIONAL_HOSTED_TOOLS | REQUIRED_HOSTED_TOOLS))
                raise invalid_value_error(f"{at}.type", kind, allowed)

    def _add_unknown_keys(self, value: Mapping[str, Any], at: str, known: KeyTree) -> None:
        for path, one in find_unknown_keys(value, known).items():
            if one is not None and one != NULL:
                self.dropped_tools[".".join((at, *path))] = NULL

    def _read_namespace(self, fields: Mapping[str, Raw], at: str, *, replaces: bool) -> None:
        name = _read_tool_name(fields, at)
        self._add_unknown_keys(fields, at, _NAMESPACE_KEYS)
        description = as_optional_text(fields, "description", at) or ""
        members = null_to_none(fields.get("tools"))
        if members is None:
            raise missing_error(f"{at}.tools")
        for i, item in enumerate(as_array(members, f"{at}.tools")):
            place = f"{at}.tools[{i}]"
            self._read_tool(item, place, replaces=replaces, namespace=(name, description))

    def _add(
        self,
        tool: Tool,
        kind: ToolKind,
        namespace: tuple[str, str] | None,
        at: str,
        *,
        replaces: bool,
    ) -> None:
        space = None if namespace is None else namespace[0]
        identity = ToolIdentity(kind, tool.name, space)
        flat = self._flat_names.get((space, tool.name))
        if flat is not None and not (replaces and self._identities[flat].kind == kind):
            text = f"Duplicate tool name: '{tool.name[:64]}'."
            raise InvalidParameter(text, param=f"{at}.name", problem="value", got=tool.name)
        if flat is None:
            flat = join_tool_name(space, tool.name)
            if flat in self._tools:  # a tool that is called like a member of a namespace
                flat = shorten_name(flat, "\0" + (space or ""))
        if namespace is not None and namespace[1]:
            tool = replace(tool, description=f"{namespace[1]}\n\n{tool.description or ''}".strip())
        if len(self._tools) >= MAX_TOOLS and flat not in self._tools:
            text = f"Invalid 'tools': more than {MAX_TOOLS} tools in all."
            raise InvalidParameter(text, param="tools", problem="too_long", got=())
        self._flat_names[space, tool.name] = flat
        self._identities[flat] = identity
        self._tools[flat] = replace(tool, name=flat)

    # --- tool_choice ------------------------------------------------------------------------------

    def read_choice(self, raw: Raw | None) -> ToolChoice | None:
        """The tool choice. Raises InvalidParameter or UnsupportedFeature."""
        raw = null_to_none(raw)
        if raw is None:
            return None
        value = decode_value(raw)
        match value:
            case "none" | "auto":
                return _MODES[value] if self._tools else None
            case "required":
                self._require_tools()
                return "required"
            case str():
                raise invalid_value_error("tool_choice", value, tuple(_MODES))
            case dict():
                return self._read_object_choice(value)
            case _:
                raise invalid_type_error("tool_choice", "one of a string or object", value)

    def _read_object_choice(self, value: Mapping[str, Any]) -> ToolChoice | None:
        kind = value.get("type")
        if not isinstance(kind, str):
            raise invalid_type_error("tool_choice.type", "a string", kind)
        self._add_unknown_keys(value, "tool_choice", _CHOICE_KEYS)
        if kind in ("function", "custom"):
            return NamedTool(self._find_tool(value, "tool_choice"))
        if kind == "allowed_tools":
            return self._read_allowed_tools(value)
        if kind in OPTIONAL_HOSTED_TOOLS or kind in REQUIRED_HOSTED_TOOLS:
            if self._allows_hosted:
                return None
            text = f"The tool '{kind}' is not supported by this model."
            raise UnsupportedFeature(text, param="tool_choice.type")
        allowed = ("function", "custom", "allowed_tools")
        raise invalid_value_error("tool_choice.type", kind, allowed)

    def _read_allowed_tools(self, value: Mapping[str, Any]) -> ToolChoice:
        mode, items = value.get("mode"), value.get("tools")
        if mode not in ("auto", "required"):
            raise invalid_value_error("tool_choice.mode", mode, ("auto", "required"))
        if not isinstance(items, list):
            raise invalid_type_error("tool_choice.tools", "an array of objects", items)
        self._require_tools()
        names = []
        for i, item in enumerate(items):
            at = f"tool_choice.tools[{i}]"
            if not isinstance(item, dict):
                raise invalid_type_error(at, "an object", item)
            self._add_unknown_keys(item, at, _CHOICE_KEYS)
            if item.get("type") in ("function", "custom"):
                names.append(self._find_tool(item, at))
            elif item.get("type") not in _CHOICE_TYPES:
                raise invalid_value_error(f"{at}.type", item.get("type"), _CHOICE_TYPES)
        return AllowedTools(mode, tuple(names))

    def _require_tools(self) -> None:
        if not self._tools:
            text = "'tool_choice' is only allowed when 'tools' are specified."
            raise _invalid_choice_error(text)

    def _find_tool(self, value: Mapping[str, Any], at: str) -> str:
        """The worker's name for a tool that the choice names by its own or its flat name."""
        inner = value.get(str(value.get("type")))
        name = (inner if isinstance(inner, dict) else value).get("name")
        if not isinstance(name, str):
            raise missing_error(f"{at}.name")
        if name in self._tools:
            return name
        matches = [flat for (_, own), flat in self._flat_names.items() if own == name]
        if len(matches) == 1:
            return matches[0]
        text = f"Tool choice '{name[:64]}' not found in 'tools' parameter."
        if matches:
            text = f"Tool choice '{name[:64]}' is ambiguous: several namespaces have this tool."
        raise _invalid_choice_error(text)


_CHOICE_TYPES: Final = (
    "function",
    "custom",
    *sorted(OPTIONAL_HOSTED_TOOLS | REQUIRED_HOSTED_TOOLS),
)
"""The types of tools that may be allowed; hosted ones are not among a worker's own tools."""
_MODES: Final[Mapping[str, Literal["none", "auto", "required"]]] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
}


def _invalid_choice_error(text: str) -> InvalidParameter:
    error = conflict_error("tool_choice", text)
    error.problem = "value"
    return error


def _read_tool_name(fields: Mapping[str, Raw], at: str) -> str:
    name = as_text(fields, "name", at)
    if not name:
        raise empty_value_error(f"{at}.name", name)
    return name


def _add_extra(tool: Tool, fields: Mapping[str, Raw], at: str, schema: str) -> Tool:
    """The tool with its unknown keys; ``schema`` is the field of what it takes."""
    known = dict.fromkeys(("type", "name", "description", "strict", schema))
    unknown = find_unknown_keys(fields, known)
    if not unknown:
        return tool
    values = {path: decode_value(raw) for path, raw in unknown.items()}
    return replace(tool, extra=ExtraFields(at, values))


def _read_function_tool(fields: Mapping[str, Raw], at: str) -> Tool:
    """A function: its fields stand beside ``type``, or as in chat completions below it."""
    if "name" not in fields and "function" in fields:
        fields, at = as_object_field(fields, "function", at), f"{at}.function"
    return replace(read_function(fields, at), at=at)


_NAMESPACE_KEYS: Final = dict.fromkeys(("type", "name", "description", "tools"))
_FORMAT_KEYS: Final = dict.fromkeys(("type", "syntax", "definition"))
_CHOICE_KEYS: Final[KeyTree] = {
    **dict.fromkeys(("type", "name", "mode", "tools", "namespace")),
    **{kind: {"name": None} for kind in ("function", "custom")},
}


def _find_format(fields: Mapping[str, Raw], at: str) -> tuple[Mapping[str, Any], str]:
    """What a custom tool's input has to match, and its path."""
    if "name" not in fields and "custom" in fields:
        fields, at = as_object_field(fields, "custom", at), f"{at}.custom"
    form = null_to_none(fields.get("format"))
    value = None if form is None else decode_value(form)
    return value if isinstance(value, dict) else {}, f"{at}.format"


def _read_custom_tool(fields: Mapping[str, Raw], at: str) -> Tool:
    """A custom tool. Its format is written as in chat completions."""
    if "name" not in fields and "custom" in fields:
        fields, at = as_object_field(fields, "custom", at), f"{at}.custom"
    description = as_optional_text(fields, "description", at)
    raw = null_to_none(fields.get("format"))
    form = None if raw is None else _read_format(as_object(raw, f"{at}.format"), f"{at}.format")
    return Tool(_read_tool_name(fields, at), description, form, kind="custom", at=at)


def _read_format(fields: Mapping[str, Raw], at: str) -> Raw:
    kind = as_text(fields, "type", at)
    match kind:
        case "text":
            return Raw(_encode({"type": kind}))
        case "grammar":
            grammar = {name: as_text(fields, name, at) for name in ("syntax", "definition")}
            return Raw(_encode({"type": kind, "grammar": grammar}))
        case _:
            raise invalid_value_error(f"{at}.type", kind, ("text", "grammar"))


def join_tool_name(namespace: str | None, name: str) -> str:
    """The name under which workers see a tool of a namespace, or of none."""
    if namespace is None:
        return name
    return limit_name(f"{namespace}__{name}")


def list_tool_objects(raw: Raw | None) -> Sequence[Raw]:
    """The tools as the response repeats them: the client's own."""
    raw = null_to_none(raw)
    return () if raw is None else as_array(raw, "tools")
