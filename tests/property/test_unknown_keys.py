"""A key that nobody listed, at any level of a request, is kept, reported or refused.

Each object of a request of each client protocol gets such a key in turn, for a worker of each
protocol. So no level and no pair can be forgotten.
"""

import asyncio
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from backends.interfaces import Deadline, RequestContext
from backends.pool.pool import PoolBackend
from backends.pool.settings import PoolSettings, WorkerSourceSettings
from gateway.config.registry import load_symbol
from gateway.pipeline.strategies import TargetAttempt
from gateway.routing.paths import AdapterMount, PathRouter
from gateway.routing.router import RequestDefaults, Router, Target, compile_model
from gateway.runtime.build import build_adapter
from protocols import PROTOCOLS
from protocols.core.catalog import ModelInfo
from protocols.core.errors import ClientError, UnknownParameter
from protocols.core.interfaces import ClientRequest, ResponseContext

KEY = "x_unknown"
VALUE = "value-of-the-unknown-key"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = "data:image/png;base64,aGk="
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "user", "content": "so?"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}
PARTS: dict[str, Any] = {
    "model": "m",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "image_url", "image_url": {"url": IMAGE}},
            ],
        }
    ],
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "1"}],
                }
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "disabled"},
}
OLLAMA: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "hi", "images": ["aGk="]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": "b"}}}],
        },
        {"role": "tool", "content": "1", "tool_name": "f"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "options": {"temperature": 0.5},
    "stream": False,
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
}
REQUESTS: Mapping[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "openai": (
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", PARTS),
        ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 5}),
        ("/v1/embeddings", {"model": "m", "input": "hi"}),
        ("/v1/responses", RESPONSES),
    ),
    "anthropic": (("/v1/messages", MESSAGES),),
    "ollama": (("/api/chat", OLLAMA), ("/api/generate", {"model": "m", "prompt": "hi"})),
    "tgi": (
        ("/v1/chat/completions", CHAT),
        ("/generate", {"inputs": "hi", "parameters": {"temperature": 0.5}}),
    ),
    "databricks": (("/serving-endpoints/m/invocations", {**CHAT, "model": None}),),
    "ovms": (("/v3/chat/completions", CHAT), ("/v3/chat/completions", PARTS)),
    "mindie": (("/v1/chat/completions", CHAT), ("/generate", {"model": "m", "prompt": "hi"})),
    "triton": (("/v2/models/m/generate", {"text_input": "hi", "parameters": {"max_tokens": 5}}),),
}


def list_requests() -> Iterator[Any]:
    """A client protocol, a path and a body."""
    for name, requests in REQUESTS.items():
        for i, (path, body) in enumerate(requests):
            yield pytest.param(name, path, body, id=f"{name}{path}#{i}")


def list_workers() -> Iterator[Any]:
    """Each protocol of workers, in each of its profiles."""
    for name, reference in PROTOCOLS.items():
        kind = load_symbol(reference)
        if hasattr(kind, "encode_request"):
            for profile in kind.profiles:
                yield pytest.param(build_adapter(name, profile, {}), id=f"{name}-{profile}")
    responses = build_adapter("openai", "openai", {"worker_api": "both"})
    yield pytest.param(responses, id="openai-responses")


def list_places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each object in a body."""
    if isinstance(value, dict):
        yield at
        for key, inner in value.items():
            yield from list_places(inner, (*at, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from list_places(inner, (*at, i))


def add_key(body: Mapping[str, Any], place: tuple[Any, ...]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(body))
    target: Any = changed
    for step in place:
        target = target[step]
    target[KEY] = VALUE
    return changed


HEADERS = {"content-type": "application/json"}


def clock() -> float:
    return 0.0


def prepare(
    client: Any, worker: Any, path: str, body: Mapping[str, Any], **model: Any
) -> tuple[bytes, list[str]]:
    """What the worker gets, and the reported fields. Raises ClientError."""
    backend = asyncio.run(build_pool(worker))
    info = ModelInfo("m", (), max_tokens=model.get("max_tokens"))
    target = Target("1", "w", backend, "b")
    compiled = compile_model(
        info,
        {"1": target},
        {"1": 1},
        model.get("on_loss", "report"),
        model.get("defaults", RequestDefaults()),
    )
    route = Router({"m": compiled}, draw=clock).route("m")
    match = PathRouter([AdapterMount(client)]).find_endpoint("POST", path)
    call = ClientRequest(
        match.endpoint, match.params, HEADERS, "", msgspec.json.encode(body), path, "r"
    )
    context = ResponseContext("r", 1, "m", "1", "w", clock, settings=compiled.settings)
    attempt = TargetAttempt(
        client,
        call,
        route,
        response_context=context,
        context=RequestContext("r", Deadline(clock, 60), clock),
    )
    attempt.prepare()
    prepared = attempt.prepared
    if prepared.passthrough is not None:
        sent = prepared.passthrough.upstream_request
    else:
        sent = worker.encode_request(prepared.request)
    return sent.body, [one.field for one in attempt.unsupported_parameters]


_pools: dict[int, PoolBackend] = {}


async def build_pool(adapter: Any) -> PoolBackend:
    if id(adapter) not in _pools:
        _pools[id(adapter)] = PoolBackend(
            PoolSettings(protocol=adapter.name, workers=(WorkerSourceSettings("http://w"),)),
            adapter=adapter,
            clock=clock,
            draw=clock,
        )
    return _pools[id(adapter)]


def is_reported(place: tuple[Any, ...], reported: list[str]) -> bool:
    """Whether the key is reported, or the whole field that it stands in."""
    return any(KEY in field for field in reported) or (bool(place) and place[0] in reported)


@pytest.mark.parametrize("worker", list(list_workers()))
@pytest.mark.parametrize(("name", "path", "body"), list(list_requests()))
def test_an_unknown_key_is_kept_reported_or_refused(
    name: str, path: str, body: dict[str, Any], worker: Any
) -> None:
    client = build_adapter(name, None, {})
    lost = []
    for place in list_places(body):
        try:
            sent, reported = prepare(client, worker, path, add_key(body, place))
        except ClientError:
            continue
        if VALUE.encode() not in sent and not is_reported(place, reported):
            lost.append(".".join(map(str, place)))

    assert lost == []


@pytest.mark.parametrize(("name", "path", "body"), list(list_requests()))
def test_the_requests_are_valid(name: str, path: str, body: dict[str, Any]) -> None:
    """Otherwise the law above would hold because each is refused."""
    sent, reported = prepare(build_adapter(name, None, {}), VLLM, path, body)

    assert b"hi" in sent
    assert not [one for one in reported if KEY in one]


VLLM = build_adapter("openai", "vllm", {})
SAME_PROTOCOL: Mapping[str, Any] = {
    "openai": VLLM,
    "anthropic": build_adapter("anthropic", None, {}),
    "databricks": build_adapter("databricks", None, {}),
    "ovms": build_adapter("ovms", None, {}),
    "mindie": build_adapter("mindie", None, {}),
    "tgi": build_adapter("tgi", None, {}),
}
MODELS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "limit and default": {
        "max_tokens": 50,
        "defaults": RequestDefaults(sampling={"temperature": 0.5}),
    },
    "strict": {"on_loss": "reject"},
}
REPORTED = frozenset({("tgi", "/generate")})
"""Endpoints whose workers get known fields only: unknown ones are reported."""
SETTINGS_FIELDS = (
    "max_tokens", "max_new_tokens", "max_completion_tokens", "max_output_tokens", "temperature",
)  # fmt: skip
"""The fields that the limit and the default name."""


def list_same_protocol_requests() -> Iterator[Any]:
    for name, path, body in (one.values for one in list_requests()):
        if name in SAME_PROTOCOL and (name, path) not in REPORTED:
            worker = RESPONSES_WORKER if path.endswith("/responses") else SAME_PROTOCOL[name]
            yield pytest.param(name, path, body, worker, id=f"{name}{path}")


RESPONSES_WORKER = build_adapter("openai", "openai", {"worker_api": "both"})


@pytest.mark.parametrize(("name", "path", "body", "worker"), list(list_same_protocol_requests()))
def test_a_worker_of_the_client_s_protocol_gets_each_unknown_key_whatever_the_model_s_settings(
    name: str, path: str, body: dict[str, Any], worker: Any
) -> None:
    client = build_adapter(name, None, {})
    failures = []
    for place in list_places(body):
        bodies: dict[str, Any] = {}
        for model, settings in MODELS.items():
            try:
                sent, reported = prepare(client, worker, path, add_key(body, place), **settings)
            except UnknownParameter:  # as the real server refuses it
                bodies[model] = None
                continue
            if VALUE.encode() not in sent or is_reported(place, reported):
                failures.append((model, ".".join(map(str, place))))
            fields = msgspec.json.decode(sent)
            bodies[model] = strip_settings(fields)
        if not bodies["plain"] == bodies["strict"] == bodies["limit and default"]:
            failures.append(("bodies differ", ".".join(map(str, place))))

    assert failures == []


def strip_settings(value: Any) -> Any:
    """A worker's body without what the limit and the default name."""
    names = {*SETTINGS_FIELDS, "id"}  # the id counts the gateway's requests
    fields = {key: one for key, one in value.items() if key not in names}
    if isinstance(fields.get("parameters"), dict):
        fields["parameters"] = {k: v for k, v in fields["parameters"].items() if k not in names}
    return fields
