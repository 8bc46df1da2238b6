"""The JSON Schema accepts and rejects what the loader does."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gateway.config import schema
from gateway.config.jsonschema import build_schema, schema_hook
from gateway.config.schema import Config
from protocols.core.units import ConfigSection

GOLDEN = Path(__file__).parents[3] / "golden" / "config"
OLD_READING = {"yaml_1_2"}  # this test's parser reads YAML 1.1, where the keys are booleans
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def is_valid(value: Any, part: dict[str, Any], root: dict[str, Any]) -> bool:
    """Validate with the JSON Schema keywords that our schema uses."""
    if "$ref" in part:
        return is_valid(value, root["$defs"][part["$ref"].rpartition("/")[2]], root)
    if "anyOf" in part and not any(is_valid(value, one, root) for one in part["anyOf"]):
        return False
    if "enum" in part and value not in part["enum"]:
        return False
    kind = part.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (kind != "boolean" and value is True)):
        return False
    match value:
        case str():
            match = re.search(part.get("pattern", ""), value)
            return match is not None and len(value) >= int(part.get("minLength", 0))
        case list():
            enough = len(value) >= int(part.get("minItems", 0))
            return enough and all(is_valid(one, part.get("items", {}), root) for one in value)
        case dict():
            return is_valid_object(value, part, root)
        case int() | float():
            return float(part.get("minimum", value)) <= value <= float(part.get("maximum", value))
        case _:
            return True


def is_valid_object(value: dict[str, Any], part: dict[str, Any], root: dict[str, Any]) -> bool:
    if not set(part.get("required", ())) <= value.keys():
        return False
    for key, one in value.items():
        rest = part.get("additionalProperties", {})
        for pattern, other in part.get("patternProperties", {}).items():
            rest = other if re.search(pattern, key) else rest
        expected = part.get("properties", {}).get(key, rest)
        if expected is False or not is_valid(one, expected, root):
            return False
        if not is_valid(key, part.get("propertyNames", {}), root):
            return False
    return len(value) >= int(part.get("minProperties", 0))


def load_document(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(GOLDEN.glob("good/*.yaml")) if path.stem not in OLD_READING],
    ids=lambda path: path.stem,
)
def test_json_schema_accepts_every_valid_configuration(path: Path) -> None:
    assert is_valid(load_document(path), build_schema(), build_schema())


@pytest.mark.parametrize(
    "name",
    [
        *("unknown_keys", "nothing_required", "durations", "sizes", "wrong_types", "missing_keys"),
        *("ranges", "names", "keys", "empty_lists", "keys_of_another_kind", "numbers_for_texts"),
    ],
)
def test_json_schema_rejects_configurations_of_wrong_shape(name: str) -> None:
    assert not is_valid(
        load_document(GOLDEN / "wrong" / f"{name}.yaml"), build_schema(), build_schema()
    )


def test_every_struct_field_is_a_json_schema_property() -> None:
    definitions = build_schema()["$defs"]
    structs = [
        one
        for one in vars(schema).values()
        if isinstance(one, type) and issubclass(one, ConfigSection) and one.__name__ in definitions
    ]

    assert Config in structs
    assert len(structs) >= 24

    for struct in structs:
        part = definitions[struct.__name__]
        part = part if "properties" in part else part["anyOf"][-1]
        fields = {field.name for field in msgspec.structs.fields(struct)}
        fields.discard(getattr(struct, "extra_field", ""))
        extra: frozenset[str] = getattr(struct, "extra_keys", frozenset())
        tag = {struct.__struct_config__.tag_field} - {None}
        assert part["properties"].keys() == fields | extra | tag
        assert part["description"] == " ".join((struct.__doc__ or "").replace("``", "`").split())


def test_json_schema_has_no_internal_keys() -> None:
    text = msgspec.json.encode(build_schema()).decode()
    assert "x-unit" not in text
    assert '"default":"16KiB"' in text
    assert '"default":"1m"' in text


def test_type_without_a_json_schema_raises_not_implemented_error() -> None:
    with pytest.raises(NotImplementedError):
        schema_hook(complex)
