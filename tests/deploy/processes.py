"""Runs the commands of container files as processes on this machine."""

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from click.testing import CliRunner
from msgspec import Struct, json

from gateway.cli import main
from tests.integration.test_command import Command

GATEWAY_COMMAND = (sys.executable, "-m", "gateway")
PLACE = "/etc/interlingua"
"""The folder of the configuration in containers."""


class Gateway(Struct, frozen=True):
    """A running gateway with its listener and its admin listener."""

    command: Command
    url: str
    admin: str


class ProcessLauncher:
    """Starts commands of containers; ``close`` kills them."""

    def __init__(self) -> None:
        self._commands: list[Command] = []

    def start(
        self,
        command: Sequence[str],
        config: Path,
        program: Sequence[str] = GATEWAY_COMMAND,
        **env: str,
    ) -> Gateway:
        """Start a container's command on free ports, with its configuration in ``config``."""
        arguments = [part.replace(PLACE, str(config)) for part in command]
        assert arguments != [*command], f"{command} does not have its configuration in {PLACE}"
        ports = {"LISTEN": "127.0.0.1:0", "ADMIN": "127.0.0.1:0"}
        started = Command(*arguments, env=ports | env, program=program)
        self._commands.append(started)
        url = started.serving()
        admin = re.search(rf"{re.escape(url)} and (http://[\w.:]+)", started.read_output())
        return Gateway(started, url, admin[1] if admin else "")

    def close(self) -> None:
        """Kill all processes that still run."""
        for command in self._commands:
            command.close()


def create_key() -> Mapping[str, str]:
    """Create a key like ``interlingua keys new --json``."""
    result = CliRunner().invoke(main, ["keys", "new", "--json"])
    return json.decode(result.stdout, type=dict[str, str])


def wait_until(holds: Callable[[], bool], why: str) -> None:
    """Wait for a condition."""
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError(why)


def wait_until_ready(gateway: Gateway) -> None:
    """Wait until the gateway has a healthy worker."""
    wait_until(
        lambda: httpx.get(f"{gateway.admin}/-/ready", timeout=30).status_code == httpx.codes.OK,
        gateway.command.read_output(),
    )


def send_chat(gateway: Gateway, model: str, key: str = "") -> httpx.Response:
    """Send a chat request; a worker without a model echoes it."""
    body: Any = {"model": model, "messages": [{"role": "user", "content": "say this back"}]}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=30)


def get_response_text(answer: httpx.Response) -> str:
    """Return the text of a chat response."""
    assert answer.status_code == httpx.codes.OK, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text
