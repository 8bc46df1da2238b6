"""The configuration as JSON Schema, from the Structs: for editors, and for whoever asks."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect as types

from gateway.config.schema import Config
from protocols.core.units import SCALAR_TYPES, Secret

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_SECRET_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "properties": {"env": {"type": "string"}, "file": {"type": "string"}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        },
    ]
}
_ENVIRONMENT_SCHEMA = {
    "title": "Environment",
    "description": "What the environment holds: checked once it is put in.",
    "type": "string",
    "pattern": r"\$\{.+\}",
}
_ENVIRONMENT_REF = {"$ref": "#/$defs/Environment"}


def build_schema() -> dict[str, Any]:
    """The schema of the whole file."""
    found = msgspec.json.schema(Config, schema_hook=schema_hook)
    structs = {kind.cls.__name__: kind for kind in _collect_structs(types.type_info(Config))}
    found["$defs"] = {
        name: _describe_input_forms(part, structs[name]) for name, part in found["$defs"].items()
    }
    found["$defs"]["Config"]["patternProperties"] = {"^x-": {}}
    found = _expand_scalar_types(found)
    found["$defs"]["Environment"] = _ENVIRONMENT_SCHEMA
    return {"$schema": _DRAFT, **found}


def schema_hook(kind: type) -> dict[str, Any]:
    """The schema of a type of ours."""
    if kind is Secret:
        return dict(_SECRET_SCHEMA)
    raise NotImplementedError


def _collect_structs(kind: Any) -> list[types.StructType]:
    """Every Struct below a type."""
    found: list[types.StructType] = []
    waiting = [kind]
    while waiting:
        match waiting.pop():
            case types.StructType() as one:
                found.append(one)
                waiting += [field.type for field in one.fields]
            case types.Metadata(type=inner):
                waiting.append(inner)
            case types.UnionType(types=inner):
                waiting += inner
            case types.DictType(value_type=inner) | types.VarTupleType(item_type=inner):
                waiting.append(inner)
            case _:
                pass
    return found


def _describe_input_forms(part: dict[str, Any], kind: types.StructType) -> dict[str, Any]:
    """A Struct as it may be written: with a short form, with keys that are no field's."""
    properties = part["properties"]
    if rest := getattr(kind.cls, "extra_field", None):
        values = properties.pop(rest)["additionalProperties"]
        names = getattr(kind.cls, "extra_keys", None)
        if names is None:
            part["additionalProperties"] = values
        else:
            properties |= dict.fromkeys(sorted(names), values)
    if implied := getattr(kind.cls, "implied_by", None):
        part["required"] = [one for one in part["required"] if one != kind.tag_field]
        part["required"] = sorted({*part["required"], implied})
    if short := getattr(kind.cls, "shorthand_field", None):
        return {"anyOf": [properties[short], part]}
    return part


def _expand_scalar_types(part: Any) -> Any:
    """Units, and references to the environment, in place of what they are read into."""
    match part:
        case {"x-unit": str(name), **more}:
            unit = SCALAR_TYPES[name]
            written: dict[str, Any] = {"anyOf": [unit.json_schema, _ENVIRONMENT_REF]}
            if more.get("default") is not None:
                written["default"] = unit.format_value(more["default"])
            return written
        case {"type": "integer"} | {"enum": _}:
            return {"anyOf": [part, _ENVIRONMENT_REF]}
        case {"$ref": _, "default": _}:
            return {"$ref": part["$ref"]}
        case Mapping():
            kept = {key: value for key, value in part.items() if key != "discriminator"}
            return {key: _convert_entry(key, value) for key, value in kept.items()}
        case list() | tuple():
            return [_expand_scalar_types(one) for one in part]
        case _:
            return part


def _convert_entry(key: str, value: Any) -> Any:
    match key, value:
        case "propertyNames", {"x-unit": str(name)}:
            return SCALAR_TYPES[name].json_schema
        case "description", str():
            return " ".join(value.split())
        case _:
            return _expand_scalar_types(value)
