"""Ollama's own client for JavaScript: chat, streams, tools, embeddings, listings and errors."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def heard(gateway: str, node: str, modules: Path) -> dict[str, Any]:
    """What the client made of the answers."""
    if not (modules / "ollama").is_dir():
        pytest.skip("ollama is not installed")
    script = Path(__file__).with_name("ollama.mjs")
    command = [node, str(script), gateway, "sk-clients", str(modules)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_chat_and_stream(heard: dict[str, Any]) -> None:
    assert heard["told"] == ["Hello world!", "stop", 2, 3]
    assert heard["pieces"] == [["Hello", False], [" world", False], ["!", False], ["", True]]
    assert heard["generated"] == ["Hello world!", True]


def test_tools_and_structured_output(heard: dict[str, Any]) -> None:
    assert heard["call"]["name"] == "f"
    assert heard["structured"] == {"name": "Ada", "age": 36}


def test_embeddings_and_listings(heard: dict[str, Any]) -> None:
    assert heard["embedded"] == 2
    assert any(name.startswith("chat") for name in heard["models"])
    assert heard["shown"]


def test_errors(heard: dict[str, Any]) -> None:
    assert heard["unknown"] == ["ResponseError", 404]
    assert heard["key"] == ["ResponseError", 401]
    assert heard["broken"] != "answered"
