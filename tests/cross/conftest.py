"""One gateway before all workers at once, for all tests of a module."""

import os
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio
from msgspec import Struct, json
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway, build_services
from tests.cross.clients import CLIENTS, Client, DecodedResponse
from tests.cross.script import SCENARIOS, RequestOptions
from tests.cross.worker_server import WorkerServer
from tests.cross.workers.table import WORKERS

PROTOCOLS = (
    "openai",
    "databricks",
    "triton",
    "ovms",
    "ollama",
    {"name": "mindie", "prefix": "/mindie"},
    {"name": "tgi", "prefix": "/tgi"},
    "anthropic",
)


def build_configuration(url: str) -> bytes:
    """Each worker as a pool, and each of its plays as a model that is named after both.

    No fault of one test is to take a worker away from the next.
    """
    backends, models = {}, {}
    for name, row in WORKERS.items():
        for scenario in SCENARIOS:
            pool, at = name, f"{url}/{name}"
            if row.apart:
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
    """The gateway, its workers, and what it recorded."""

    http: httpx.AsyncClient
    server: WorkerServer
    records: list[RequestRecord]
    port: int

    async def send(
        self, client: Client, worker: str, options: RequestOptions, scenario: str = "answer"
    ) -> httpx.Response:
        """The answer to one question."""
        request = client.build_request(f"{worker}-{scenario}", options)
        return await self.http.post(
            request.url.raw_path.decode(), content=request.content, headers=request.headers
        )

    async def send_and_read(
        self, client: Client, worker: str, options: RequestOptions, scenario: str = "answer"
    ) -> DecodedResponse:
        """What a good answer says. Its headers must tell every loss."""
        answer = await self.send(client, worker, options, scenario)
        assert answer.status_code == 200, answer.text
        losses = answer.headers.get("x-interlingua-loss", "").split(",")
        assert list(filter(None, losses)) == [
            f"{x.field}={x.reason}" for x in self.record.unsupported_parameters
        ]
        return client.read_response(answer, options)

    @property
    def record(self) -> RequestRecord:
        """Of the one exchange."""
        [record] = self.records
        return record

    @property
    def lost(self) -> set[tuple[str, str]]:
        """What the gateway says was lost of the one exchange."""
        return {(one.path or one.field, one.reason) for one in self.record.unsupported_parameters}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_environment() -> AsyncIterator[CrossEnvironment]:
    """Stands as long as the module."""
    records: list[RequestRecord] = []
    async with WorkerServer({name: row.script for name, row in WORKERS.items()}) as stage:
        outside = replace(build_services(), observe_request=records.append)
        text = build_configuration(stage.url).decode()
        app = Gateway(load_text(text, "test.json", env=dict(os.environ)), outside)
        [url] = await app.start()
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            yield CrossEnvironment(http, stage, records, int(url.rpartition(":")[2]))
        await app.stop()


@pytest.fixture
def environment(shared_environment: CrossEnvironment) -> Iterator[CrossEnvironment]:
    """As it is before anybody asked. In the end no worker may have anything to find fault with."""
    shared_environment.records.clear()
    shared_environment.server.received.clear()
    yield shared_environment
    assert [
        (one.worker, fault) for one in shared_environment.server.received for fault in one.faults
    ] == []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every client with every worker, streamed and not, where a test takes them."""
    names = metafunc.fixturenames
    if "client" in names:
        metafunc.parametrize("client", CLIENTS, ids=lambda one: one.name.replace(" ", "-"))
    if "worker" in names:
        metafunc.parametrize("worker", WORKERS)
    if "stream" in names:
        metafunc.parametrize("stream", [False, True], ids=["whole", "stream"])
