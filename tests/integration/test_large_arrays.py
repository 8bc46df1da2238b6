"""Whatever endpoint answers with vectors, tokens or scores, no step encodes many of them.

The endpoints are those of the registry, so that a new one is tested here without further code.
"""

import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx
import pytest
import pytest_asyncio

from backends import echo
from backends.echo import _embed_inputs
from gateway.pipeline.strategies import TargetAttempt
from gateway.runtime.gateway import Gateway
from protocols.core import vectors
from protocols.core.events import Embedding, Event, TokenList
from protocols.core.interfaces import Endpoint, HttpResponse
from protocols.core.request import EmbeddingRequest
from tests.integration.test_every_endpoint import (
    CLIENTS,
    MOUNTS,
    REGISTRY,
    build_body,
    build_configuration,
    build_path,
    start_gateway,
)

MANY = ("documents", "passages", "texts", "text_2", "input", "inputs")
"""The fields with what is ranked or classified."""
LONG = 5 * vectors.MAX_ENCODED // 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    backends = {"echo": {"kind": "echo", "script": ["Hello", " world"]}}
    tasks = {"m": "chat", "e": "embedding", "r": "rerank", "c": "classify"}
    models = {name: {"backend": "echo", "task": task} for name, task in tasks.items()}
    gateway, url = await start_gateway(build_configuration(CLIENTS, backends, models), [])
    assert isinstance(gateway, Gateway)
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client
    await gateway.stop()


def list_endpoints() -> Iterator[Any]:
    """Endpoints that answer a request, with the mount of their protocol and profile."""
    for mount in CLIENTS:
        name, profile = MOUNTS[mount]
        for endpoint in REGISTRY.create_adapter(name, profile, {}).endpoints:
            if endpoint.task in ("generate", "tokenize") and endpoint.method == "POST":
                yield pytest.param(mount, endpoint, id=f"{mount}-{endpoint.path}")


def count_longest(value: Any) -> int:
    """The length of the longest array in JSON."""
    if isinstance(value, dict):
        return max(map(count_longest, value.values()), default=0)
    if not isinstance(value, list):
        return 0
    return max(len(value), max(map(count_longest, value), default=0))


def find_longest(response: httpx.Response) -> int:
    """The length of the longest array in a response; 0 if that is a stream."""
    try:
        return count_longest(json.loads(response.content))
    except ValueError:
        return 0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("model", ["m", "e"])
@pytest.mark.parametrize(("mount", "endpoint"), [*list_endpoints()])
async def test_long_arrays_are_encoded_in_steps_by_a_thread(
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    mount: str,
    endpoint: Endpoint,
    model: str,
) -> None:
    """A generating model, and one for embeddings."""
    lengths, threads = list[int](), set[int]()

    def embed(request: EmbeddingRequest) -> Sequence[Event]:
        events = _embed_inputs(request)
        return [
            Embedding(one.index, (0.5,) * LONG) if type(one) is Embedding else one for one in events
        ]

    def encode(values: Sequence[float]) -> bytes:
        lengths.append(len(values))
        return encode_step(values)

    def build(
        self: TargetAttempt, events: Sequence[Event], body: bytes | None = None
    ) -> HttpResponse:
        longer = [
            TokenList((7,) * LONG, ("a",) * LONG) if type(one) is TokenList else one
            for one in events
        ]
        threads.add(threading.get_ident())
        return build_response(self, longer, body)

    encode_step, build_response = vectors._encode_step, TargetAttempt.build_response
    monkeypatch.setattr(echo, "_embed_inputs", embed)
    monkeypatch.setattr(vectors, "_encode_step", encode)
    monkeypatch.setattr(TargetAttempt, "build_response", build)
    response = await http.post(
        build_path(mount, endpoint, model), json=build_body(mount, endpoint, model)
    )

    longest = find_longest(response)
    if longest >= LONG:
        assert sum(lengths) >= longest, "all by these steps"
        assert max(lengths) <= vectors.MAX_ENCODED
        if endpoint.task != "tokenize":
            assert threading.get_ident() not in threads


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("model", ["r", "c"])
@pytest.mark.parametrize(("mount", "endpoint"), [*list_endpoints()])
async def test_scores_and_classes_of_many_inputs_are_encoded_in_steps(
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    mount: str,
    endpoint: Endpoint,
    model: str,
) -> None:
    """A model that ranks, and one that classifies."""
    lengths, count, most = list[int](), 25, 10

    def encode(values: Sequence[Any]) -> bytes:
        lengths.append(len(values))
        return encode_step(values)

    encode_step = vectors._encode_step
    monkeypatch.setattr(vectors, "_encode_step", encode)
    monkeypatch.setattr(vectors, "MAX_ENCODED", most)
    body = {
        name: [value[0]] * count if isinstance(value, list) and name in MANY else value
        for name, value in build_body(mount, endpoint, model).items()
    }
    response = await http.post(build_path(mount, endpoint, model), json=body)

    longest = find_longest(response)
    if longest >= count:
        assert sum(lengths) >= longest, "all by these steps"
        assert max(lengths) <= most


def test_steps_are_the_same_array() -> None:
    for length in (0, 1, vectors.MAX_ENCODED, vectors.MAX_ENCODED + 1, LONG):
        values = [number / 4 for number in range(length)]

        assert json.loads(bytes(vectors.encode_array(values))) == values
