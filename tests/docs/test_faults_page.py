"""The page on faults: every number has a row, and every row a test or the reason for none."""

import ast
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


def list_marked_tests() -> set[tuple[int, str]]:
    """Return each test with ``@pytest.mark.fault`` under tests/fault, by number."""
    return {
        (int(ast.literal_eval(number)), f"{file.relative_to(ROOT).as_posix()}::{function.name}")
        for file in (ROOT / "tests" / "fault").glob("test_*.py")
        for function in ast.parse(file.read_text("utf-8")).body
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for mark in function.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault"
        for number in mark.args
    }


def test_every_marked_fault_has_a_row_that_names_tests() -> None:
    numbers = {number for number, _ in list_marked_tests()}
    assert len(numbers) > 40
    assert {n for n in numbers if not find_test_references(ROWS[n][-1])} == set()


def test_tests_that_a_row_names_are_marked_with_its_number() -> None:
    named = {
        (number, f"{file}::{name}")
        for number, (*_, tests) in ROWS.items()
        for file, name in find_test_references(tests)
        if file.startswith("tests/fault/")
    }
    missing = sorted(named - list_marked_tests())

    assert missing == []
