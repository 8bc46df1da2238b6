"""Databricks' variant of the OpenAI client."""

import asyncio
from typing import Any

import openai
import pytest
from databricks.sdk import WorkspaceClient
from databricks_openai import AsyncDatabricksOpenAI, DatabricksOpenAI

SAY_HI: Any = [{"role": "user", "content": "say hi"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}


@pytest.fixture
def workspace(gateway: str, key: str) -> WorkspaceClient:
    return WorkspaceClient(host=gateway, token=key)


@pytest.fixture
def client(workspace: WorkspaceClient) -> DatabricksOpenAI:
    return DatabricksOpenAI(workspace_client=workspace)


def test_unary_chat_completion(client: DatabricksOpenAI) -> None:
    response = client.chat.completions.create(model="chat", messages=SAY_HI)

    assert response.choices[0].message.content == "Hello world!"


def test_last_stream_chunk_contains_usage_by_default(client: DatabricksOpenAI) -> None:
    chunks = list(client.chat.completions.create(model="chat", messages=SAY_HI, stream=True))

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello world!"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens == 5


def test_async_unary_chat_completion(workspace: WorkspaceClient) -> None:
    async def ask() -> Any:
        async with AsyncDatabricksOpenAI(workspace_client=workspace) as one:
            return await one.chat.completions.create(model="chat", messages=SAY_HI)

    assert asyncio.run(ask()).choices[0].message.content == "Hello world!"


def test_required_tool_is_called(client: DatabricksOpenAI) -> None:
    response = client.chat.completions.create(
        model="chat", messages=SAY_HI, tools=[TOOL], tool_choice="required"
    )

    [call] = response.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"x":1}')


def test_completions_embeddings_and_models_are_served(client: DatabricksOpenAI) -> None:
    completion = client.completions.create(model="chat", prompt="say hi")
    vectors = client.embeddings.create(model="embed", input=["a"])

    assert completion.choices[0].text == "Hello world!"
    assert vectors.data[0].embedding == [1.0, 1.0, 0.5, -0.25]
    assert {"chat", "embed"} <= {model.id for model in client.models.list()}


def test_unknown_endpoint_raises_not_found(client: DatabricksOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as excinfo:
        client.chat.completions.create(model="nope", messages=SAY_HI)

    assert excinfo.value.response.json()["error_code"] == "RESOURCE_DOES_NOT_EXIST"


@pytest.mark.parametrize("model", ["broken", "cut"])
def test_broken_stream_raises_an_sdk_error(client: DatabricksOpenAI, model: str) -> None:
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model=model, messages=SAY_HI, stream=True))
