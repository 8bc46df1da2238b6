"""The judge of openai-python's own suite: it must see a new failure, and one that is gone."""

import pytest

from tests.clients.suite import LIST, compare, expected

NAMES = expected("# reasons\na.py::*::test_gone[*]\n\nb.py::test_x[strict]  # why\n")
AS_LISTED = {
    "a.py::A::test_gone[loose]": False,
    "a.py::A::test_gone[strict]": False,
    "b.py::test_x[strict]": False,
    "b.py::test_x[loose]": True,
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"b.py::test_x[loose]": False}, ["b.py::test_x[loose]"]),
        (
            {"a.py::A::test_gone[loose]": True},
            ["a.py::A::test_gone[loose] passes: take it off the list"],
        ),
    ],
    ids=["as listed", "a new failure", "a failure that is gone"],
)
def test_what_is_not_as_listed(change: dict[str, bool], told: list[str]) -> None:
    assert compare(AS_LISTED | change, NAMES) == told


def test_a_name_without_a_test() -> None:
    assert compare({"b.py::test_x[loose]": True}, ["c.py::test_y[*]"]) == [
        "c.py::test_y[*] is listed, and there is no such test"
    ]


def test_every_failure_that_is_expected_has_its_reason() -> None:
    _, *paragraphs = LIST.read_text("utf-8").strip().split("\n\n")

    assert all(paragraph.startswith("# ") for paragraph in paragraphs)
    assert sum(len(expected(paragraph)) for paragraph in paragraphs) == len(
        expected(LIST.read_text("utf-8"))
    )
