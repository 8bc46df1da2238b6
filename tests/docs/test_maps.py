"""The maps of the project have a row for every package, protocol and command."""

import re
from pathlib import Path
from typing import Final

import click

from gateway.cli import main
from protocols import PROTOCOLS
from tests.docs.named import ROOT

DOCS: Final = ROOT / "docs"
SERVES_NO_REQUEST: Final = "gateway/cli"
"""Its modules are listed as commands."""


def read_rows(page: Path) -> str:
    """Return the rows of all tables on a page."""
    return "\n".join(re.findall(r"^\|.*\|$", page.read_text("utf-8"), re.MULTILINE))


def list_packages(*tops: str) -> list[str]:
    """Return the packages directly below these."""
    return [
        path.parent.relative_to(ROOT).as_posix()
        for top in tops
        for path in sorted((ROOT / top).glob("*/__init__.py"))
    ]


def test_architecture_names_every_package() -> None:
    page = (DOCS / "architecture.md").read_text("utf-8")
    code = page.partition("## Packages")[2].partition("## The path")[0]

    missing = [
        one
        for one in list_packages("gateway", "backends", "protocols")
        if not re.search(rf"\b{one.rpartition('/')[2]}\b", code)
    ]

    assert missing == []


def test_where_is_has_a_row_for_every_package() -> None:
    rows = read_rows(DOCS / "maintainers" / "where-is.md")
    packages = list_packages("gateway", "backends", "protocols", "gateway/tools")
    assert [one for one in packages if f"`{one}/" not in rows and one != SERVES_NO_REQUEST] == []


def test_where_is_has_a_row_for_every_command() -> None:
    rows = read_rows(DOCS / "maintainers" / "where-is.md")
    commands = main.list_commands(click.Context(main))
    assert [name for name in commands if not re.search(rf"`(?:interlingua )?{name}\b", rows)] == []


def test_glossary_has_every_protocol() -> None:
    rows = read_rows(DOCS / "glossary.md")
    assert [name for name in PROTOCOLS if f"`{name}`" not in rows] == []
