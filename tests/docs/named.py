"""Tests that a page names as ``tests/FILE.py::test_name``, in backquotes."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w./]+\.py)::(\w+)`")


def parse_table(page: str, heading: str) -> Iterator[list[str]]:
    """Return the cells of the table under a heading."""
    _, table, below = page.partition(f"\n{heading}\n")
    assert table, heading
    rows = re.findall(r"^\| (.*) \|$", below.partition("\n## ")[0], re.MULTILINE)
    for row in rows[1:]:
        yield [cell.strip() for cell in row.split(" | ")]


def find_test_references(text: str) -> list[tuple[str, str]]:
    """Return file and name of each test named on a page."""
    return NAMED.findall(text)


@cache
def list_tests(file: str) -> frozenset[str]:
    """Return the tests in a file, none if it does not exist."""
    path = ROOT / file
    if not path.exists():
        return frozenset()
    body = ast.parse(path.read_text("utf-8")).body
    return frozenset(
        one.name
        for one in body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name.startswith("test_")
    )


def find_missing_tests(text: str) -> list[str]:
    """Return the named tests that do not exist."""
    return [
        f"{file}::{name}"
        for file, name in find_test_references(text)
        if name not in list_tests(file)
    ]
