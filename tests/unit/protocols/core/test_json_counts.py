"""The objects and values of a body are counted before it is decoded."""

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core.errors import RequestTooLarge, WorkerFailed
from protocols.core.json_counts import BodyCounts, ResponseCounts

COUNTS = BodyCounts(objects=10, values=20)


def check(body: bytes, counts: BodyCounts = COUNTS) -> str | None:
    """Return the setting that rejects the body."""
    try:
        counts.check((body,))
    except RequestTooLarge as error:
        return "body_objects" if "`limits.body_objects`" in error.message else "body_values"
    return None


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (b"{" * 10, None),
        (b"{" * 11, "body_objects"),
        (b"[" + b"0," * 18 + b"0]", None),
        (b"[" + b"0," * 19 + b"0]", "body_values"),
        (b"[" * 21, "body_values"),
        (b'"' + b"{," * 99 + b'"', None),
        (rb'["\"' + b"{," * 99 + rb"\\\"" + b"{," * 99 + b'"]', None),
        (rb'["a\\"' + b",{}" * 11 + b"]", "body_objects"),
        (b'["' + b"{," * 99 + b'"' + b",0" * 20 + b"]", "body_values"),
    ],
)
def test_structure_is_counted_and_text_is_not(body: bytes, refused: str | None) -> None:
    assert check(body) == refused


def count_values(value: Any) -> tuple[int, int]:
    """Count the objects of a decoded value, and its arrays and commas."""
    if not isinstance(value, list | dict):
        return 0, 0
    items = list(value.values()) if isinstance(value, dict) else value
    counts = [count_values(item) for item in items]
    objects = isinstance(value, dict) + sum(one for one, _ in counts)
    values = isinstance(value, list) + max(len(items) - 1, 0) + sum(one for _, one in counts)
    return objects, values


def test_strings_are_left_out_across_slices() -> None:
    """Counts of a body scanned in slices equal those of the entire body."""
    body = b"[" + b",".join([b'"{,\\""', b"{}"] * 100_000) + b"]"

    assert check(body, BodyCounts(objects=100_000, values=200_001)) is None
    assert check(body, BodyCounts(objects=99_999, values=200_001)) == "body_objects"
    assert check(body, BodyCounts(objects=100_000, values=200_000)) == "body_values"


@given(
    st.recursive(
        st.text('a{}[],"\\\u00e9', max_size=6) | st.integers() | st.none(),
        lambda inner: (
            st.lists(inner, max_size=6)
            | st.dictionaries(st.text('{,"\\', max_size=4), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_counts_are_those_of_the_decoded_body(value: Any) -> None:
    objects, values = count_values(value)
    for body in (json.dumps(value).encode(), msgspec.json.encode(value)):
        limits = BodyCounts(objects=max(objects, 1), values=values + 1)
        assert check(body, limits) is None
        if objects:
            assert check(body, BodyCounts(objects=objects - 1, values=values + 1)) is not None
        assert check(body, BodyCounts(objects=objects, values=values)) is not None


def test_references_count_as_often_as_they_are_named() -> None:
    COUNTS.check((b"{}",), [(b"{}", 9)])
    with pytest.raises(RequestTooLarge, match="11 objects"):
        COUNTS.check((b"{}",), [(b"{}", 10)])


def test_pieces_are_scanned_as_one_text() -> None:
    """A string that begins in one piece and ends in another holds no structure."""
    COUNTS.check((b'["', b"{" * 11, b'"]'))
    with pytest.raises(RequestTooLarge, match="11 objects"):
        COUNTS.check((b"[", b"{" * 11, b"]"))


def test_error_of_a_response_names_the_setting() -> None:
    with pytest.raises(WorkerFailed, match="the worker's response has 2 objects; `max_response_"):
        ResponseCounts(objects=1).check((b"[{},{}]",))


def test_small_bodies_are_not_scanned() -> None:
    assert not BodyCounts(objects=1, values=1).needs_check(64 << 10)
    assert BodyCounts(objects=1, values=1).needs_check(65 << 10)
    assert not BodyCounts(objects=50_000, values=1 << 20).needs_check(140 << 10)


def test_estimated_size_is_that_of_objects_and_values_and_not_of_strings() -> None:
    counts = BodyCounts(objects=100, values=1000)
    objects, text = json.dumps([{"a": 1}] * 50).encode(), json.dumps("{,[" * 1000).encode()

    decoded = [{"a": 1.5} for _ in range(50)]
    taken = sum(sys.getsizeof(one) + sys.getsizeof(1.5) for one in decoded)

    assert counts.estimate_size(objects) >= taken
    assert counts.estimate_size(text) == 0


def test_size_of_too_many_values_is_not_estimated() -> None:
    with pytest.raises(WorkerFailed, match="max_response_values"):
        ResponseCounts(values=10).estimate_size(b"[" + b"0," * 10 + b"0]")
