"""The options of a request that an answer is measured by: stop strings, limits, tools, schemas.

Parameters are found by their names in all protocols. Of a JSON schema, what is not known here fits.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from protocols.core.json_text import JsonDecoder

_decode = JsonDecoder().decode
_MAX_SCHEMA_DEPTH: Final = 32
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float),
    "integer": (int,), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip

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


def fits_schema(arguments: str, schema: Any) -> bool:
    """Whether the arguments of a call are JSON that the schema allows."""
    try:
        value = _decode(arguments or "{}")
    except ValueError:
        return False
    return _fits(value, schema, 0)


def _fits(value: Any, schema: Any, depth: int) -> bool:
    if schema is False:
        return False
    if not isinstance(schema, dict) or depth > _MAX_SCHEMA_DEPTH:
        return True
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if not _has_type(value, schema.get("type")):
        return False
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        if isinstance(options, list) and not any(_fits(value, one, depth + 1) for one in options):
            return False
    if isinstance(value, dict):
        return _fits_object(value, schema, depth)
    if isinstance(value, list) and "items" in schema:
        return all(_fits(one, schema["items"], depth + 1) for one in value)
    return True


def _has_type(value: Any, names: Any) -> bool:
    allowed = names if isinstance(names, list) else [names]
    types = [_TYPES[name] for name in allowed if isinstance(name, str) and name in _TYPES]
    if not types:
        return True
    if isinstance(value, bool):
        return (bool,) in types
    if isinstance(value, float) and value.is_integer() and (int,) in types:
        return True  # JSON Schema: 1.0 is an integer
    return any(isinstance(value, one) for one in types)


def _fits_object(value: Mapping[str, Any], schema: Mapping[str, Any], depth: int) -> bool:
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    if isinstance(required, list) and not all(name in value for name in required):
        return False
    if schema.get("additionalProperties") is False and not value.keys() <= known.keys():
        return False
    return all(_fits(one, known[name], depth + 1) for name, one in value.items() if name in known)
