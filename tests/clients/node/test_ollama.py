"""Ollama's own client for JavaScript: chat, streams, tools, embeddings, listings and errors."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def results(gateway: str, node: str, modules: Path) -> dict[str, Any]:
    """What the client returned."""
    if not (modules / "ollama").is_dir():
        pytest.skip("ollama is not installed")
    script = Path(__file__).with_name("ollama.mjs")
    command = [node, str(script), gateway, "sk-clients", str(modules)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    output: dict[str, Any] = json.loads(done.stdout)
    return output


def test_chat_and_stream(results: dict[str, Any]) -> None:
    assert results["unary"] == ["Hello world!", "stop", 2, 3]
    assert results["pieces"] == [["Hello", False], [" world", False], ["!", False], ["", True]]
    assert results["generated"] == ["Hello world!", True]


def test_tools_and_structured_output(results: dict[str, Any]) -> None:
    assert results["call"]["name"] == "f"
    assert results["structured"] == {"name": "Ada", "age": 36}


def test_embeddings_and_listings(results: dict[str, Any]) -> None:
    assert results["embedded"] == 2
    assert any(name.startswith("chat") for name in results["models"])
    assert results["shown"]


def test_errors(results: dict[str, Any]) -> None:
    assert results["unknown"] == ["ResponseError", 404]
    assert results["key"] == ["ResponseError", 401]
    assert results["broken"] != "answered"
