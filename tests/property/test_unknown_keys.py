"""An unknown key at any level of a request is kept, reported or rejected.

Each object in a request of each client protocol gets an unknown key in turn, for a worker of each
protocol, so no level and no pair can be forgotten.
"""

import asyncio
import copy
import functools
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from backends.interfaces import Deadline, RequestContext, ignore_memory
from backends.pool.attempt_request import filter_headers
from backends.pool.pool import PoolBackend
from backends.pool.settings import PoolSettings, WorkerSourceSettings
from gateway.config.registry import load_symbol
from gateway.pipeline.strategies import TargetAttempt
from gateway.routing.router import RequestDefaults, Router, Target, compile_model
from gateway.runtime.build import build_adapter
from protocols import PROTOCOLS
from protocols.core.catalog import ModelInfo, ModelTask
from protocols.core.errors import (
    ClientError,
    InvalidParameter,
    UnknownParameter,
)
from protocols.core.interfaces import (
    ClientRequest,
    ResponseContext,
    UpstreamRequest,
    get_own_headers,
)
from protocols.core.loss import UnsupportedParameter
from tests.protocols import find_rows
from tests.support.path_routers import get_adapter, get_path_router
from tests.support.request_bodies import BODIES

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
OPTIONS: dict[str, Any] = {
    **CHAT,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}},
    "metadata": {"a": "b"},
}
DATABRICKS_OPTIONS = {
    **{key: one for key, one in OPTIONS.items() if not key.startswith("stream")},
    "model": None,
}
"""The service rejects options of streams."""
MINDIE_OPTIONS = {
    **{key: one for key, one in OPTIONS.items() if key not in ("stream_options", "metadata")}
}
"""The server has no such fields."""
ALLOWED_TOOLS: dict[str, Any] = {
    **CHAT,
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    },
}
CUSTOM_TOOLS: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "f", "input": "a"}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ],
    "tools": [{"type": "custom", "custom": {"name": "f", "description": "d"}}],
    "tool_choice": {"type": "custom", "custom": {"name": "f"}},
}
FUNCTIONS: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "f", "arguments": "{}"},
        },
        {"role": "function", "name": "f", "content": "1"},
    ],
    "functions": [FUNCTION],
    "function_call": {"name": "f"},
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
                {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
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
DOCUMENTS: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {
                    "type": "document",
                    "source": {"type": "text", "media_type": "text/plain", "data": "d"},
                    "title": "t",
                },
                {
                    "type": "document",
                    "source": {"type": "content", "content": [{"type": "text", "text": "e"}]},
                },
                {
                    "type": "search_result",
                    "title": "t",
                    "source": "s",
                    "content": [{"type": "text", "text": "r"}],
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
                {
                    "type": "web_search_tool_result",
                    "tool_use_id": "s1",
                    "content": [{"type": "web_search_result", "title": "t", "url": "u"}],
                },
                {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [
                        {
                            "type": "image",
                            "source": {
                                "type": "base64",
                                "media_type": "image/png",
                                "data": "aGk=",
                            },
                        }
                    ],
                }
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "adaptive"},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
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
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
}
CUSTOM_ITEMS: dict[str, Any] = {
    "model": "m",
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "hi"},
                {"type": "input_image", "image_url": IMAGE},
                {"type": "input_file", "filename": "a.pdf", "file_data": "data:,aGk="},
            ],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "a", "annotations": []},
                {"type": "refusal", "refusal": "no"},
            ],
        },
        {"type": "custom_tool_call", "call_id": "c1", "name": "g", "input": "a"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "1"}],
        },
    ],
    "tools": [
        {"type": "custom", "name": "g", "format": {"type": "text"}},
        {
            "type": "namespace",
            "name": "n",
            "description": "d",
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        },
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "g"}, {"type": "function", "name": "f"}],
    },
    "text": {"format": {"type": "json_schema", "name": "o", "schema": SCHEMA}},
}
MEDIA: dict[str, Any] = {
    "model": "m",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
                {"type": "file", "file": {"file_data": "data:,aGk=", "filename": "a.pdf"}},
                {"type": "video_url", "video_url": {"url": "https://x/v.mp4"}},
            ],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "so?"},
    ],
    "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]},
}
TENSORS: dict[str, Any] = {
    "inputs": [
        {
            "name": "text_input",
            "datatype": "BYTES",
            "shape": [1],
            "data": ["hi"],
            "parameters": {},
        }
    ],
    "outputs": [{"name": "text_output", "parameters": {}}],
    "parameters": {"max_tokens": 5},
}
DETAILED_REQUESTS: Mapping[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "openai": (
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", PARTS),
        ("/v1/chat/completions", OPTIONS),
        ("/v1/chat/completions", ALLOWED_TOOLS),
        ("/v1/chat/completions", CUSTOM_TOOLS),
        ("/v1/chat/completions", FUNCTIONS),
        ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 5}),
        ("/v1/embeddings", {"model": "m", "input": "hi"}),
        ("/v1/responses", RESPONSES),
        ("/v1/responses", CUSTOM_ITEMS),
        ("/v1/chat/completions", MEDIA),
    ),
    "anthropic": (("/v1/messages", MESSAGES), ("/v1/messages", DOCUMENTS)),
    "ollama": (("/api/chat", OLLAMA), ("/api/generate", {"model": "m", "prompt": "hi"})),
    "tgi": (
        ("/v1/chat/completions", CHAT),
        ("/generate", {"inputs": "hi", "parameters": {"temperature": 0.5}}),
    ),
    "databricks": (
        ("/serving-endpoints/m/invocations", {**CHAT, "model": None}),
        ("/serving-endpoints/m/invocations", DATABRICKS_OPTIONS),
    ),
    "ovms": (
        ("/v3/chat/completions", CHAT),
        ("/v3/chat/completions", PARTS),
        ("/v3/chat/completions", OPTIONS),
    ),
    "mindie": (
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", PARTS),
        ("/v1/chat/completions", MINDIE_OPTIONS),
        ("/generate", {"model": "m", "prompt": "hi"}),
        ("/v2/models/m/generate", {"text_input": [{"type": "text", "text": "hi"}]}),
    ),
    "triton": (
        ("/v2/models/m/generate", {"text_input": "hi", "parameters": {"max_tokens": 5}}),
        ("/v2/models/m/infer", TENSORS),
    ),
    **find_rows("REQUESTS"),
}


def add_small_requests(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the detailed requests of a protocol, and a small one for each other operation."""
    router = get_path_router(build_adapter(name, None, {}))
    operations = set()
    for path, body in (*DETAILED_REQUESTS[name], *list_small_requests(name)):
        operation = router.find_endpoint("POST", path).endpoint.operation
        if operation not in operations or (path, body) in DETAILED_REQUESTS[name]:
            operations.add(operation)
            yield path, body


def list_small_requests(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a small request for each endpoint of a protocol that is translated."""
    for endpoint in build_adapter(name, None, {}).endpoints:
        is_translated = endpoint.task in ("generate", "tokenize")
        if is_translated and endpoint.operation not in NOT_TRANSLATED:
            model = {} if "{" in endpoint.path else {"model": "m"}
            path = endpoint.path.replace("{version}", "1")
            body = BODIES[name][endpoint.operation]
            yield re.sub(r"\{[^}]*\}", "m", path), {**model, **body}


NOT_TRANSLATED = {"nothing"}
"""OVMS's paths that no request reaches."""
REQUESTS: Mapping[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    name: tuple(add_small_requests(name)) for name in PROTOCOLS
}


def list_requests() -> Iterator[Any]:
    """Return a client protocol, a path and a body for each request."""
    for name, requests in REQUESTS.items():
        for i, (path, body) in enumerate(requests):
            yield pytest.param(name, path, body, id=f"{name}{path}#{i}")


@functools.cache
def list_workers() -> tuple[Any, ...]:
    """Return each worker protocol in each of its profiles; all tests share these adapters."""
    adapters = {
        f"{name}-{profile}": build_adapter(name, profile, {})
        for name, reference in PROTOCOLS.items()
        if hasattr(kind := load_symbol(reference), "encode_request")
        for profile in kind.profiles
    }
    adapters["openai-responses"] = build_adapter("openai", "openai", {"worker_api": "both"})
    return tuple(pytest.param(adapter, id=name) for name, adapter in adapters.items())


def list_places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of each object in a body."""
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
    """Return the worker's body and the reported fields. Raises ClientError."""
    sent, losses = prepare_request(client, worker, path, body, **model)
    return sent.body, [one.field for one in losses]


def prepare_request(
    client: Any, worker: Any, path: str, body: Mapping[str, Any], **model: Any
) -> tuple[UpstreamRequest, tuple[UnsupportedParameter, ...]]:
    """Return the worker's request and what is reported. Raises ClientError."""
    backend = build_pool(worker)
    task: ModelTask = "embedding" if "embed" in path else "chat"
    info = ModelInfo("m", (), task, max_tokens=model.get("max_tokens"))
    target = Target("1", "w", backend, "b")
    compiled = compile_model(
        info,
        {"1": target},
        {"1": 1},
        model.get("on_loss", "report"),
        model.get("defaults", RequestDefaults()),
    )
    route = Router({"m": compiled}, draw=clock).route("m")
    match = get_path_router(client).find_endpoint("POST", path)
    call = ClientRequest(
        match.endpoint,
        match.params,
        {**HEADERS, **model.get("headers", {})},
        model.get("query", ""),
        msgspec.json.encode(body),
        path,
        "r",
    )
    context = ResponseContext("r", 1, "m", "1", "w", clock, settings=compiled.settings)
    attempt = TargetAttempt.prepare(
        client,
        call,
        route,
        response_context=context,
        context=RequestContext("r", Deadline(clock, 60), clock, ignore_memory),
    )
    prepared = attempt.prepared
    if prepared.passthrough is not None:
        sent = prepared.passthrough.upstream_request
    else:
        sent = worker.encode_request(prepared.request)
    wire, headers = filter_headers(sent, attempt.context, get_own_headers(worker))
    wire = replace(wire, headers=wire.headers + headers)
    return wire, attempt.unsupported_parameters


@functools.cache
def build_pool(adapter: Any) -> PoolBackend:
    """Return a pool of one worker of this protocol, which all tests share."""

    async def build() -> PoolBackend:
        return PoolBackend(
            PoolSettings(protocol=adapter.name, workers=(WorkerSourceSettings("http://w"),)),
            adapter=adapter,
            clock=clock,
            draw=clock,
        )

    return asyncio.run(build())


def is_reported(place: tuple[Any, ...], reported: list[str]) -> bool:
    """Return whether the path of the key, or of an object that contains it, is reported."""
    path = [*map(str, place), KEY]
    paths = [[step for step in re.split(r"[.\[\]]+", field) if step] for field in reported]
    if path[0] == "parameters":  # Triton's may stand beside it as well
        paths += [["parameters", *one] for one in paths]
    return any(one == path[: len(one)] for one in paths)


@pytest.mark.parametrize("worker", list_workers())
@pytest.mark.parametrize(("name", "path", "body"), list(list_requests()))
def test_an_unknown_key_is_kept_reported_or_refused(
    name: str, path: str, body: dict[str, Any], worker: Any
) -> None:
    client = get_adapter(name)
    lost = []

    for place in list_places(body):
        try:
            sent, reported = prepare(client, worker, path, add_key(body, place))
        except ClientError:
            continue
        if VALUE.encode() not in sent and not is_reported(place, reported):
            lost.append(".".join(map(str, place)))

    assert lost == []


@pytest.mark.parametrize("worker", list_workers())
def test_a_custom_tool_and_its_calls_are_all_custom_or_all_functions(worker: Any) -> None:
    client = get_adapter("openai")
    try:
        sent, _ = prepare(client, worker, "/v1/chat/completions", CUSTOM_TOOLS)
    except ClientError:
        return

    if b'"input"' in sent and b'"tools"' in sent:  # otherwise the conversation is a text
        has_functions = b'"type":"function"' in sent or b'"input_schema"' in sent
        assert (b"custom" in sent) is not has_functions


@pytest.mark.parametrize("worker", list_workers())
@pytest.mark.parametrize(("name", "path", "body"), list(list_requests()))
def test_an_unknown_query_parameter_is_reported_or_refused(
    name: str, path: str, body: dict[str, Any], worker: Any
) -> None:
    client = get_adapter(name)

    try:
        _, reported = prepare(client, worker, path, body, query=f"{KEY}={VALUE}")
    except ClientError:
        return

    assert f"query.{KEY}" in reported


@pytest.mark.parametrize(("name", "path", "body"), list(list_requests()))
def test_the_requests_are_valid(name: str, path: str, body: dict[str, Any]) -> None:
    """Otherwise the property would hold because every request is rejected."""
    sent, reported = prepare(get_adapter(name), VLLM, path, body)

    assert any(one in sent for one in (b"hi", b'"a"', b"[1"))
    assert not [one for one in reported if KEY in one]


VLLM = build_adapter("openai", "vllm", {})
SAME_PROTOCOL: Mapping[str, Any] = {
    name: VLLM if name == "openai" else build_adapter(name, None, {})
    for name, reference in PROTOCOLS.items()
    if hasattr(load_symbol(reference), "encode_request")
}
MODELS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "limit and default": {
        "max_tokens": 50,
        "defaults": RequestDefaults(sampling={"temperature": 0.5}),
    },
    "strict": {"on_loss": "reject"},
}
SETTINGS_FIELDS = frozenset(
    {"max_tokens", "max_new_tokens", "max_completion_tokens", "max_output_tokens", "num_predict",
     "sampling_param_max_tokens", "temperature", "sampling_param_temperature", "do_sample"}
)  # fmt: skip
"""The fields that the limit and the default change; MindIE samples only where it is requested."""


CLIENT_OPTIONS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "anthropic": ({}, {"mid_system": "fold"}, {"server_tools": "drop"}, {"over_limit": "error"}),
}
"""Options of listeners that change no request without what they name."""


def list_same_protocol_requests() -> Iterator[Any]:
    for name, path, body in (one.values for one in list_requests()):
        if name in SAME_PROTOCOL:
            worker = RESPONSES_WORKER if path.endswith("/responses") else SAME_PROTOCOL[name]
            if body is ALLOWED_TOOLS or body is CUSTOM_TOOLS:  # vLLM has no such tools
                worker = RESPONSES_WORKER
            for options in CLIENT_OPTIONS.get(name, ({},)):
                shown = "".join(f"-{key}-{one}" for key, one in options.items())
                client = build_adapter(name, None, options)
                yield pytest.param(client, path, body, worker, id=f"{name}{path}{shown}")


RESPONSES_WORKER = build_adapter("openai", "openai", {"worker_api": "both"})


@pytest.mark.parametrize(("client", "path", "body", "worker"), list(list_same_protocol_requests()))
def test_a_worker_of_the_client_s_protocol_gets_each_unknown_key_whatever_the_model_s_settings(
    client: Any, path: str, body: dict[str, Any], worker: Any
) -> None:
    failures = []

    for place in list_places(body):
        changed = add_key(body, place)
        outcomes = {name: try_model(client, worker, path, changed, name) for name in MODELS}
        for model, outcome in outcomes.items():
            if isinstance(outcome, Sent) and (
                VALUE.encode() not in outcome.body or is_reported(place, outcome.lost)
            ):
                failures.append((model, place))
        failures += [(model, place) for model in find_differences(outcomes)]

    assert failures == []


@pytest.mark.parametrize("worker", list_workers())
@pytest.mark.parametrize("name", PROTOCOLS)
def test_nothing_but_the_limit_and_the_default_differs_between_models(
    name: str, worker: Any
) -> None:
    client = get_adapter(name)
    failures = []

    for path, body in (*REQUESTS[name], *list_small_requests(name)):
        for changed in (body, {**body, KEY: VALUE}):
            outcomes = {model: try_model(client, worker, path, changed, model) for model in MODELS}
            failures += [(model, path) for model in find_differences(outcomes)]

    assert failures == []


class Sent(Struct):
    """A worker's request, and what is reported as lost."""

    path: str
    body: bytes
    lost: list[str]

    def describe(self, without: frozenset[str] = frozenset()) -> Any:
        """Return what was sent and lost but for some fields, and for the id, which is a counter."""
        lost = [one for one in self.lost if one.rpartition(".")[2] not in without]
        return self.path, strip_fields(msgspec.json.decode(self.body), {*without, "id"}), lost


def try_model(
    client: Any, worker: Any, path: str, body: dict[str, Any], model: str
) -> Sent | Literal["invalid", "unsupported"]:
    """Return what becomes of a request to a model with these settings."""
    try:
        sent, losses = prepare_request(client, worker, path, body, **MODELS[model])
    except (UnknownParameter, InvalidParameter):  # the real server rejects it, too
        return "invalid"
    except ClientError:
        return "unsupported"
    lost = sorted({one.field for one in losses if one.reason not in ("emulated", "renamed")})
    return Sent(sent.path, sent.body, lost)


def find_differences(outcomes: Mapping[str, Any]) -> list[str]:
    """Return the models whose settings change what they do not name."""
    plain, other, strict = (outcomes[name] for name in MODELS)
    if not isinstance(plain, Sent):
        return [] if plain == other == strict else ["limit and default", "strict"]
    different = []
    expected = plain.describe(SETTINGS_FIELDS)
    if not isinstance(other, Sent) or other.describe(SETTINGS_FIELDS) != expected:
        different.append("limit and default")
    outcome = strict.describe() if isinstance(strict, Sent) else strict
    if outcome != ("unsupported" if plain.lost else plain.describe()):
        different.append("strict")
    return different


def strip_fields(value: Any, names: AbstractSet[str]) -> Any:
    """Return a worker's body without these fields, and without tensors of these names."""
    if isinstance(value, list):
        return [strip_fields(one, names) for one in value if get_name(one) not in names]
    if not isinstance(value, dict):
        return value
    fields = {key: strip_fields(one, names) for key, one in value.items() if key not in names}
    if get_name(fields) == PACKED:  # Triton's parameters as text
        fields["data"] = [strip_fields(msgspec.json.decode(one), names) for one in fields["data"]]
    if isinstance(text := fields.get(PACKED), str):
        fields[PACKED] = strip_fields(msgspec.json.decode(text), names)
    return {key: one for key, one in fields.items() if one != {}}


PACKED = "sampling_parameters"


def get_name(value: Any) -> Any:
    return value.get("name") if isinstance(value, dict) else None
