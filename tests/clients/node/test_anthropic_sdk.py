"""Anthropic's SDK for TypeScript: messages, streams, tools, counts, models and errors."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def results(gateway: str, node: str, modules: Path) -> dict[str, Any]:
    """What the SDK returned."""
    if not (modules / "@anthropic-ai" / "sdk").is_dir():
        pytest.skip("@anthropic-ai/sdk is not installed")
    script = Path(__file__).with_name("anthropic_sdk.mjs")
    command = [node, str(script), gateway, "sk-clients", str(modules)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    output: dict[str, Any] = json.loads(done.stdout)
    return output


def test_message_and_stream(results: dict[str, Any]) -> None:
    assert (results["text"], results["request"]) == ("Hello world!", "string")
    assert results["deltas"] == ["Hello", " world", "!"]
    assert results["final"] == ["Hello world!", "end_turn", 2, 3]
    assert results["raw"] == [
        "message_start", "content_block_start", *["content_block_delta"] * 3,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_tools_counts_and_models(results: dict[str, Any]) -> None:
    assert results["call"] == ["tool_use", "f", {"x": 1}]
    assert results["count"] == 3
    assert {"chat", "org/chat"} <= set(results["models"])
    assert results["one"] == "org/chat"


def test_errors(results: dict[str, Any]) -> None:
    assert results["unknown"] == ["NotFoundError", 404, "not_found_error"]
    assert results["limited"] == ["RateLimitError", 429, "rate_limit_error"]
    assert results["key"] == ["AuthenticationError", 401, "authentication_error"]
    assert results["broken"] != "answered"
    assert results["broken"][2] == "api_error"
