"""Workers under Ray Serve: a gateway discovers both replicas and survives the loss of one."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from tests.integration.test_command import Command
from tests.support.tiny_model import byte_tokenizer, tiny_llama

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
SERVE = ROOT / ".venv-ray" / "bin" / "serve"
KEY = "a-key-of-the-replicas"
PATIENCE = 150.0
"""Timeout in seconds; a start takes about 30."""
ENDING = 60.0
"""Seconds until all processes must have exited; it takes about 8."""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, ::ffff:127.0.0.1 and ::1 in the kernel's notation."""
GATEWAY = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
admin: {{address: "127.0.0.1:0"}}
backends:
  ray:
    protocol: openai
    profile: interlingua
    workers: [{{file: "{file}", auth: {{bearer: "${{INTERLINGUA_WORKER_KEY}}"}}}}]
    health: {{interval: 500ms, fall: 2, rise: 1, slow_start: 0s}}
    policy: round_robin
models: {{m: {{backend: ray, model: tiny}}}}
"""


class RayServeProcess(NamedTuple):
    """A running `serve run`, and the file in which it lists the replicas."""

    process: int
    file: Path


@pytest.fixture(scope="module")
def ray_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServeProcess]:
    """Two listed replicas; at the end no process may be left."""
    if not SERVE.exists():
        reason = f"no Ray Serve in {SERVE.parents[1].name}; make ray installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("ray")
    tiny_llama().save_pretrained(place / "tiny")
    byte_tokenizer().save_pretrained(place / "tiny")
    file = place / "workers.json"
    config = msgspec.yaml.decode((ROOT / "deploy" / "ray" / "serve.yaml").read_bytes())
    config["applications"][0]["args"] = {
        "model": str(place / "tiny"), "file": str(file), "replicas": 2, "cpus": 0.5, "threads": 1,
    }  # fmt: skip
    (place / "serve.yaml").write_bytes(msgspec.yaml.encode(config))
    environment = {
        "PYTHONPATH": str(ROOT / "deploy" / "ray"),
        "INTERLINGUA_WORKER_KEY": KEY,
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            [SERVE, "run", place / "serve.yaml"],
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: len(read_replicas(file)) == 2 or process.poll() is not None,
            lambda: (place / "log").read_text()[-3000:],
        )
        assert process.poll() is None, (place / "log").read_text()[-3000:]
        yield RayServeProcess(process.pid, file)
    finally:
        family = find_descendants(process.pid)
        process.send_signal(signal.SIGINT)
        left = wait_for_exit(process, family)
    assert not left, (left, (place / "log").read_text()[-3000:])


@pytest.fixture(scope="module")
def workers_file(ray_serve: RayServeProcess) -> Path:
    return ray_serve.file


def find_descendants(process: int) -> dict[int, str]:
    """Return a process and its descendants, with start times that distinguish reused ids."""
    parents, born = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        one = int(stat.parent.name)
        parents[one], born[one] = int(fields[1]), fields[19]
    processes, new = set(), {process}
    while new:
        processes |= new
        new = {one for one, parent in parents.items() if parent in new}
    return {one: born[one] for one in processes if one in born}


def wait_for_exit(process: subprocess.Popen[bytes], family: dict[int, str]) -> set[int]:
    """Wait until all processes exited; kill and return those that did not."""
    end = time.monotonic() + ENDING
    while process.poll() is None or (left := find_alive(family)):
        if time.monotonic() > end:
            left = find_alive(family)
            for one in left:
                os.kill(one, signal.SIGKILL)
            process.wait()
            return left
        time.sleep(0.2)
    return left


def find_alive(family: dict[int, str]) -> set[int]:
    return {one for one, born in family.items() if find_descendants(one).get(one) == born}


def wait_until(holds: Callable[[], bool], why: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, why()
        time.sleep(0.2)


def read_replicas(file: Path) -> set[str]:
    """Return the URLs of the listed replicas."""
    replicas = msgspec.json.decode(file.read_bytes()) if file.exists() else []
    return set(replicas)


@pytest.fixture(scope="module")
def gateway(
    workers_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The URLs of a gateway in front of the replicas, and of its admin listener."""
    file = tmp_path_factory.mktemp("gateway") / "gateway.yaml"
    file.write_text(GATEWAY.format(file=workers_file))
    command = Command("serve", str(file), env={"INTERLINGUA_WORKER_KEY": KEY})
    try:
        url, admin_url = command.read_urls()
        yield url, admin_url
    finally:
        command.close()


def fetch_workers(admin: str) -> dict[str, Any]:
    """Return the gateway's workers by URL."""
    body = httpx.get(f"{admin}/-/workers", timeout=30).json()
    workers: list[dict[str, Any]] = body["backends"]["ray"]
    return {one["url"]: one for one in workers}


def send_completion(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "m", "prompt": "Hi", "max_tokens": 8, "seed": 1, "min_p": 0.1, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def find_listen_addresses(family: dict[int, str]) -> set[str]:
    """Return the addresses that the processes listen on, in the kernel's notation."""
    at = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                at[f"socket:[{fields[9]}]"] = fields[1]
    addresses = set()
    for one in family:
        for link in Path(f"/proc/{one}/fd").glob("*"):
            try:
                addresses.add(at.get(link.readlink().name, ""))
            except OSError:  # it ended meanwhile
                continue
    return addresses - {""}


def find_listening_process(url: str) -> int:
    """Return the process that listens on a port."""
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
    raise AssertionError(f"no process listens at {url}")


def test_replicas_are_discovered_and_serve_requests(
    workers_file: Path, gateway: tuple[str, str]
) -> None:
    url, admin = gateway
    assert set(fetch_workers(admin)) == read_replicas(workers_file)

    texts = set()
    for _ in range(6):
        response = send_completion(url)
        assert response.status_code == 200, response.text
        assert "x-interlingua-loss" not in response.headers
        texts.add(response.json()["choices"][0]["text"])
    assert len(texts) == 1
    for replica in read_replicas(workers_file):
        assert httpx.get(f"{replica}/v1/models", timeout=30).status_code == 401
    assert KEY not in workers_file.read_text()


def test_replicas_listen_only_on_loopback(ray_serve: RayServeProcess) -> None:
    addresses = find_listen_addresses(find_descendants(ray_serve.process))
    assert len(addresses) > len(read_replicas(ray_serve.file))  # the replicas' and Ray's own
    assert {place.partition(":")[0] for place in addresses} <= LOOPBACK


def test_killed_replica_is_replaced_without_failed_requests(
    workers_file: Path, gateway: tuple[str, str]
) -> None:
    url, admin = gateway
    before = read_replicas(workers_file)
    victim = min(before)
    os.kill(find_listening_process(victim), signal.SIGKILL)
    for _ in range(8):
        response = send_completion(url)
        assert response.status_code == 200, (response.text, fetch_workers(admin))
    wait_until(
        # The new replica may be up before the old one's silence has lasted long enough.
        lambda: (
            len(read_replicas(workers_file) - before) == 1
            and victim not in read_replicas(workers_file)
        ),
        lambda: (before, read_replicas(workers_file)),
    )

    wait_until(
        lambda: set(fetch_workers(admin)) == read_replicas(workers_file),
        lambda: (fetch_workers(admin), read_replicas(workers_file)),
    )

    for _ in range(4):
        assert send_completion(url).status_code == 200
