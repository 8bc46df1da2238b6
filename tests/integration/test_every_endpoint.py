"""Every endpoint of the registry, over a socket, with pool workers of every protocol.

The workers are a second gateway, which serves each protocol and profile that a pool can speak below
a prefix, with scripted models: its endpoints are those of the workers. A new endpoint of a protocol
is tested here without further code, and fails until ``BODIES`` has a request for its operation.
"""

import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from msgspec import Struct
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.config.registry import ProtocolRegistry
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway, build_services
from protocols import PROTOCOLS
from protocols.core.interfaces import Endpoint, get_request_kinds
from protocols.openai.hosted_apis import HOSTED_APIS
from tests.support.request_bodies import BODIES, PAIR

REGISTRY: Final = ProtocolRegistry(PROTOCOLS)
MOUNTS: Final = {
    f"{name}-{profile}": (name, profile)
    for name in PROTOCOLS
    for profile in REGISTRY.get_profiles(name)
}
CLIENTS: Final = [
    mount
    for mount, (name, profile) in MOUNTS.items()
    if REGISTRY.serves_clients(name) and profile not in HOSTED_APIS
]
"""Without the profiles of hosted APIs, which are the default one towards clients."""
WORKERS: Final = [mount for mount, (name, _) in MOUNTS.items() if REGISTRY.serves_workers(name)]
PAIRS: Final = [
    (client, worker)
    for client in CLIENTS
    for worker in WORKERS
    if MOUNTS[client][0] == MOUNTS[worker][0]
    or MOUNTS[client][1] == REGISTRY.get_profiles(MOUNTS[client][0])[0]
]
"""Each client profile with its protocol's workers, and the default profile with all workers."""

ANSWERED_BY_GATEWAY: Final = {"nothing", "stop", "tokens"}
"""OVMS's unknown paths, an unknown request id, and token ids for workers that take texts."""
NOT_OFFERED: Final = {
    "triton": ("embedding", "rerank"),
}
"""Request kinds that the scripted text model of these worker protocols does not have."""
TEXT_TOKENIZERS: Final = ("openai-sglang", "openai-llamacpp")
"""Profiles whose workers tokenize texts and no conversations."""
FOREIGN_TOKENIZERS: Final = {("tokenize", "openai-llamacpp"), ("tgi", "openai-sglang")}
"""Operations that the workers' gateway (vLLM's profile) rejects, or whose tokens have no texts."""


class TwoGateways(Struct):
    """The gateway under test, its records, and the records of the workers' gateway.

    Of the clients for 17,000 requests, aiohttp's takes the least time.
    """

    http: aiohttp.ClientSession
    records: list[RequestRecord]
    worker_records: list[RequestRecord]


def build_configuration(mounts: list[str], backends: Any, models: Any) -> str:
    protocols = [
        {"name": MOUNTS[mount][0], "profile": MOUNTS[mount][1], "prefix": f"/{mount}"}
        for mount in mounts
    ]
    configuration = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": protocols}],
        "limits": {"drain_timeout": "1s"},
        "backends": backends,
        "models": models,
    }
    return msgspec.json.encode(configuration).decode()


async def start_gateway(text: str, records: list[RequestRecord]) -> tuple[Gateway, str]:
    services = replace(build_services(), observe_request=records.append)
    gateway = Gateway(load_text(text, "test.json", env=dict(os.environ)), services)
    [url] = await gateway.start()
    return gateway, url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways() -> AsyncIterator[TwoGateways]:
    """A gateway with one model for each kind of worker; the model has the worker's name."""
    worker_records: list[RequestRecord] = []
    records: list[RequestRecord] = []
    backend = {"kind": "echo", "script": ["Hello", " world"]}
    models = {"m": {"versions": {"1": {"backend": "echo", "model": "m"}}}}
    workers, workers_url = await start_gateway(
        build_configuration(WORKERS, {"echo": backend}, models), worker_records
    )
    pools = {
        worker: {
            "protocol": MOUNTS[worker][0],
            "profile": MOUNTS[worker][1],
            "workers": [f"{workers_url}/{worker}"],
            "retries": {"max": 0},
            "health": {"interval": "1h"},
            "breaker": {"consecutive_failures": 10_000, "min_requests": 10_000},
        }
        for worker in WORKERS
    }
    models = {worker: {"versions": {"1": {"backend": worker, "model": "m"}}} for worker in WORKERS}
    gateway, url = await start_gateway(build_configuration(CLIENTS, pools, models), records)
    async with aiohttp.ClientSession(url) as http:
        yield TwoGateways(http, records, worker_records)
    await gateway.stop()
    await workers.stop()


def build_path(mount: str, endpoint: Endpoint, model: str) -> str:
    params = {"model": model, "deployment": model, "name": model, "version": "1", "served": "1"}
    steps = [
        params.get(step[1:-1], "x") if step.startswith("{") else step
        for step in endpoint.path.split("/")
    ]
    is_dated = endpoint.path.startswith("/openai/") and "/v1/" not in endpoint.path
    return f"/{mount}" + "/".join(steps) + ("?api-version=2024-10-21" if is_dated else "")


def build_body(mount: str, endpoint: Endpoint, model: str) -> Mapping[str, Any]:
    """Build the request of an endpoint; one that the gateway answers itself needs none."""
    if endpoint.task in ("inform", "recall"):
        return {}
    body = BODIES[MOUNTS[mount][0]][endpoint.operation]
    if mount == "triton-trtllm" and endpoint.operation != "infer":
        body = {**body, "max_tokens": 4, "bad_words": "", "stop_words": ""}
    return body if "{model}" in endpoint.path else {"model": model, **body}


def is_offered(endpoint: Endpoint, kind: str, worker: str) -> bool:
    """Return whether the worker has an endpoint for this request."""
    protocol, profile = MOUNTS[worker]
    adapter: Any = REGISTRY.create_adapter(protocol, profile, {})
    if endpoint.operation in ("response tokens", "count_tokens") and worker in TEXT_TOKENIZERS:
        return False
    if endpoint.operation == "count_tokens" and protocol == "anthropic":
        return True  # passed through
    return kind in get_request_kinds(adapter) and kind not in NOT_OFFERED.get(protocol, ())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("client", "worker"), PAIRS)
async def test_every_endpoint_reaches_the_workers_that_offer_it(
    gateways: TwoGateways, client: str, worker: str
) -> None:
    faults = []
    for endpoint in REGISTRY.create_adapter(*MOUNTS[client], {}).endpoints:
        gateways.records.clear()
        gateways.worker_records.clear()
        async with gateways.http.request(
            endpoint.method,
            build_path(client, endpoint, worker),
            json=build_body(client, endpoint, worker),
            headers={"anthropic-version": "2023-06-01"},
        ) as response:
            text = await response.text()
        [record] = gateways.records
        has_worker_request = any(one.method == "POST" for one in gateways.worker_records)
        fault = ""
        if record.error == "InternalError":
            fault = "the gateway failed"
        elif (
            endpoint.task in ("generate", "tokenize")
            and endpoint.operation not in ANSWERED_BY_GATEWAY
        ):
            offered = is_offered(endpoint, record.operation, worker)
            needs_200 = record.operation != "detokenize" and not (
                {(record.operation, worker), (record.protocol, worker)} & FOREIGN_TOKENIZERS
                and record.operation == "tokenize"
            )
            if has_worker_request is not offered:
                fault = f"the worker {'was' if has_worker_request else 'was not'} asked"
            elif offered and needs_200 and response.status != 200:
                fault = "no answer"
        if fault:
            faults.append((fault, endpoint.path, response.status, text[:200]))

    assert faults == []


@pytest.mark.asyncio(loop_scope="module")
async def test_endpoints_played_are_those_that_the_gateway_lists(gateways: TwoGateways) -> None:
    async with gateways.http.get("/") as response:
        listed = (await response.json())["endpoints"]
    played: dict[str, list[str]] = {}

    for client in CLIENTS:
        adapter = REGISTRY.create_adapter(*MOUNTS[client], {})
        played.setdefault(adapter.name, []).extend(
            f"{one.method} /{client}{one.path}" for one in adapter.endpoints
        )

    assert listed == played


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", ["/v1/classify", "/v1/tokenize", "/v1/rerank"])
async def test_endpoint_that_no_worker_has_is_not_found(gateways: TwoGateways, path: str) -> None:
    """Workers of Azure have none of these endpoints, so the client gets a 404."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/classify": {"input": "hi"},
        "/v1/tokenize": {"prompt": "hi"},
        "/v1/rerank": PAIR,
    }
    async with gateways.http.post(
        f"/openai-openai{path}", json={"model": "openai-azure", **bodies[path]}
    ) as response:
        error = (await response.json())["error"]

    assert response.status == 404
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "unknown_url"


@pytest.mark.asyncio(loop_scope="module")
async def test_worker_without_the_texts_of_tokens_is_an_error(gateways: TwoGateways) -> None:
    """SGLang's /tokenize returns only ids, and this client needs the texts."""
    async with gateways.http.post(
        "/tgi-3/tokenize", json={"inputs": "hi", "model": "openai-sglang"}
    ) as response:
        assert response.status == 424

    assert gateways.records[-1].error == "WorkerFailed"
