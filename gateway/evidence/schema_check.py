"""Whether a value fits a JSON schema, as far as tools use them. What is not known here fits."""

from collections.abc import Mapping
from typing import Any, Final

from protocols.core.json_text import JsonDecoder

_decode = JsonDecoder().decode
_MAX_SCHEMA_DEPTH: Final = 32
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float),
    "integer": (int,), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


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
