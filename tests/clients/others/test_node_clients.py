"""Node.js clients with their default API, Responses, and a chat completions worker."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

NODE = Path(os.environ.get("NODE_CLIENTS", ""))

pytestmark = pytest.mark.skipif(
    not (NODE / "node_modules" / "ai").is_dir(), reason="they can't be installed here: it needs npm"
)


def run(script: str) -> list[Any]:
    """Run a script; return its output, a JSON line for each use of the client."""
    ended = subprocess.run(
        ["/usr/bin/env", "node", script],
        cwd=NODE,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_ai_sdk_calls_tools_streams_and_parses() -> None:
    assert run("ai_sdk.mjs") == [
        {"text": "It is sunny in 東京.", "steps": 2},
        {"text": "It is sunny in 東京.", "called": True, "failed": False},
        {"name": "Ada", "age": 36},
    ]


def test_agents_sdk_calls_tools_hands_off_and_streams() -> None:
    assert run("openai_agents.mjs") == [
        "It is sunny in 東京.",
        ["expert", "Hello world!"],
        ["It is sunny in 東京.", True],
    ]
