"""What a request says, however it is found, is what plainly differs from silence."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields, replace

from protocols.core.request import SECTIONS, EmbeddingRequest, GenerationRequest, Request

ANYTHING: tuple[Any, ...] = (
    (),  # of those that are no tuples and never None, none is ever one
    *(False, True, 0, 1.5, "", "word", ("word",), {}, {"word": "x"}, frozenset({"word"})),
)


def silence(field: FieldInfo) -> Any:
    """What a field is for a client that says nothing of it; None of one that is always said."""
    if field.default_factory is not NODEFAULT:
        return field.default_factory()
    return None if field.default is NODEFAULT else field.default


def again(value: Any) -> Any:
    """The same value, in another object where there can be one."""
    if isinstance(value, str):
        return str(value.encode(), "utf-8")
    return frozenset(set(value)) if isinstance(value, frozenset) else value


def values(field: FieldInfo) -> st.SearchStrategy[Any]:
    silent = silence(field)
    quiet = st.builds(again, st.just(silent))
    if field.name not in SECTIONS:
        anything = st.sampled_from(ANYTHING if silent in (None, ()) else ANYTHING[1:])
        return anything if field.required else quiet | anything
    told = st.builds(SECTIONS[field.name], **of(SECTIONS[field.name]))
    return told if silent is not None else quiet | told


def of(kind: type[Struct]) -> Mapping[str, st.SearchStrategy[Any]]:
    return {field.name: values(field) for field in fields(kind)}


requests = st.builds(GenerationRequest, **of(GenerationRequest)) | st.builds(
    EmbeddingRequest, **of(EmbeddingRequest)
)


def plainly(request: Request) -> list[tuple[str, Any]]:
    """The definition: neither None, nor an empty tuple, nor as silence is.

    A client that asks for logprobs says how many, even if they are none.
    """
    found = []
    for field in fields(request):
        value = getattr(request, field.name)
        if field.name not in SECTIONS:
            found.append((field.name, value, silence(field)))
        elif value is not None:
            for own in fields(value):
                silent = () if field.name == "logprobs" else silence(own)
                found.append((f"{field.name}.{own.name}", getattr(value, own.name), silent))
    return [(path, one) for path, one, silent in found if one not in (None, (), silent)]


@given(requests)
def test_what_is_said_is_what_plainly_differs_from_silence(request: Request) -> None:
    assert [*request.set_fields.items()] == plainly(request)


@given(st.builds(GenerationRequest, **of(GenerationRequest)), st.booleans())
def test_a_request_without_fields_says_all_else(request: GenerationRequest, echo: bool) -> None:
    before = plainly(request)

    got = request.without_fields(echo=echo, suffix=True)

    assert got == replace(request, echo=None if echo else request.echo, suffix=None)
    assert [*got.set_fields.items()] == plainly(got)
    assert [*request.set_fields.items()] == before


named = {"model": st.text(max_size=3)}
decoded = st.builds(GenerationRequest, **{**of(GenerationRequest), **named}) | st.builds(
    EmbeddingRequest, **{**of(EmbeddingRequest), **named, "stream": st.just(False)}
)


@given(decoded, st.booleans())
def test_a_request_for_a_target_says_the_same_of_all_else(request: Request, asked: bool) -> None:
    before = plainly(request)
    if asked:
        assert [*request.set_fields.items()] == before

    got = request.bind_target("its", "openai")

    assert got == replace(request, model="its", source="openai")
    assert [*got.set_fields.items()] == plainly(got)


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
