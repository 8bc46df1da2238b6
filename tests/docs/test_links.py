"""Links, file names and the index of decisions in the documentation are correct."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS: Final = "backends|deploy|docs|gateway|protocols|tests"
BLOCK: Final = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
FILE_NAME: Final = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")
HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)
DECISIONS: Final = ROOT / "docs" / "adr"


def read_text(page: Path) -> str:
    """The page without its code blocks."""
    return BLOCK.sub("", page.read_text("utf-8"))


def list_anchors(page: Path) -> Iterator[str]:
    """The anchors of a page's headings, as MkDocs and GitHub build them."""
    for heading in HEADING.findall(read_text(page)):
        yield re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_file_names_exist(page: Path) -> None:
    text = read_text(page)
    missing = [name for name in FILE_NAME.findall(text) if not (ROOT / name).exists()]

    for link, anchor in LINK.findall(text):
        target = (page.parent / link).resolve() if link else page
        if not target.exists() or (anchor and anchor not in list_anchors(target)):
            missing.append(f"{link}#{anchor}")

    assert missing == []


def test_the_index_lists_every_decision_once() -> None:
    decisions = sorted(DECISIONS.glob("0*.md"))
    index = (DECISIONS / "index.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(\d{4})\]\((.+)\) \| (.+) \|$", index, re.MULTILINE)

    expected = []
    for number, decision in enumerate(decisions, 1):
        title = decision.read_text("utf-8").partition("\n")[0]
        prefix = f"# ADR {number:04}: "
        assert title.startswith(prefix), decision.name
        expected.append((f"{number:04}", decision.name, title.removeprefix(prefix)))

    assert rows == expected
