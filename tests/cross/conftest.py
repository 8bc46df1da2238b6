"""One gateway in front of all scripted workers, shared by the tests of a module."""

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from msgspec import Struct, json
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway, build_services
from tests.cross.client import Client, DecodedResponse
from tests.cross.clients import CLIENTS
from tests.cross.script import SCENARIOS, RequestOptions
from tests.cross.worker_server import WorkerServer
from tests.cross.workers.table import WORKERS
from tests.protocols import find_rows

PROTOCOLS = (
    "openai",
    "databricks",
    "triton",
    "ovms",
    "ollama",
    {"name": "mindie", "prefix": "/mindie"},
    {"name": "tgi", "prefix": "/tgi"},
    "anthropic",
    *find_rows("MOUNT").values(),
)


def build_configuration(url: str) -> bytes:
    """Build pools for all workers, with a model for each worker and scenario.

    Retries and ejections are disabled, so that a failure in one test does not affect the next.
    """
    backends, models = {}, {}
    for name, row in WORKERS.items():
        for scenario in SCENARIOS:
            pool, at = name, f"{url}/{name}"
            if row.model_in_url:
                pool, at = f"{name}-{scenario}", f"{at}/{scenario}"
            backends[pool] = (
                {
                    "protocol": row.protocol,
                    "workers": [at],
                    "retries": {"max": 0},
                    "health": {"interval": "1m"},
                    "breaker": {"consecutive_failures": 10_000, "min_requests": 10_000},
                }
                | ({"profile": row.profile} if row.profile else {})
                | ({"options": row.options} if row.options else {})
            )
            models[f"{name}-{scenario}"] = {"backend": pool, "model": scenario}
    return json.encode(
        {
            "listeners": [{"address": "127.0.0.1:0", "protocols": PROTOCOLS}],
            "limits": {"drain_timeout": "1s"},
            "backends": backends,
            "models": models,
        }
    )


class CrossEnvironment(Struct):
    """The gateway's client, the workers and the gateway's records."""

    http: httpx.AsyncClient
    server: WorkerServer
    records: list[RequestRecord]
    port: int

    async def send(
        self, client: Client, worker: str, options: RequestOptions, scenario: str = "answer"
    ) -> httpx.Response:
        """Send one request and return the response."""
        request = client.build_request(f"{worker}-{scenario}", options)
        return await self.http.post(
            request.url.raw_path.decode(), content=request.content, headers=request.headers
        )

    async def send_and_read(
        self, client: Client, worker: str, options: RequestOptions, scenario: str = "answer"
    ) -> DecodedResponse:
        """Send a request, assert status 200 and the loss header, and decode the response."""
        response = await self.send(client, worker, options, scenario)
        assert response.status_code == 200, response.text
        losses = response.headers.get("x-interlingua-loss", "").split(",")
        reported = [f"{x.field}={x.reason}" for x in self.record.unsupported_parameters]
        assert list(filter(None, losses)) == list(dict.fromkeys(reported))
        return client.read_response(response, options)

    @property
    def record(self) -> RequestRecord:
        """The record of the only request."""
        [record] = self.records
        return record

    @property
    def lost(self) -> set[tuple[str, str]]:
        """The unsupported parameters that the gateway recorded for the only request."""
        return {(one.path or one.field, one.reason) for one in self.record.unsupported_parameters}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_environment() -> AsyncIterator[CrossEnvironment]:
    """The environment of all tests in a module."""
    records: list[RequestRecord] = []
    async with WorkerServer({name: row.script for name, row in WORKERS.items()}) as stage:
        services = replace(build_services(), observe_request=records.append)
        text = build_configuration(stage.url).decode()
        app = Gateway(load_text(text, "test.json", env=dict(os.environ)), services)
        [url] = await app.start()
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            yield CrossEnvironment(http, stage, records, int(url.rpartition(":")[2]))
        await app.stop()


@pytest.fixture
def environment(shared_environment: CrossEnvironment) -> Iterator[CrossEnvironment]:
    """The environment without requests; at the end, no worker may have recorded a fault."""
    shared_environment.records.clear()
    shared_environment.server.received.clear()
    yield shared_environment
    assert [
        (one.worker, fault) for one in shared_environment.server.received for fault in one.faults
    ] == []


def list_combinations() -> Iterator[Any]:
    """Every client with every worker, in turn streamed and not; the others are slow.

    Clients and workers share only the internal request and events, so that each pair of a client,
    a worker and a response mode covers what the whole product does.
    """
    for n, client in enumerate(CLIENTS):
        for m, worker in enumerate(WORKERS):
            for stream in (False, True):
                name = f"{client.name.replace(' ', '-')}-{worker}-{'stream' if stream else 'unary'}"
                marks = [pytest.mark.slow] if (n + m) % 2 != stream else []
                yield pytest.param(client, worker, stream, id=name, marks=marks)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize with every client, every worker, and both response modes."""
    names = metafunc.fixturenames
    if {"client", "worker", "stream"} <= set(names):
        metafunc.parametrize(("client", "worker", "stream"), list(list_combinations()))
        return
    if "client" in names:
        metafunc.parametrize("client", CLIENTS, ids=lambda one: one.name.replace(" ", "-"))
    if "worker" in names:
        metafunc.parametrize("worker", WORKERS)
    if "stream" in names:
        metafunc.parametrize("stream", [False, True], ids=["unary", "stream"])
