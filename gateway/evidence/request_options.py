"""The parameters of a request that measures look at, by their names in the protocols."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_STOP_FIELDS: Final = ("stop", "stop_sequences", "stop_words", "stop_strings")
_LIMIT_FIELDS: Final = (
    "max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "num_predict",
)  # fmt: skip
_SECTIONS: Final = ("parameters", "options", "generation_config", "text")
"""The fields of a body in which protocols nest parameters."""
_INCLUDES_STOP: Final = "include_stop_str_in_output"


def _iter_sections(body: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(body, dict):
        yield body
        for name in _SECTIONS:
            if isinstance(body.get(name), dict):
                yield body[name]


def find_stop_strings(body: Any) -> Sequence[str]:
    """The request's stop strings; none if the response is to contain them."""
    found = list[str]()
    for section in _iter_sections(body):
        if section.get(_INCLUDES_STOP):
            return ()
        for name in _STOP_FIELDS:
            value = section.get(name)
            values = value if isinstance(value, list) else [value]
            found += [one for one in values if isinstance(one, str) and one]
    return found


def find_token_limit(body: Any) -> int | None:
    """The most tokens of each choice."""
    for section in _iter_sections(body):
        for name in _LIMIT_FIELDS:
            value = section.get(name)
            if type(value) is int and value > 0:
                return value
    return None


def requires_json(body: Any) -> bool:
    """Whether the response must be JSON."""
    for section in _iter_sections(body):
        for name in ("response_format", "format", "guided_json", "grammar"):
            value = section.get(name)
            if isinstance(value, dict):
                kind = value.get("type")
                if (
                    kind in ("json_object", "json_schema", "json", "object")
                    or name == "guided_json"
                ):
                    return True
            elif value == "json":
                return True
    return False


def find_tools(body: Any) -> Mapping[str, Any]:
    """The schema of the arguments of each tool, by its name.

    A function without one takes any JSON, and another kind of tool, with None, any text.
    """
    tools = body.get("tools") if isinstance(body, dict) else None
    found = dict[str, Any]()
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict):
            continue
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        name = function.get("name")
        if isinstance(name, str):
            schema = function.get("parameters", function.get("input_schema"))
            is_function = tool.get("type", "function") == "function"
            found[name] = {} if schema is None and is_function else schema
    return found
