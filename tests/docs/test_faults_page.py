"""The page of faults: every number has its row, and every row its test, or why it has none."""

import re

from tests.docs.named import ROOT, gone, table, told

PAGE = (ROOT / "docs" / "faults.md").read_text("utf-8")
ROWS = {int(number): rest for number, *rest in table(PAGE, "## Faults and behaviour")}
WITHOUT = re.compile(r"no test: \w.+")


def test_every_fault_has_its_row() -> None:
    assert list(ROWS) == list(range(1, 67))


def test_every_row_names_tests_that_there_are_or_says_why_there_is_none() -> None:
    silent = [n for n, (*_, by) in ROWS.items() if not told(by) and not WITHOUT.fullmatch(by)]
    assert (silent, gone(PAGE)) == ([], [])


def test_what_is_tested_is_not_said_to_be_without() -> None:
    numbers = {
        int(number)
        for file in (ROOT / "tests" / "fault").glob("test_fault_*.py")
        for number in re.findall(r"(?<=_)\d\d(?=_)", file.name)
    }
    assert {n for n in numbers if not told(ROWS[n][-1])} == set()
