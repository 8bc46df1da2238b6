"""The pages on fallbacks and shadows: what they show is taken for what they say."""

import re
from pathlib import Path

from gateway.config.loader import load_text
from gateway.config.schema import Config

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


def shown(name: str) -> Config:
    page = (HOWTO / f"{name}.md").read_text("utf-8")
    [text] = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return load_text(text, f"{name}.yaml", env={})


def test_what_the_pages_show_is_taken() -> None:
    assert shown("fallbacks").models["chat"].fallback == ("1", "2", "small")
    shadow = shown("shadow-traffic").models["chat"].shadow
    assert shadow is not None
    assert (shadow.to, shadow.share, shadow.max_concurrency, shadow.timeout) == ("2", 0.05, 4, 60.0)
