"""Unknown values are a loss if they differ from an absent value."""

from typing import Any

import pytest

from protocols.core.extra import find_unknown_keys, has_content, list_paths, write_extra_fields


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, False),
        ([], False),
        (0, False),
        (False, True),
        ({}, True),
        ({"a": 0, "b": {"c": None}}, False),
        ({"a": 1}, True),
        ({"a": 0, "b": False}, True),
    ],
)
def test_objects_of_zero_counts_say_nothing(value: Any, expected: bool) -> None:
    assert has_content(value) is expected


def test_values_of_every_response_are_no_loss() -> None:
    values: dict[tuple[str, ...], Any] = {
        ("caller",): {"type": "direct"},
        ("inference_geo",): "global",
        ("odd",): 1,
    }

    assert list(list_paths("response", values.items())) == ["response.odd"]


@pytest.mark.parametrize(
    ("word", "is_unknown"),
    [("function", False), (None, False), ("later", True), (5, True), ({"a": 1}, True)],
)
def test_a_key_with_an_unknown_word_is_unknown(word: Any, is_unknown: bool) -> None:
    keys = {"type": frozenset({"function"})}

    assert bool(find_unknown_keys({"type": word}, keys)) is is_unknown


def test_an_unknown_word_replaces_the_known_one_and_other_values_stay() -> None:
    written: dict[str, Any] = {"type": "function", "index": 1, "name": None}

    write_extra_fields(written, {("type",): "later", ("index",): "odd", ("name",): "f"})

    assert written == {"type": "later", "index": 1, "name": "f"}
