"""The log of ``interlingua serve`` is text on a terminal and JSON in a pipe, unless configured."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

CONFIG = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
admin: {address: "127.0.0.1:0"}
limits: {shutdown_delay: 0s, drain_timeout: 5s}
backends:
  w: {protocol: openai, workers: ["http://127.0.0.1:9"]}
  e: {kind: echo, script: [hello]}
models: {m: {backend: w}, e: {backend: e}}
"""
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "


class Served:
    """A running gateway whose standard error is a terminal or a pipe."""

    def __init__(self, arguments: Sequence[str], *, terminal: bool) -> None:
        self._reads, writes = pty.openpty() if terminal else os.pipe()
        environment = {name: os.environ[name] for name in os.environ if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", *arguments],
            stderr=writes,
            env=environment,
        )
        os.close(writes)
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while piece := os.read(self._reads, 1 << 16):
                self.output += piece.decode().replace("\r\n", "\n")
        except OSError:  # the last writer closed the terminal
            pass

    def wait_for(self, pattern: str) -> re.Match[str]:
        for _ in range(600):
            if match := re.search(pattern, self.output):
                return match
            time.sleep(0.05)
        raise AssertionError(self.output)

    def use_and_stop(self) -> list[str]:
        """Send requests, stop the gateway, and return all lines."""
        url = self.wait_for(r"interlingua serves m, e on (http://[\w.:]+)")[1]
        for model in ("m", "e"):
            body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "a"}]}
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        self.process.send_signal(signal.SIGHUP)
        self.wait_for("unchanged|reload|served")
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0
        self._reader.join(30)
        return self.output.splitlines()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(30)
        os.close(self._reads)


@pytest.fixture
def started() -> Iterator[list[Served]]:
    running: list[Served] = []
    yield running
    for one in running:
        one.close()


def serve(
    started: list[Served], folder: Path, *arguments: str, terminal: bool = False, settings: str = ""
) -> Served:
    file = folder / "gateway.yaml"
    file.write_text(CONFIG + settings)
    served = Served([str(file), *arguments], terminal=terminal)
    started.append(served)
    return served


def parse_lines(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Parse each line as JSON: a request, or a message with its time, level and logger."""
    objects: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for one in objects:
        assert isinstance(one, dict)
        assert "id" in one or one.keys() >= {"time", "level", "logger", "message"}, one
    return objects


@pytest.mark.parametrize("processes", [1, 2])
def test_into_a_pipe_every_line_is_json(
    started: list[Served], tmp_path: Path, processes: int
) -> None:
    served = serve(started, tmp_path, "--processes", str(processes))
    objects = parse_lines(served.use_and_stop())
    messages = [one["message"] for one in objects if "message" in one]

    assert any(one.startswith("interlingua serves m, e on http://") for one in messages)
    assert any(one.startswith("web UI: http://") for one in messages)
    assert any(one.startswith("Shutting down") for one in messages)

    failed, good = (next(r for r in objects if r.get("model") == name) for name in ("m", "e"))
    assert failed["worker"] == "http://127.0.0.1:9"
    assert failed["worker_failures"][0]["text"]
    assert failed["client"] == "127.0.0.1"
    assert failed["method"] == "POST"
    assert good["status"] == 200
    for number in re.findall(r'"(?:duration|first_token|overhead)":([\d.]+)', served.output):
        assert len(number.partition(".")[2]) <= 6


def test_on_a_terminal_every_line_is_text(started: list[Served], tmp_path: Path) -> None:
    lines = serve(started, tmp_path, terminal=True).use_and_stop()
    assert not [line for line in lines if line.startswith("{")]
    assert lines[0].startswith("interlingua serves m, e on http://")

    stamped = [line for line in lines if re.match(STAMP, line)]
    failed, good = (next(r for r in stamped if f"model={name}" in r) for name in ("m", "e"))
    assert re.match(
        STAMP + r'WARNING access: 127\.0\.0\.1 "POST /v1/chat/completions" 50[23] '
        r"model=m@1 worker=http://127\.0\.0\.1:9 \d+\.\d{3}s id=\w+ error=\w+ "
        r'worker_error="http://127\.0\.0\.1:9: .+"$',
        failed,
    )
    assert re.match(
        STAMP + r"INFO access: .* 200 model=e@1 backend=e ttft=\d\.\d{3}s tokens=\d+\+\d+ ", good
    )

    others = [line for line in lines if line not in stamped]
    assert [line.split()[0] for line in others] == ["interlingua", "web", "Shutting"]


@pytest.mark.parametrize(
    ("option", "configured", "terminal", "is_json"),
    [
        ("json", "auto", True, True),
        ("text", "auto", False, False),
        ("auto", "text", False, False),
        ("auto", "json", True, True),
        ("json", "text", False, True),
    ],
)
def test_option_takes_precedence_over_configuration_and_terminal(  # noqa: PLR0917 - a table
    started: list[Served],
    tmp_path: Path,
    option: str,
    configured: str,
    terminal: bool,
    is_json: bool,
) -> None:
    settings = f"observe: {{log_format: {configured}}}"
    served = serve(started, tmp_path, "--log-format", option, terminal=terminal, settings=settings)
    lines = served.use_and_stop()
    if is_json:
        parse_lines(lines)
    else:
        assert not [line for line in lines if line.startswith("{")]


def test_invalid_configuration_is_reported_as_json_in_a_pipe(
    started: list[Served], tmp_path: Path
) -> None:
    served = serve(started, tmp_path, settings="nonsense: 1\nother: 2\n")
    assert served.process.wait(30) == 1

    served.wait_for("other")
    objects = parse_lines(served.output.splitlines())
    assert all(one["level"] == "error" for one in objects)
    assert "gateway.yaml:9:1: " in objects[0]["message"]
