"""The JSON Schema of the configuration, built from the Structs, for editors."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect as types

from gateway.config.descriptions import describe_fields, describe_section, list_sections
from gateway.config.schema import Config
from protocols.core.units import SCALAR_TYPES, Secret

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_ID = "urn:interlingua:configuration:1"
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
    "description": "The value of an environment variable, which is checked when it is expanded.",
    "type": "string",
    "pattern": r"\$\{.+\}",
}
_ENVIRONMENT_REF = {"$ref": "#/$defs/Environment"}


def build_schema() -> dict[str, Any]:
    """The schema of the whole file."""
    schema = msgspec.json.schema(Config, schema_hook=schema_hook)
    sections = {kind.cls.__name__: kind for kind in list_sections()}
    schema["$defs"] = {
        name: _describe_input_forms(definition, sections[name])
        for name, definition in schema["$defs"].items()
    }
    schema["$defs"]["Config"]["patternProperties"] = {"^x-": {}}
    schema = _expand_scalar_types(schema)
    for name, section in sections.items():
        _add_descriptions(schema["$defs"][name], section)
    schema["$defs"]["Environment"] = _ENVIRONMENT_SCHEMA
    return {"$schema": _DRAFT, "$id": _ID, "title": "Interlingua configuration", **schema}


def schema_hook(kind: type) -> dict[str, Any]:
    """The schema of ``Secret``, which msgspec does not know."""
    if kind is Secret:
        return dict(_SECRET_SCHEMA)
    raise NotImplementedError


def _describe_input_forms(definition: dict[str, Any], kind: types.StructType) -> dict[str, Any]:
    """The schema of a Struct as it may be written: with its shorthand and extra keys."""
    properties = definition["properties"]
    if extra_field := getattr(kind.cls, "extra_field", None):
        values = properties.pop(extra_field)["additionalProperties"]
        names = getattr(kind.cls, "extra_keys", None)
        if names is None:
            definition["additionalProperties"] = values
        else:
            properties |= dict.fromkeys(sorted(names), values)
    if implied := getattr(kind.cls, "implied_by", None):
        definition["required"] = [one for one in definition["required"] if one != kind.tag_field]
        definition["required"] = sorted({*definition["required"], implied})
    if shorthand := getattr(kind.cls, "shorthand_field", None):
        names = (shorthand, getattr(kind.cls, "shorthand_url_field", shorthand))
        return {"anyOf": [*(properties[name] for name in dict.fromkeys(names)), definition]}
    return definition


def _add_descriptions(definition: dict[str, Any], kind: types.StructType) -> None:
    """Set the descriptions of a Struct's schema, and of each of its properties."""
    definition = definition if "properties" in definition else definition["anyOf"][-1]
    definition["description"] = " ".join(describe_section(kind.cls).split())
    descriptions = describe_fields(kind.cls)
    for name, part in definition["properties"].items():
        field = name if name in descriptions else kind.cls.extra_field  # type: ignore[attr-defined]
        part["description"] = descriptions[field]


def _expand_scalar_types(schema_part: Any) -> Any:
    """Replace the types of decoded values by the forms in which they are written."""
    match schema_part:
        case {"x-unit": str(name), **more}:
            unit = SCALAR_TYPES[name]
            schema: dict[str, Any] = {"anyOf": [unit.json_schema, _ENVIRONMENT_REF]}
            if more.get("default") is not None:
                schema["default"] = unit.format_value(more["default"])
            return schema
        case {"type": "integer"} | {"enum": _}:
            return {"anyOf": [schema_part, _ENVIRONMENT_REF]}
        case {"$ref": _, "default": _}:
            return {"$ref": schema_part["$ref"]}
        case Mapping():
            entries = {key: value for key, value in schema_part.items() if key != "discriminator"}
            return {key: _convert_entry(key, value) for key, value in entries.items()}
        case list() | tuple():
            return [_expand_scalar_types(one) for one in schema_part]
        case _:
            return schema_part


def _convert_entry(key: str, value: Any) -> Any:
    match key, value:
        case "propertyNames", {"x-unit": str(name)}:
            return SCALAR_TYPES[name].json_schema
        case _:
            return _expand_scalar_types(value)
