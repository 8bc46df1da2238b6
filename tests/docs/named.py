"""Tests that a page names: ``tests/FILE.py::test_name``, each in backquotes."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w./]+\.py)::(\w+)`")


def parse_table(page: str, heading: str) -> Iterator[list[str]]:
    """The cells of the rows of the table that is under a heading."""
    _, table, below = page.partition(f"\n{heading}\n")
    assert table, heading
    rows = re.findall(r"^\| (.*) \|$", below.partition("\n## ")[0], re.MULTILINE)
    for row in rows[1:]:
        yield [cell.strip() for cell in row.split(" | ")]


def find_test_references(text: str) -> list[tuple[str, str]]:
    """The file and the name of each test that is named."""
    return NAMED.findall(text)


@cache
def list_tests(file: str) -> frozenset[str]:
    """The tests that a file holds; none where there is no such file."""
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
    """Those that are named and are not there."""
    return [
        f"{file}::{name}"
        for file, name in find_test_references(text)
        if name not in list_tests(file)
    ]
