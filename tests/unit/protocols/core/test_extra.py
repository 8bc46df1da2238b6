"""Which unknown values are a loss: those that say more than their absence."""

from typing import Any

import pytest

from protocols.core.extra import has_content, list_paths


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

    assert list(list_paths("response", values)) == ["response.odd"]
