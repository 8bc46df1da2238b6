"""The pages on fallbacks and shadows: their configurations load and do what the text says."""

import re
from pathlib import Path

from gateway.config.loader import load_text
from gateway.config.schema import Config

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


def load_documented_config(name: str) -> Config:
    page = (HOWTO / f"{name}.md").read_text("utf-8")
    [text] = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return load_text(text, f"{name}.yaml", env={})


def test_fallback_and_shadow_examples_are_loaded_as_documented() -> None:
    assert load_documented_config("fallbacks").models["chat"].fallback == ("1", "2", "small")

    shadow = load_documented_config("shadow-traffic").models["chat"].shadow
    assert shadow is not None
    assert (shadow.to, shadow.share, shadow.max_concurrency, shadow.timeout) == ("2", 0.05, 4, 60.0)
