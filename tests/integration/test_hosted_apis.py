"""Requests to a hosted API are adapted as its row of the table says.

Each test runs for every row. The gateway sends its requests to a scripted worker, which records
them and answers "ok", in place of the hosted API.
"""

from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from protocols.chat.params import REASONING_EFFORTS
from protocols.openai.hosted_apis import HOSTED_APIS, HostedApi
from tests.conftest import RunningGateway, Serve
from tests.support.chat_worker import Answer, ChatWorker

HI: Final = {"role": "user", "content": "hi"}
VALUES: Final[dict[str, dict[str, Any]]] = {
    "seed": {"seed": 7},
    "n": {"n": 2},
    "stop": {"stop": ["x"]},
    "user": {"user": "u"},
    "store": {"store": True},
    "verbosity": {"verbosity": "low"},
    "modalities": {"modalities": ["text"]},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "service_tier": {"service_tier": "flex"},
    "metadata": {"metadata": {"a": "b"}},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "logit_bias": {"logit_bias": {"1": 2}},
    "temperature": {"temperature": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "safety_identifier": {"safety_identifier": "s"},
    "prompt_cache_key": {"prompt_cache_key": "k"},
    "prompt_cache_retention": {"prompt_cache_retention": "24h"},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "max_completion_tokens": {"max_completion_tokens": 9},
    "parallel_tool_calls": {
        "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    "tool_choice": {
        "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "min_tokens": {"min_tokens": 2},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "include_reasoning": {"include_reasoning": False},
}
EMULATED: Final = {"n", "stop"}
RENAMED: Final = {"max_completion_tokens"}
UNREPORTED: Final = {"stream_options", *EMULATED, *RENAMED}
"""The gateway itself asks for the usage of streams; the others are emulated or renamed."""
CALL: Final = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": "{}"},
}
HISTORY: Final[list[dict[str, Any]]] = [
    {"role": "developer", "content": "be brief"},
    HI,
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


@pytest.fixture
async def worker() -> AsyncIterator[ChatWorker]:
    """It answers each request with "ok" and keeps the requests' bodies."""
    async with ChatWorker(lambda body: Answer(text=("ok",))) as worker:
        yield worker


@pytest.fixture(params=HOSTED_APIS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def api(name: str) -> HostedApi:
    return HOSTED_APIS[name]


@pytest.fixture
async def gateway(name: str, serve: Serve, worker: ChatWorker) -> RunningGateway:
    return await serve(
        f"""\
listeners: [{{address: "127.0.0.1:0", protocols: [openai, anthropic]}}]
backends: {{o: {{protocol: openai, profile: {name}, workers: ["{worker.url}"]}}}}
models: {{m: {{backend: o, protocol: openai}}}}
"""
    )


async def ask(gateway: RunningGateway, **fields: Any) -> tuple[int, str]:
    """Send a chat request with these fields; return the status and the loss header."""
    body = {"model": "m", "messages": [HI], **fields}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    return response.status_code, response.headers.get("x-interlingua-loss", "")


async def test_unsupported_parameters_are_not_sent_and_are_reported(
    gateway: RunningGateway, worker: ChatWorker, api: HostedApi
) -> None:
    for field in sorted(api.lacks):
        status, loss = await ask(gateway, **VALUES[field])
        assert status == 200, field
        assert field not in worker.bodies[-1], field
        assert (f"{field}=dropped" in loss) == (field not in UNREPORTED), (field, loss)
        if field in RENAMED:
            assert worker.bodies[-1]["max_tokens"] == 9


async def test_partly_supported_parameters_are_sent_and_reported(
    gateway: RunningGateway, worker: ChatWorker, api: HostedApi
) -> None:
    for field in sorted(api.lacks_partly):
        _, loss = await ask(gateway, **VALUES[field])
        assert worker.bodies[-1][field] == VALUES[field][field]
        assert f"{field}=approximated" in loss
        unchanged = {field: api.lacks_partly[field]}
        assert await ask(gateway, **unchanged) == (200, "")
        assert worker.bodies[-1][field] == api.lacks_partly[field]


async def test_reasoning_efforts_that_an_api_refuses_are_replaced_and_reported(
    gateway: RunningGateway, worker: ChatWorker, api: HostedApi
) -> None:
    for effort in REASONING_EFFORTS:
        _, loss = await ask(gateway, reasoning_effort=effort)
        assert worker.bodies[-1]["reasoning_effort"] == api.replaced_efforts.get(effort, effort)
        assert ("reasoning_effort=approximated" in loss) == (effort in api.replaced_efforts)


async def test_supported_parameters_are_sent_and_not_reported(
    gateway: RunningGateway, worker: ChatWorker, api: HostedApi
) -> None:
    accepted = VALUES.keys() - api.lacks - api.lacks_partly.keys() - {"stream_options"}
    extensions = {"top_k", "min_p", "min_tokens", "repetition_penalty", "include_reasoning"}
    for field in sorted(accepted - (extensions - set(api.adds))):
        _, loss = await ask(gateway, **VALUES[field])
        sent = api.renames.get(field, field)
        assert worker.bodies[-1].get(sent) == VALUES[field][field], field
        assert loss in ("", f"{field}=renamed"), field


async def test_fields_that_only_this_api_has_are_forwarded(
    gateway: RunningGateway, worker: ChatWorker, api: HostedApi
) -> None:
    for field in api.forwards:
        _, loss = await ask(gateway, **{field: {"x": 1}})
        assert (worker.bodies[-1][field], loss) == ({"x": 1}, "")


async def test_session_labels_are_forwarded(
    gateway: RunningGateway, worker: ChatWorker, api: HostedApi
) -> None:
    for field in api.labels:
        await ask(gateway, **{field: "s"})
        assert worker.bodies[-1][field] == "s"


async def test_token_limit_of_another_protocol_is_sent_by_the_name_that_the_api_knows(
    gateway: RunningGateway, worker: ChatWorker, api: HostedApi
) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [HI]}
    response = await gateway.http.post("/v1/messages", json=body)
    lacks_new_name = "max_completion_tokens" in api.lacks
    expected = "max_tokens" if lacks_new_name else "max_completion_tokens"
    assert (response.status_code, worker.bodies[-1][expected]) == (200, 9)
    assert not {"max_tokens", "max_completion_tokens"} - {expected} & worker.bodies[-1].keys()


async def test_stop_strings_and_top_logprobs_stay_within_the_limits_of_the_api(
    gateway: RunningGateway, worker: ChatWorker, api: HostedApi
) -> None:
    if api.max_stop_strings is not None:
        texts = [str(i) for i in range(api.max_stop_strings + 1)]
        _, loss = await ask(gateway, stop=texts, unknown_field=1, seed=1, top_k=5)
        assert len(worker.bodies[-1]["stop"]) in (api.max_stop_strings, len(texts))
    if api.max_top_logprobs is not None:
        _, loss = await ask(gateway, logprobs=True, top_logprobs=20)
        assert worker.bodies[-1]["top_logprobs"] == api.max_top_logprobs
        assert ("top_logprobs=clamped" in loss) == (api.max_top_logprobs < 20)


async def test_earlier_reasoning_is_sent_by_the_key_of_the_api_or_reported(
    gateway: RunningGateway, worker: ChatWorker, api: HostedApi
) -> None:
    status, loss = await ask(gateway, messages=HISTORY)
    assert status == 200
    sent = worker.bodies[-1]["messages"][2]
    keys = {"reasoning_content", "reasoning"} & sent.keys()
    refused = api.earlier_reasoning == "refused"
    assert keys == (set() if refused else {api.earlier_reasoning})
    assert ("messages[2].reasoning_content=dropped" in loss) == refused


async def test_roles_and_call_ids_are_converted(
    gateway: RunningGateway, worker: ChatWorker, api: HostedApi
) -> None:
    await ask(gateway, messages=HISTORY)
    first, _, turn, result = worker.bodies[-1]["messages"]
    assert first["role"] == ("developer" if api.developer_role else "system")
    assert turn["tool_calls"][0]["id"] == result["tool_call_id"]
    if api.short_call_ids:
        assert len(result["tool_call_id"]) == 9
        assert result["tool_call_id"].isalnum()
    else:
        assert result["tool_call_id"] == "call_1"


async def test_unsupported_response_formats_are_reported(
    gateway: RunningGateway, worker: ChatWorker, api: HostedApi
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    _, loss = await ask(gateway, response_format=schema)
    assert worker.bodies[-1].get("response_format") == (schema if api.json_schema else None)
    assert ("response_format=dropped" in loss) != api.json_schema
    await ask(gateway, response_format={"type": "json_object"})
    assert worker.bodies[-1]["response_format"] == {"type": "json_object"}


def test_each_row_names_its_sources(api: HostedApi) -> None:
    assert api.sources
    assert all(source.startswith("https://") for source in (api.url, *api.sources))
