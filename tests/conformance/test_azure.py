"""Azure OpenAI cases that need other listeners, or an Azure worker behind the gateway."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from tests.conftest import MOCK, RunningGateway, Serve
from tests.support.fakes import ScriptedWorker, chunked, make_reply

VERSION = "2024-10-21"
CHAT = f"/openai/deployments/mock/chat/completions?api-version={VERSION}"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "say hi"}]
BODY = {"messages": MESSAGES}
BEFORE_A_WORKER = """
listeners: [{{address: "127.0.0.1:0", protocols: [{{name: openai, profile: azure}}, openai]}}]
limits: {{drain_timeout: 1s}}
backends:
  pool:
    protocol: openai
    profile: azure
    workers: [{{url: "{url}", auth: {{header: {{name: api-key, value: secret}}}}}}]
models: {{mock: {{backend: pool, model: gpt-4o}}}}
"""
RESULTS = {"hate": {"filtered": False, "severity": "low"}}
FILTERED = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "gpt-4o-2024-11-20",
    "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": RESULTS}],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "finish_reason": "content_filter",
            "content_filter_results": RESULTS,
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def make_client(gateway: RunningGateway, **options: Any) -> openai.AsyncAzureOpenAI:
    return openai.AsyncAzureOpenAI(
        azure_endpoint=gateway.url, api_key="sk-x", api_version=VERSION, max_retries=0, **options
    )


async def read_stream(client: openai.AsyncAzureOpenAI) -> list[ChatCompletionChunk]:
    stream = await client.chat.completions.create(model="mock", messages=MESSAGES, stream=True)
    return [chunk async for chunk in stream]


@pytest.fixture
async def synthetic(serve: Serve) -> RunningGateway:
    """The gateway of the cases, configured to add filter results."""
    own = "{name: openai, profile: azure, filter_results: synthetic}"
    return await serve(MOCK.replace("{name: openai, profile: azure}", own))


async def test_az11_synthetic_filter_results_of_a_stream_suit_the_client(
    synthetic: RunningGateway,
) -> None:
    async with make_client(synthetic) as client:
        first, *others = await read_stream(client)

    assert first.choices == []

    [results] = first.model_extra["prompt_filter_results"]  # type: ignore[index]
    assert (results["prompt_index"], len(results["content_filter_results"])) == (0, 4)

    texts = [one.choices[0].delta.content or "" for one in others if one.choices]
    assert "".join(texts) == "Hello world!"
    assert all("content_filter_results" in one.choices[0].model_extra for one in others)  # type: ignore[operator]


async def test_az12_synthetic_filter_results_of_a_whole_answer(synthetic: RunningGateway) -> None:
    response = (await synthetic.http.post(CHAT, json=BODY)).json()

    safe = {"filtered": False, "severity": "safe"}
    assert response["prompt_filter_results"][0]["content_filter_results"]["hate"] == safe
    assert response["choices"][0]["content_filter_results"]["hate"] == safe


async def test_az13_filter_results_of_an_azure_worker_are_passed_on(serve: Serve) -> None:
    async with ScriptedWorker([make_reply(json.dumps(FILTERED).encode())]) as worker:
        gateway = await serve(BEFORE_A_WORKER.format(url=worker.url))

        response = await gateway.http.post(CHAT, json=BODY)

        body = response.json()
        assert body["choices"][0]["finish_reason"] == "content_filter"
        assert body["choices"][0]["content_filter_results"] == RESULTS
        assert body["prompt_filter_results"] == FILTERED["prompt_filter_results"]

        [sent] = [one for one in worker.requests if one.method == "POST"]
        assert sent.path == f"/openai/deployments/gpt-4o/chat/completions?api-version={VERSION}"
        assert sent.headers["api-key"] == "secret"
        assert "authorization" not in sent.headers


async def test_az13_filter_results_in_a_stream_are_passed_on(serve: Serve) -> None:
    results = FILTERED["prompt_filter_results"]
    prompt = {"id": "", "object": "", "created": 0, "model": "", "choices": []}
    prompt |= {"prompt_filter_results": results}
    delta = {"index": 0, "delta": {"role": "assistant", "content": "Hello"}, "finish_reason": None}
    late = {"index": 0, "finish_reason": None, "content_filter_results": RESULTS}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    events = [prompt, *({**chunk, "choices": [one]} for one in (delta, late, end))]
    wire = [b"data: %b\n\n" % json.dumps(event).encode() for event in events]
    async with ScriptedWorker([chunked(*wire, b"data: [DONE]\n\n")]) as worker:
        gateway = await serve(BEFORE_A_WORKER.format(url=worker.url))
        async with make_client(gateway) as client:
            chunks = await read_stream(client)

    with_delta = [one.choices[0] for one in chunks if one.choices and "delta" in one.to_json()]
    assert "".join(choice.delta.content or "" for choice in with_delta) == "Hello"
    assert chunks[0].model_extra["prompt_filter_results"] == FILTERED["prompt_filter_results"]  # type: ignore[index]


async def test_az14_filtered_prompt_is_an_error_of_azure(serve: Serve) -> None:
    results = {"hate": {"filtered": True, "severity": "high"}}
    inner = {"code": "ResponsibleAIPolicyViolation", "content_filter_result": results}
    error = {
        "message": "The prompt was blocked.", "type": None, "param": "prompt",
        "code": "content_filter", "status": 400, "innererror": inner,
    }  # fmt: skip
    reply = make_reply(json.dumps({"error": error}).encode(), "400 Bad Request")

    async with ScriptedWorker([reply]) as worker:
        gateway = await serve(BEFORE_A_WORKER.format(url=worker.url))
        async with make_client(gateway) as client:
            with pytest.raises(openai.BadRequestError) as excinfo:
                await client.chat.completions.create(
                    model="mock",
                    messages=MESSAGES,
                )

    assert excinfo.value.code == "content_filter"
    assert excinfo.value.body["innererror"] == inner  # type: ignore[index]


async def test_openai_clients_use_an_azure_worker(serve: Serve) -> None:
    async with ScriptedWorker([make_reply(json.dumps(FILTERED).encode())]) as worker:
        gateway = await serve(BEFORE_A_WORKER.format(url=worker.url))

        response = await gateway.http.post("/v1/chat/completions", json={**BODY, "model": "mock"})

        assert response.json()["choices"][0]["message"]["content"] == "Hello"
        assert worker.requests[-1].path.startswith("/openai/deployments/gpt-4o/")


async def test_azure_client_lists_embeds_and_raises_its_errors(mock: RunningGateway) -> None:
    async with make_client(mock) as client:
        names = [one.id async for one in client.models.list()]
        vector = await client.embeddings.create(model="mock-emb", input="a b")

        with pytest.raises(openai.NotFoundError) as unknown:
            await client.embeddings.create(model="nope", input="a")
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(
                model="mock-429",
                messages=MESSAGES,
            )

    assert "mock" in names
    assert vector.data[0].embedding == [3.0, 2.0, 0.5, -0.25]
    assert unknown.value.code == "DeploymentNotFound"
