"""The set fields of a request are those that differ from their defaults."""

import functools
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields, replace

from protocols.core.request import (
    SECTIONS,
    EmbeddingRequest,
    GenerationRequest,
    RegexFormat,
    Request,
    select_names,
)
from tests.support.examples import share_examples

ANYTHING: tuple[Any, ...] = (
    (),  # no field that is neither a tuple nor None has this value
    *(False, True, 0, 1.5, "", "word", ("word",), {}, {"word": "x"}, frozenset({"word"})),
)


@functools.cache
def read_fields(kind: type[Struct]) -> tuple[FieldInfo, ...]:
    return fields(kind)


def get_default_value(field: FieldInfo) -> Any:
    """Return a field's default, or None if the field is required."""
    if field.default_factory is not NODEFAULT:
        return field.default_factory()
    return None if field.default is NODEFAULT else field.default


def copy_value(value: Any) -> Any:
    """Return an equal value that is another object, where possible."""
    if isinstance(value, str):
        return str(value.encode(), "utf-8")
    return frozenset(set(value)) if isinstance(value, frozenset) else value


def create_value_strategy(field: FieldInfo) -> st.SearchStrategy[Any]:
    silent = get_default_value(field)
    quiet = st.builds(copy_value, st.just(silent))
    if field.name not in SECTIONS:
        anything = st.sampled_from(ANYTHING if silent in (None, ()) else ANYTHING[1:])
        return anything if field.required else quiet | anything
    strategy = st.builds(SECTIONS[field.name], **create_field_strategies(SECTIONS[field.name]))
    return strategy if silent is not None else quiet | strategy


def create_field_strategies(kind: type[Struct]) -> Mapping[str, st.SearchStrategy[Any]]:
    return {field.name: create_value_strategy(field) for field in read_fields(kind)}


requests = st.builds(GenerationRequest, **create_field_strategies(GenerationRequest)) | st.builds(
    EmbeddingRequest, **create_field_strategies(EmbeddingRequest)
)


def list_set_fields(request: Request) -> list[tuple[str, Any]]:
    """Return the fields that are neither None, nor an empty tuple, nor their default.

    A client that requests logprobs sets their number, even if it is zero.
    """
    paths = []
    for field in read_fields(type(request)):
        value = getattr(request, field.name)
        if field.name not in SECTIONS:
            paths.append((field.name, value, get_default_value(field)))
        elif value is not None:
            for own in read_fields(SECTIONS[field.name]):
                silent = () if field.name == "logprobs" else get_default_value(own)
                paths.append((f"{field.name}.{own.name}", getattr(value, own.name), silent))
    return [(path, one) for path, one, silent in paths if one not in (None, (), silent)]


@share_examples(3)
@given(requests)
def test_set_fields_are_those_that_differ_from_their_default(request: Request) -> None:
    assert [*request.set_fields.items()] == list_set_fields(request)


@share_examples(3)
@given(st.builds(GenerationRequest, **create_field_strategies(GenerationRequest)), st.booleans())
def test_without_fields_clears_only_echo_and_suffix(request: GenerationRequest, echo: bool) -> None:
    before = list_set_fields(request)

    changed = request.without_fields(echo=echo, suffix=True)

    assert changed == replace(request, echo=None if echo else request.echo, suffix=None)
    assert [*changed.set_fields.items()] == list_set_fields(changed)
    assert [*request.set_fields.items()] == before


named = {"model": st.text(max_size=3)}
decoded = st.builds(
    GenerationRequest, **{**create_field_strategies(GenerationRequest), **named}
) | st.builds(
    EmbeddingRequest,
    **{**create_field_strategies(EmbeddingRequest), **named, "stream": st.just(False)},
)


@share_examples(3)
@given(decoded, st.booleans())
def test_bind_target_changes_only_model_and_source(request: Request, has_task: bool) -> None:
    before = list_set_fields(request)
    if has_task:
        assert [*request.set_fields.items()] == before

    changed = request.bind_target("its", "openai")

    assert changed == replace(request, model="its", source="openai")
    assert [*changed.set_fields.items()] == list_set_fields(changed)


def test_a_request_for_a_target_has_its_context_length() -> None:
    request = GenerationRequest(model="m", kind="chat")
    before = dict(request.set_fields)

    bound = request.bind_target("its", "openai", 4096)

    assert bound == replace(request, model="its", source="openai", context_length=4096)
    assert dict(bound.set_fields) == before | {
        "model": "its",
        "source": "openai",
        "context_length": 4096,
    }
    assert bound.bind_target("its", "openai").context_length == 4096


def test_names_are_those_that_the_request_uses() -> None:
    names = {"output": "response_format", "tools": "tools"}
    request = GenerationRequest(model="m", kind="chat")
    assert select_names(request, names) == names

    guided = replace(request, output=RegexFormat("a"), provided_fields=frozenset({"guided_regex"}))
    assert select_names(guided, names) == {**names, "output": "guided_regex"}
    plain = replace(guided, provided_fields=frozenset({"response_format"}))
    assert select_names(plain, names) == names

    older = replace(request, legacy_functions=True)
    assert select_names(older, names)["tools"] == "functions"
