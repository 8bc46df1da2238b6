"""Our engine under Ray Serve, for real: a gateway finds both replicas, and outlives one of them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.socket.test_command import Command
from tests.torch.conftest import byte_tokenizer, tiny_llama

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
SERVE = ROOT / ".venv-ray" / "bin" / "serve"
KEY = "a-key-of-the-replicas"
PATIENCE = 150.0
"""Seconds until what is waited for must have come about; a start takes about 30."""
GATEWAY = """
listeners: [{{address: "127.0.0.1:0", dialects: [openai]}}]
admin: {{address: "127.0.0.1:0"}}
backends:
  ray:
    dialect: openai
    profile: interlingua
    workers: [{{file: "{file}", auth: {{bearer: "${{INTERLINGUA_WORKER_KEY}}"}}}}]
    health: {{every: 500ms, fall: 2, rise: 1, slow_start: 0s}}
    policy: round_robin
models: {{m: {{backend: ray, model: tiny}}}}
"""


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file in which the replicas are listed, two of them at first."""
    if not SERVE.exists():
        reason = f"no Ray Serve in {SERVE.parents[1].name}; make ray installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("ray")
    tiny_llama().save_pretrained(place / "tiny")
    byte_tokenizer().save_pretrained(place / "tiny")
    file = place / "workers.json"
    told = msgspec.yaml.decode((ROOT / "deploy" / "ray" / "serve.yaml").read_bytes())
    told["applications"][0]["args"] = {
        "model": str(place / "tiny"), "file": str(file), "replicas": 2, "cpus": 0.5, "threads": 1,
    }  # fmt: skip
    (place / "serve.yaml").write_bytes(msgspec.yaml.encode(told))
    surroundings = {
        "PYTHONPATH": str(ROOT / "deploy" / "ray"),
        "INTERLINGUA_WORKER_KEY": KEY,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            [SERVE, "run", place / "serve.yaml"],
            env=os.environ | surroundings,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(
            lambda: len(replicas(file)) == 2 or process.poll() is not None,
            lambda: (place / "log").read_text()[-3000:],
        )
        assert process.poll() is None, (place / "log").read_text()[-3000:]
        yield file
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def until(holds: Callable[[], bool], why: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, why()
        time.sleep(0.2)


def replicas(file: Path) -> set[str]:
    """Their URLs, as they are listed now."""
    told = msgspec.json.decode(file.read_bytes()) if file.exists() else []
    return set(told)


@pytest.fixture(scope="module")
def gateway(listed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URLs of a gateway before them, and of its admin listener."""
    file = tmp_path_factory.mktemp("gateway") / "gateway.yaml"
    file.write_text(GATEWAY.format(file=listed))
    command = Command("serve", str(file), env={"INTERLINGUA_WORKER_KEY": KEY})
    url = command.serving()
    yield url, command.said().rpartition(" and ")[2].split()[0]
    command.close()


def seen(admin: str) -> dict[str, Any]:
    """The gateway's workers, by their URLs."""
    told = httpx.get(f"{admin}/-/workers", timeout=10).json()
    workers: list[dict[str, Any]] = told["backends"]["ray"]
    return {one["url"]: one for one in workers}


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "m", "prompt": "Hi", "max_tokens": 8, "seed": 1, "min_p": 0.1, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def process_of(url: str) -> int:
    """The process that listens there."""
    port = f"{int(url.rpartition(':')[2]):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    (inode,) = {
        line.split()[9] for line in lines
        if line.split()[1].endswith(f":{port}") and line.split()[3] == "0A"
    }  # fmt: skip
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.readlink().name == f"socket:[{inode}]":
                return int(link.parts[2])
        except OSError:  # it ended meanwhile
            continue
    raise AssertionError(f"nobody listens at {url}")


def test_both_are_found_and_asked(listed: Path, gateway: tuple[str, str]) -> None:
    url, admin = gateway
    assert set(seen(admin)) == replicas(listed)
    texts = set()
    for _ in range(6):
        answer = ask(url)
        assert answer.status_code == 200, answer.text
        assert "x-interlingua-loss" not in answer.headers
        texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 1
    for replica in replicas(listed):
        assert httpx.get(f"{replica}/v1/models", timeout=10).status_code == 401
    assert KEY not in listed.read_text()


def test_one_is_killed_and_replaced(listed: Path, gateway: tuple[str, str]) -> None:
    url, admin = gateway
    before = replicas(listed)
    victim = min(before)
    os.kill(process_of(victim), signal.SIGKILL)
    for _ in range(8):
        answer = ask(url)
        assert answer.status_code == 200, (answer.text, seen(admin))
    until(lambda: len(replicas(listed) - before) == 1, lambda: (before, replicas(listed)))
    assert victim not in replicas(listed)
    until(lambda: set(seen(admin)) == replicas(listed), lambda: (seen(admin), replicas(listed)))
    for _ in range(4):
        assert ask(url).status_code == 200
