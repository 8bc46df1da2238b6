"""Every query of the dashboard returns data from a real Prometheus that scrapes a busy gateway."""

import contextlib
import math
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import httpx
import pytest
import yaml

from tests.deploy.tools import find_tool
from tests.deploy.watched import list_expressions, list_rules
from tests.integration.test_command import Command
from tests.support.ports import reserve_port
from tests.support.redis_server import RedisServer

NO_GRAFANA: Final = "Grafana: neither Debian, PyPI nor npm has its server; Prometheus is asked"
KEY: Final = "sk-clients"
WORKER: Final = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
limits: {shutdown_delay: 0s}
backends: {echo: {kind: echo, script: [a, b, c, d], delay: 20ms}}
models: {m: {backend: echo}}
"""
GATEWAY: Final = """
listeners: [{address: "127.0.0.1:0", protocols: [openai, anthropic]}]
admin: {address: "127.0.0.1:0"}
limits: {shutdown_delay: 0s}
state: {redis: REDIS}
observe: {usage: USAGE, traces: "http://127.0.0.1:9"}
keys:
  - name: clients
    sha256: 2335c853aa3ad7eb3e2b74213262e00dae34f5eff91411b977b71a2100922ddd
    limits: {requests: 100000/min, budget: 5M/day}
backends:
  good: {protocol: openai, workers: ["WORKER"], unsupported_parameters: [sampling.seed]}
  narrow:
    protocol: openai
    workers: [{url: "WORKER", max_concurrency: 1}]
    queue: {max: 1, wait: 30ms}
  dead: {protocol: openai, workers: ["http://127.0.0.1:9"]}
  half: {protocol: openai, workers: ["http://127.0.0.1:9", "WORKER"]}
models:
  m: {backend: good}
  narrow: {backend: narrow, model: m}
  dead: {backend: dead, model: m}
  half: {backend: half, model: m}
  fallback: {versions: {"1": {backend: dead, model: m}}, fallback: [m]}
"""


@contextmanager
def run_command(file: Path, text: str) -> Iterator[Command]:
    """Run a gateway with a configuration."""
    file.write_text(text)
    command = Command("serve", str(file))
    try:
        command.serving()
        yield command
    finally:
        command.close()


class Clients:
    """Clients that send requests of every kind until they are stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._send_all) for _ in range(4)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _send_all(self) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=self._url, headers=headers, timeout=30) as client:
            while not self._stopped.is_set():
                for model in ("m", "narrow", "narrow", "dead", "half", "fallback"):
                    self._send(client, model, seed=1)
                self._send(client, "m", stream=False)
                self._disconnect(client)
                self._send_malformed_request()

    def _send(self, client: httpx.Client, model: str, **fields: Any) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": "x"}], "stream": True}
        client.post("/v1/chat/completions", json=body | fields)

    def _disconnect(self, client: httpx.Client) -> None:
        """Send a request, and close the connection at the first event."""
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines(), None)

    def _send_malformed_request(self) -> None:
        host, _, port = self._url.rpartition("/")[2].partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GARBAGE\r\n\r\n")
            connection.recv(1000)


@contextmanager
def run_prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run a Prometheus that scrapes ``target``; yields its URL."""
    place = f"127.0.0.1:{reserve_port()}"
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": "interlingua", "static_configs": [{"targets": [target]}]}],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    arguments = (
        f"--config.file={file}",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={place}",
    )
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([find_tool("prometheus"), *arguments], stdout=log, stderr=log)
        try:
            yield f"http://{place}"
        finally:
            process.kill()
            process.wait()


def list_queries() -> Mapping[str, str]:
    """The dashboard's queries by panel, for every value of its variables."""
    rules = {one.get("alert") or one["record"] for one in list_rules()}
    return {
        name: re.sub(r'"\$\w+"', '".*"', query)
        for name, query in list_expressions().items()
        if name not in rules
    }


def has_data(prometheus: str, query: str) -> bool:
    """Whether the query has a value, and not only that of an empty histogram."""
    response = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=30)
    samples = response.raise_for_status().json()["data"]["result"]
    return any(not math.isnan(float(sample["value"][1])) for sample in samples)


@pytest.mark.slow
def test_every_query_of_the_dashboard_has_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given a busy gateway with failing workers, a short queue, budgets and a shared store."""
    with capsys.disabled():
        print(f"\nnot run: {NO_GRAFANA}")  # noqa: T201 - it is for readers
    with (
        RedisServer() as redis,
        run_command(tmp_path / "worker.yaml", WORKER) as worker,
        run_command(
            tmp_path / "gateway.yaml",
            GATEWAY.replace("WORKER", worker.serving())
            .replace("REDIS", redis.url)
            .replace("USAGE", str(tmp_path / "usage.sqlite")),
        ) as gateway,
    ):
        url, admin = gateway.read_urls()
        with (
            Clients(url),
            run_prometheus(tmp_path, admin.removeprefix("http://")) as prometheus,
        ):
            missing = dict(list_queries())
            until = time.monotonic() + 120
            while missing and time.monotonic() < until:
                time.sleep(1)
                with contextlib.suppress(httpx.TransportError):
                    missing = {
                        name: query
                        for name, query in missing.items()
                        if not has_data(prometheus, query)
                    }

    assert missing == {}
