"""Every field of the configuration has a description, which is in the JSON Schema."""

from collections.abc import Iterator
from typing import Any

import msgspec.inspect
import pytest

from backends.torch.settings import TorchSettings
from gateway.config.descriptions import describe_fields, describe_section, list_sections
from gateway.config.jsonschema import build_schema
from gateway.config.schema import ApiKeyConfig, Config, EchoConfig, KeyRateLimitConfig
from protocols.core.units import ConfigSection

SECTIONS = [kind.cls for kind in list_sections()]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_has_a_description(section: type[ConfigSection]) -> None:
    descriptions = describe_fields(section)

    assert [name for name in section.__struct_fields__ if not descriptions.get(name)] == []
    assert [text for text in descriptions.values() if not text.endswith(".")] == []
    assert describe_section(section)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_default_is_a_value_that_the_field_may_have(section: type[ConfigSection]) -> None:
    kind = msgspec.inspect.type_info(section)
    assert isinstance(kind, msgspec.inspect.StructType)

    for field in kind.fields:
        kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else ()
        for one in (*kinds, field.type):
            if isinstance(one, msgspec.inspect.IntType) and isinstance(field.default, int):
                most = field.default if one.le is None else one.le
                least = field.default if one.ge is None else one.ge
                assert least <= field.default <= most, field.name


def test_sections_are_all_structs_below_the_configuration() -> None:
    assert SECTIONS[0] is Config
    assert len(SECTIONS) == len(set(SECTIONS)) >= 45
    assert {ApiKeyConfig, EchoConfig, TorchSettings} <= set(SECTIONS)


def test_inherited_fields_and_the_tag_are_described() -> None:
    assert describe_fields(KeyRateLimitConfig)["requests"] == "Requests per period."
    assert describe_fields(EchoConfig)["kind"].startswith("The kind of backend")


def test_code_in_descriptions_has_single_backquotes() -> None:
    assert describe_fields(ApiKeyConfig)["limits"].endswith("replace `defaults.limits` entirely.")
    assert (
        "`x-interlingua-protocol` names" in build_schema()["$defs"]["ListenerConfig"]["description"]
    )


def list_properties(definition: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for part in definition.get("anyOf", [definition]):
        yield from part.get("properties", {}).items()


def test_every_property_of_the_json_schema_has_a_description() -> None:
    definitions = build_schema()["$defs"]
    structs = {section.__name__: section for section in SECTIONS}

    assert definitions.keys() == structs.keys() | {"Environment"}

    for name, section in structs.items():
        properties = dict(list_properties(definitions[name]))
        assert properties
        descriptions = describe_fields(section)
        for field, part in properties.items():
            assert part["description"] == descriptions.get(field, descriptions.get("options"))


def test_every_definition_of_the_json_schema_has_a_title() -> None:
    for definition in build_schema()["$defs"].values():
        assert definition.get("anyOf", [definition])[-1]["title"]
