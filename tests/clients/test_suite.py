"""The check of openai-python's suite reports a new failure, and a listed one that passes."""

import pytest

from tests.clients.suite import LIST, find_deviations, parse_expected_failures

NAMES = parse_expected_failures("# reasons\na.py::*::test_gone[*]\n\nb.py::test_x[strict]  # why\n")
AS_LISTED = {
    "a.py::A::test_gone[loose]": False,
    "a.py::A::test_gone[strict]": False,
    "b.py::test_x[strict]": False,
    "b.py::test_x[loose]": True,
}


@pytest.mark.parametrize(
    ("change", "expected"),
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
def test_suite_reports_deviations_from_the_expected_failures(
    change: dict[str, bool], expected: list[str]
) -> None:
    assert find_deviations(AS_LISTED | change, NAMES) == expected


def test_expected_failure_without_a_test_is_reported() -> None:
    assert find_deviations({"b.py::test_x[loose]": True}, ["c.py::test_y[*]"]) == [
        "c.py::test_y[*] is listed, and there is no such test"
    ]


def test_every_expected_failure_has_a_reason() -> None:
    _, *paragraphs = LIST.read_text("utf-8").strip().split("\n\n")

    assert all(paragraph.startswith("# ") for paragraph in paragraphs)
    assert sum(len(parse_expected_failures(paragraph)) for paragraph in paragraphs) == len(
        parse_expected_failures(LIST.read_text("utf-8"))
    )
