"""The ``interlingua`` command as a process: it starts, serves, stops, and explains errors."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import httpx
import pytest

from tests.conftest import HAS_TORCH, RunningGateway

POOL = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
limits: {shutdown_delay: 0s, drain_timeout: 5s}
backends: {w: {protocol: openai, workers: ["http://127.0.0.1:9"]}}
models: {m: {backend: w}}
"""
ECHO = POOL.replace(
    '{protocol: openai, workers: ["http://127.0.0.1:9"]}', "{kind: echo, delay: 200ms}"
)


class Command:
    """A running ``interlingua`` process whose standard error goes to a file."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "gateway"),
    ) -> None:
        self._log = TemporaryFile()  # noqa: SIM115 - close closes it
        self.process = subprocess.Popen(
            [*program, *arguments],
            stderr=self._log,
            env=os.environ | (env or {}),
        )

    def read_output(self) -> str:
        """Return the output so far."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def serving(self) -> str:
        """Wait until the gateway serves and return its first URL."""
        return self.read_urls()[0]

    def read_urls(self) -> list[str]:
        """Wait until the gateway serves and return its URLs; that of the admin listener is last."""
        for _ in range(600):
            if match := re.search(r"interlingua serves .* on (http://.*)", self.read_output()):
                return re.findall(r"http://[\w.:]+", match[1])
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"the gateway does not serve: {self.read_output()}")

    def ended(self) -> int:
        """Wait for the process to exit and return its exit code."""
        return self.process.wait(30)

    def stop(self) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def close(self) -> None:
        """Kill the process if it still runs."""
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    """The processes started by the test; they are killed at the end."""
    started: list[Command] = []
    yield started
    for command in started:
        command.close()


def start_command(
    commands: list[Command], *arguments: str, env: dict[str, str] | None = None
) -> Command:
    command = Command(*arguments, env=env)
    commands.append(command)
    return command


def test_gateway_without_local_model_loads_no_torch_and_uses_little_memory(
    commands: list[Command], file: Path
) -> None:
    file.write_text(POOL)
    command = start_command(commands, "serve", str(file))

    assert httpx.get(command.serving() + "/health", timeout=30).status_code == 200

    proc = Path(f"/proc/{command.process.pid}")
    resident = re.search(r"VmRSS:\s+(\d+) kB", (proc / "status").read_text())
    assert resident is not None
    assert int(resident[1]) < 60_000
    assert "torch" not in (proc / "maps").read_text()
    assert command.stop() == 0


def test_sigterm_lets_running_requests_finish(commands: list[Command], file: Path) -> None:
    file.write_text(ECHO)
    command = start_command(commands, "serve", str(file))
    url = command.serving()
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "a b c d e"}]}

    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        command.process.send_signal(signal.SIGTERM)
        rest = "\n".join(lines)

    assert "[DONE]" in rest
    assert command.ended() == 0


def test_invalid_configuration_ends_the_start_with_the_file_position(
    commands: list[Command], file: Path
) -> None:
    file.write_text(POOL.replace("backend: w", "backend: v"))
    command = start_command(commands, "serve", str(file))

    assert command.ended() == 1
    assert re.search(rf"{re.escape(str(file))}:5:\d+: .*'v'", command.read_output())


def test_port_in_use_ends_the_start_with_an_error(commands: list[Command], file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        file.write_text(POOL.replace("127.0.0.1:0", f"127.0.0.1:{taken.getsockname()[1]}"))

        command = start_command(commands, "serve", str(file))

        assert command.ended() == 1

    assert "can't listen" in command.read_output()
    assert f"change it in {file}" in command.read_output()
    assert "Traceback" not in command.read_output()


def test_port_in_use_names_the_option_that_changes_it(commands: list[Command]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])

        command = start_command(commands, "serve", "127.0.0.1:9", "--port", port)

        assert command.ended() == 1

    warning, line = command.read_output().splitlines()
    assert "http://127.0.0.1:9: the worker does not answer" in warning
    assert port in line
    assert json.loads(line)["message"].endswith("choose another with --port or --admin-port")


def test_options_of_a_target_are_refused_with_a_file(commands: list[Command], file: Path) -> None:
    file.write_text(POOL)
    command = start_command(commands, "serve", str(file), "--port", "0", "--api-key", "sk")

    assert command.ended() == 2
    assert f"{file} sets what --port, --api-key would" in command.read_output()


@pytest.mark.skipif(not HAS_TORCH, reason="the engine needs torch")
def test_model_that_can_not_be_loaded_ends_the_start_with_one_line(
    commands: list[Command], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["UnknownForCausalLM"], "model_type": "unknown"}'
    )
    (tmp_path / "model.safetensors").touch()
    command = start_command(commands, "serve", str(tmp_path), "--port", "0", "--admin-port", "0")
    assert command.process.wait(90) == 1  # the engine imports torch first

    lines = [json.loads(one) for one in command.read_output().splitlines()]
    errors = [(one["logger"], one["message"]) for one in lines if one["level"] != "info"]
    assert [logger for logger, _ in errors] == ["interlingua", "backends.torch.backend"]
    assert errors[0][1].startswith("interlingua can't serve: ")
    assert all("'unknown'" in message for _, message in errors)


def test_serve_without_a_file_starts_the_web_ui_whose_url_has_the_key_for_changes(
    commands: list[Command],
) -> None:
    command = start_command(commands, "serve", "127.0.0.1:9", "--port", "0", "--admin-port", "0")
    root = httpx.get(command.serving(), timeout=30).json()
    assert root["endpoints"]["openai"][0] == "POST /v1/chat/completions"
    assert root["api_key_required"] is False

    page = re.search(
        r'"web UI: (http://127[.]0[.]0[.]1:\d+)/-/ui/#key=([^"]+)"', command.read_output()
    )
    assert page is not None

    with httpx.Client(base_url=page[1], timeout=30) as admin:
        assert admin.get("/-/ui/").status_code == 200
        assert admin.get("/-/status").status_code == 200
        assert admin.post("/-/drain").status_code == 401

        key = {"Authorization": f"Bearer {page[2]}"}
        assert admin.post("/-/drain", headers=key).status_code == 200
    assert command.stop() == 0


def test_api_key_option_protects_the_listener(commands: list[Command]) -> None:
    command = start_command(
        commands, "serve", "127.0.0.1:9", "--port", "0", "--admin-port", "off",
        env={"INTERLINGUA_API_KEY": "sk-secret"},
    )  # fmt: skip
    url = command.serving() + "/v1/models"

    assert httpx.get(url, timeout=30).status_code == 401
    assert (
        httpx.get(url, headers={"Authorization": "Bearer sk-secret"}, timeout=30).status_code == 200
    )
    assert "web UI" not in command.read_output()


def test_missing_configuration_file_is_a_usage_error(commands: list[Command]) -> None:
    command = start_command(commands, "serve", "nowhere.yaml")

    assert command.ended() == 2
    assert "nowhere.yaml" in command.read_output()


async def test_serve_accepts_a_worker_url_instead_of_a_file(
    commands: list[Command], mock: RunningGateway
) -> None:
    command = start_command(commands, "serve", mock.url + "/v1", "--port", "0")
    url = command.serving()
    body = {"model": "mock", "messages": [{"role": "user", "content": "say hi"}]}

    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        openai = await client.post("/v1/chat/completions", json=body)
        triton = await client.post("/v2/models/mock/generate", json={"text_input": "say hi"})
        missing = await client.post("/v1/chat/completions", json=body | {"model": "nope"})

    assert "Hello world!" in openai.text
    assert "Hello world!" in triton.text
    assert missing.status_code == 502
    assert command.stop() == 0


def test_check_command_exit_code_reports_whether_the_file_is_valid(
    commands: list[Command], file: Path
) -> None:
    file.write_text(POOL)
    good = start_command(commands, "check", str(file))
    assert good.ended() == 0

    file.write_text("models: 5")
    bad = start_command(commands, "check", str(file))
    assert bad.ended() == 1
