"""No JSON text is decoded that is nested deeper than one limit, which no interpreter sets."""

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from protocols.core import json_text
from protocols.core.json_text import (
    MAX_DEPTH,
    JsonDecoder,
    JsonTooDeep,
    check_depth,
    count_rare,
    decode_all_fields,
    decode_json,
    decode_pairs,
)

ARRAYS = (b"[", b"]")
OBJECTS = (b'{"a":', b"}")
PADDING = b" " * 999


def nest(depth: int, *containers: tuple[bytes, bytes], inner: bytes = b"1") -> bytes:
    """Return JSON of so many nested containers, of one kind after the other."""
    chosen = [containers[i % len(containers)] for i in range(depth)]
    return b"".join([start for start, _ in chosen]) + inner + b"".join(
        [end for _, end in reversed(chosen)]
    )  # fmt: skip


def test_all_fields_are_decoded_in_their_order_also_of_repeated_names() -> None:
    fields = decode_all_fields(b'{"a": 1, "b": [2], "\\u0061": {"c": 3}}')

    assert [(name, bytes(raw)) for name, raw in fields] == [
        ("a", b"1"), ("b", b"[2]"), ("a", b'{"c": 3}')
    ]  # fmt: skip


@pytest.mark.parametrize("containers", [(ARRAYS,), (OBJECTS,), (ARRAYS, OBJECTS)])
@pytest.mark.parametrize("padding", [b"", PADDING])
def test_limit_of_depth_is_exact(containers: Any, padding: bytes) -> None:
    allowed = nest(MAX_DEPTH, *containers) + padding
    refused = nest(MAX_DEPTH + 1, *containers) + padding

    assert decode_json(allowed) == json.loads(allowed)
    assert decode_json(allowed.decode()) == json.loads(allowed)
    for text in (refused, bytearray(refused), refused.decode()):
        with pytest.raises(JsonTooDeep, match="more than 128 levels"):
            decode_json(text)
        with pytest.raises(JsonTooDeep, match="more than 128 levels"):
            JsonDecoder(dict[str, Raw] | list[Raw]).decode(text)


@pytest.mark.parametrize("kind", [str, bool | None, Annotated[float, msgspec.Meta(ge=0)]])
def test_decoder_of_a_scalar_refuses_the_first_bracket(kind: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match="got `array`"):
        JsonDecoder(kind).decode(nest(100_000, ARRAYS))


@pytest.fixture
def high_recursion_limit() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before * 20)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("high_recursion_limit")
def test_limit_does_not_depend_on_the_recursion_limit() -> None:
    assert decode_json(nest(MAX_DEPTH, ARRAYS))
    with pytest.raises(JsonTooDeep):
        decode_json(nest(MAX_DEPTH + 1, ARRAYS))


def test_brackets_in_strings_and_those_beside_each_other_are_not_depth() -> None:
    text = rb'{"\"[[":"' + b"[{" * 999 + rb'\\","b":[' + b"[],{}," * 999 + b"0]}"

    assert decode_json(text) == json.loads(text)
    assert decode_json(text.decode()) == json.loads(text)


def test_string_that_is_no_unicode_is_no_error_of_depth() -> None:
    check_depth('["\ud800' + "[" * 999 + '"]')


@pytest.mark.parametrize("end", [b"", b"]" * 5, b"}" * 999, b'"'])
def test_text_that_is_not_json_is_refused_for_what_precedes_the_mistake(end: bytes) -> None:
    with pytest.raises(JsonTooDeep):
        decode_json(b"[" * 100_000 + end)
    with pytest.raises(msgspec.DecodeError) as excinfo:
        decode_json(b"[" * 100 + b"]}" * 500 + end)
    assert not isinstance(excinfo.value, JsonTooDeep)


def test_deep_raw_that_is_part_of_no_text_raises_the_same_error() -> None:
    with pytest.raises(JsonTooDeep):
        decode_json(Raw(b"[" * 100_000))


values = st.recursive(
    st.text('a{}[]"\\\u00e9', max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('[{"\\', max_size=4), inner, max_size=4)
    ),
    max_leaves=10,
)


def measure_depth(value: Any) -> int:
    """Return the depth of a decoded value."""
    if not isinstance(value, list | dict):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(map(measure_depth, items), default=0)


@given(
    value=values,
    count=st.sampled_from([1, 2, 50]),
    indent=st.sampled_from([None, 1]),
    size=st.integers(1, 40) | st.just(1 << 16),
)
def test_depth_is_that_of_the_decoded_value(
    value: Any, count: int, indent: int | None, size: int
) -> None:
    """The depth of any value, and of many side by side, is measured exactly, in any slices."""
    text = json.dumps([value] * count, indent=indent).encode()
    outer = MAX_DEPTH - measure_depth([value])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_SLICE", size)
        check_depth(nest(outer, ARRAYS, inner=text) + PADDING)
        with pytest.raises(JsonTooDeep):
            check_depth(nest(outer + 1, ARRAYS, inner=text) + PADDING)


def test_no_step_looks_at_more_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between slices other threads may run: no slice has more bytes, whatever the text has."""
    monkeypatch.setattr(json_text, "_SLICE", 100)

    slices = list(json_text.remove_strings(b'[["a"]],' * 10_000, b"[]"))

    assert max(map(len, slices)) <= 100
    assert b"".join(slices) == b"[[]]" * 10_000


@given(st.lists(st.tuples(st.sampled_from("[{,a"), st.integers(1, 5_000)), max_size=8))
def test_rare_characters_are_counted_across_all_steps(runs: list[tuple[str, int]]) -> None:
    text = "".join(character * length for character, length in runs)

    assert count_rare(text, "[") == text.count("[")
    assert count_rare(text.encode(), b",") == text.count(",")


def test_names_that_stand_twice_are_decoded_as_pairs() -> None:
    assert decode_pairs(b'{"a": [{}], "a": 1}') == (("a", [()]), ("a", 1))
    with pytest.raises(JsonTooDeep):
        decode_pairs(nest(MAX_DEPTH + 1, ARRAYS))
