"""Claude Code completes a task with a worker that has only OpenAI's chat completions.

It reads a file, edits it, and runs a command, as the scripted model says. It has a home directory
of its own, and connects only to the gateway.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.gateway_process import run_gateway
from tests.support.chat_worker import Answer, ChatWorker, Json

TASK = "Change hello to goodbye in greeting.txt, and copy the file."


@pytest.fixture(scope="module")
def program(modules: Path) -> Path:
    """The program for this machine, from a package of its own."""
    for path in modules.glob("@anthropic-ai/claude-code-*/claude"):
        return path
    pytest.skip(f"no program of @anthropic-ai/claude-code for this machine is in {modules}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the task's files."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "greeting.txt").write_text("hello world\n")
    return work


def list_steps(folder: Path) -> Iterator[tuple[str, Json]]:
    """Return the tool calls of the model in order."""
    file, copy = folder / "greeting.txt", folder / "copy.txt"
    yield "Read", {"file_path": str(file)}
    yield "Edit", {"file_path": str(file), "old_string": "hello", "new_string": "goodbye"}
    yield "Bash", {"command": f"cp {file} {copy} && echo done-42", "description": "Copy"}


def answer(folder: Path, body: Json) -> Answer:
    """Return the next step of the task, or its end when each call has a result."""
    steps = list(list_steps(folder))
    offered = {tool["function"]["name"] for tool in body.get("tools", ())}
    done = sum(message["role"] == "tool" for message in body["messages"])
    if done == len(steps) or not offered:
        return Answer(text=("The file ", "says goodbye."), prompt_tokens=60)
    name, arguments = steps[done]
    assert name in offered
    text = json.dumps(arguments)
    call = (name, f"call_{done}", (text[:9], text[9:]))
    return Answer(text=("Working.",), calls=(call,), reason="tool_calls", prompt_tokens=50)


async def run_claude(program: Path, folder: Path, url: str, *arguments: str) -> tuple[int, str]:
    """Run Claude Code; return its exit status and its output."""
    home = folder.with_name("home")
    home.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "sk-local",
        "ANTHROPIC_MODEL": "claude-local",
        "ANTHROPIC_SMALL_FAST_MODEL": "claude-local",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
    }
    process = await asyncio.create_subprocess_exec(
        program, "-p", TASK, "--output-format", "json", *arguments,
        cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(90):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, out.decode()


def write_configuration(folder: Path, worker: str) -> str:
    """Write a configuration for Claude Code with one worker."""
    config: dict[str, Any] = {
        "version": 1,
        "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai", "anthropic"]}],
        "limits": {"drain_timeout": "1s"},
        "backends": {"chat": {"protocol": "openai", "profile": "vllm", "workers": [worker]}},
        "models": {
            "local": {
                "backend": "chat",
                "aliases": ["claude-local"],
                "limits": {"context": 200_000, "max_tokens": 8192},
            }
        },
    }
    path = folder.with_name("gateway.json")
    path.write_text(json.dumps(config))
    return str(path)


async def test_claude_code_reads_edits_and_runs(program: Path, folder: Path) -> None:
    async with ChatWorker(lambda body: answer(folder, body)) as worker:
        with run_gateway(write_configuration(folder, worker.url)) as url:
            status, out = await run_claude(program, folder, url, "--allowedTools", "Read,Edit,Bash")

    assert status == 0, out

    result = json.loads(out)
    assert (result["subtype"], result["result"]) == ("success", "The file says goodbye.")
    assert (folder / "copy.txt").read_text() == "goodbye world\n"

    last = worker.bodies[-1]
    results = [one["content"] for one in last["messages"] if one["role"] == "tool"]
    assert "hello world" in results[0]
    assert "done-42" in results[2]
    assert last["max_tokens"] <= 8192
    assert "x-anthropic-billing-header" not in json.dumps(last)
