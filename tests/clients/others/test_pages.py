"""The blocks of pages that need clients with an environment of their own."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/howto/langchain.md"
BLOCKS = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_of_the_page_runs(gateway: str, key: str, number: int) -> None:
    block = BLOCKS[number].replace("http://127.0.0.1:8000", gateway).replace("sk-any", key)

    exec(compile(block, f"{PAGE}:{number}", "exec"), {})  # noqa: S102 - it is our own page
