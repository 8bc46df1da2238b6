"""The blocks of every page run as described, or are listed here with the reason why not."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.config.loader import load_text
from tests.docs.pages import check_page
from tests.docs.stands_in import STANDS_IN

ROOT = Path(__file__).parents[2]
PAGES: Final[Mapping[str, str]] = {
    str(file.relative_to(ROOT)): file.read_text("utf-8")
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
}
ELSEWHERE: Final = {
    "docs/howto/kubernetes.md": "tests/deploy/test_pages.py runs it in a checkout, with kubectl",
    "docs/howto/prometheus-grafana.md": "tests/deploy/test_pages.py runs it in a checkout",
}
SLOW: Final = {"docs/howto/structured-output.md", "docs/howto/serve-a-local-model.md"}
"""They load the built-in model."""
NOT_RUN: Final = {
    ("README.md", "$ make run"): "installs, and downloads what there is not",
    (
        "README.md",
        "$ interlingua serve http",
    ): "as docs/howto/load-balancing.md has it, on a port in use",
    ("docs/howto/codex.md", "$ npm install"): "make clients: tests/clients/others/test_codex.py",
    ("docs/howto/openai-agents.md", "from agents"): "make clients: tests/clients/agents",
    ("docs/howto/openvino-model-server.md", "$ ovms --rest_port"): "wants the model server",
    ("docs/howto/langchain.md", "from langchain"): "make clients: test_pages.py",
    ("docs/howto/llama-index.md", "from llama_index"): "make clients: test_pages.py",
    ("docs/howto/ollama.md", "$ ollama pull"): "tests/integration/test_ollama_worker.py",
    ("docs/howto/vllm.md", "$ vllm serve"): "wants vLLM and a GPU",
    ("docs/howto/vllm.md", "$ llama-server"): "make oracle: tests/oracle/test_llamacpp.py",
    ("docs/howto/claude-code.md", "$ vllm serve"): "wants vLLM and a GPU",
    (
        "docs/howto/claude-code.md",
        "$ npm install",
    ): "tests/clients/node/test_claude_code.py runs Claude Code (make clients)",
    ("docs/howto/compare.md", "$ interlingua compare chat@1"): "as the example, of two versions",
    (
        "docs/howto/compare.md",
        "$ interlingua compare recordings/ recordings-replay/ --judge",
    ): "tests/integration/test_compare_judge.py: it wants a model",
    (
        "docs/howto/replay.md",
        "$ interlingua replay recordings/ --config gateway.yaml --to chat@1 --to chat@2",
    ): "as the example before it, with two versions",
    (
        "docs/howto/canary-rollout.md",
        "$ interlingua rollout",
    ): "tests/integration/test_rollout.py: it wants traffic",
    ("docs/howto/observability.md", "2026-11-23"): "lines of a log",
    ("docs/howto/kubernetes.md", "$ kubectl -n models"): "wants a cluster",
    ("docs/howto/multiple-processes.md", "$ PYTHON_CONFIGURE_OPTS"): "builds Python, for minutes",
    ("docs/howto/sampling.md", "from transformers"): "test_watermark.py does the same",
    ("docs/howto/systemd.md", "# python3 -m venv"): "changes the machine, as root",
    (
        "docs/howto/serve-a-local-model.md",
        "$ INTERLINGUA_WORKER_KEY",
    ): "wants a model of the reader's",
    (
        "docs/howto/serve-a-local-model.md",
        "$ pip install",
    ): "make ray: it takes the machine for itself",
    ("docs/tutorial.md", "$ make run"): "installs, and downloads what there is not",
    ("docs/tutorial.md", "$ pip install"): "as above",
}
"""Blocks that are only shown, by page and first words, with the reason."""
SHOWN: Final = re.compile(r"^```(?:console|py)\n(.*)$", re.MULTILINE)
RUN: Final = re.compile(r"^```(?:sh|python)$", re.MULTILINE)
YAML: Final = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENV: Final = re.compile(r"\$\{(\w+)\}")


def list_runnable_pages() -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, page in PAGES.items()
        if name not in ELSEWHERE and RUN.search(page)
    ]


@pytest.mark.parametrize("name", list_runnable_pages())
def test_page_commands_print_the_documented_output(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    check_page(PAGES[name], folder, STANDS_IN.get(name, ""))


def test_every_block_that_is_not_run_is_listed_with_a_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = [(name, line) for name, page in PAGES.items() for line in SHOWN.findall(page)]
    unlisted = [one for one in blocks if not any(_matches_block(one, entry) for entry in NOT_RUN)]

    gone = [entry for entry in NOT_RUN if not any(_matches_block(one, entry) for one in blocks)]

    assert (unlisted, gone) == ([], [])

    with capsys.disabled():
        for (name, begins), why in NOT_RUN.items():
            print(f"\nnot run: {name}: {begins} …: {why}", end="")  # noqa: T201 - it is for readers
        print()  # noqa: T201 - as above


def _matches_block(block: tuple[str, str], entry: tuple[str, str]) -> bool:
    return block[0] == entry[0] and block[1].startswith(entry[1])


def list_configurations() -> list[Any]:
    return [
        pytest.param(text, id=f"{name}-{n}")
        for name, page in PAGES.items()
        for n, text in enumerate(YAML.findall(page))
        if re.search("^backends:", text, re.MULTILINE) and re.search("^models:", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("text", list_configurations())
def test_every_documented_configuration_is_valid(text: str) -> None:
    env = dict.fromkeys(ENV.findall(text), "0" * 64)
    assert load_text(text, "shown.yaml", env=env).models


def test_every_page_with_a_stand_in_exists() -> None:
    assert STANDS_IN.keys() | ELSEWHERE.keys() | SLOW <= PAGES.keys()
