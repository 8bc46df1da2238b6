"""The page on explaining requests: what it shows is what is printed."""

from pathlib import Path

from tests.docs.pages import check

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "explain.md"


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    folder = tmp_path / "explain"
    folder.mkdir()
    check(PAGE.read_text("utf-8"), folder)
