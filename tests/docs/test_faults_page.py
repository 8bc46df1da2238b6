"""The page of faults: every number has its row, and every row its test, or why it has none."""

import re

from tests.docs.named import ROOT, find_missing_tests, find_test_references, parse_table

PAGE = (ROOT / "docs" / "faults.md").read_text("utf-8")
ROWS = {int(number): rest for number, *rest in parse_table(PAGE, "## Faults and behaviour")}
WITHOUT = re.compile(r"no test: \w.+")


def test_every_fault_has_a_table_row() -> None:
    assert list(ROWS) == list(range(1, 68))


def test_every_fault_row_names_existing_tests_or_a_reason() -> None:
    silent = [
        n
        for n, (*_, by) in ROWS.items()
        if not find_test_references(by) and not WITHOUT.fullmatch(by)
    ]
    assert (silent, find_missing_tests(PAGE)) == ([], [])


def test_every_tested_fault_names_its_tests() -> None:
    numbers = {
        int(number)
        for file in (ROOT / "tests" / "fault").glob("test_fault_*.py")
        for number in re.findall(r"(?<=_)\d\d(?=_)", file.name)
    }
    assert {n for n in numbers if not find_test_references(ROWS[n][-1])} == set()
