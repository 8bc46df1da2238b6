"""The error texts that the troubleshooting page quotes are those of the product."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.docs.named import ROOT, parse_table

PAGE: Final = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
QUOTED: Final = [
    text
    for row in parse_table(PAGE, "## Find an error text")
    for text in re.findall(r"`([^`]+)`", row[0])
]


@pytest.fixture(scope="module")
def source() -> str:
    """The product's source, with adjacent string literals joined."""
    files = [
        file
        for package in ("gateway", "backends", "protocols")
        for file in sorted(Path(ROOT / package).rglob("*.py"))
    ]
    text = "\n".join(file.read_text("utf-8") for file in files)
    return re.sub(r"\"\s+f?\"", "", text)


def test_page_quotes_error_texts() -> None:
    assert len(QUOTED) >= 10


@pytest.mark.parametrize("text", QUOTED)
def test_quoted_error_text_is_in_the_source(text: str, source: str) -> None:
    for part in text.split("…"):
        assert part.strip() in source
