"""Code blocks of documentation pages that need clients in an environment of their own."""

import re
from pathlib import Path

import pytest

HOWTO = Path(__file__).parents[3] / "docs/howto"
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in ("langchain", "llama-index")
    for number, block in enumerate(
        re.findall(
            r"^```py\n(.*?)^```$",
            (HOWTO / f"{name}.md").read_text("utf-8"),
            re.MULTILINE | re.DOTALL,
        )
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_of_the_page_runs(
    gateway: str, key: str, block: str, request: pytest.FixtureRequest
) -> None:
    code = block.replace("http://127.0.0.1:8000", gateway).replace("sk-any", key)

    exec(compile(code, request.node.name, "exec"), {})  # noqa: S102 - it is our own page
