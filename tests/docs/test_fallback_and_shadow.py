"""The pages on fallbacks and shadows: what they show is taken, and does what they say."""

import re
from pathlib import Path

import pytest

from gateway.config import Config, load
from tests.docs.pages import check

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


def shown(name: str) -> tuple[str, Config]:
    page = (HOWTO / f"{name}.md").read_text("utf-8")
    [text] = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return page, load(text, f"{name}.yaml", env={})


@pytest.mark.parametrize("name", ["fallback", "shadow"])
def test_a_page_does_what_it_says(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    page, _ = shown(name)
    check(page, folder)


def test_what_the_pages_show_is_taken() -> None:
    _, config = shown("fallback")
    assert config.models["chat"].fallback == ("1", "2", "small")
    _, config = shown("shadow")
    shadow = config.models["chat"].shadow
    assert shadow is not None
    assert (shadow.to, shadow.share, shadow.max_concurrent, shadow.timeout) == ("2", 0.05, 4, 60.0)
