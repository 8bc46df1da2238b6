"""Completions, embeddings and models."""

import base64
import struct
from typing import cast

import pytest
from openai import AsyncOpenAI, OpenAI

A = [1.0, 1.0, 0.5, -0.25]
B_C = [3.0, 2.0, 0.5, -0.25]


def test_unary_completion(client: OpenAI) -> None:
    response = client.completions.create(model="chat", prompt="say hi")

    assert response.object == "text_completion"
    assert response.choices[0].text == "Hello world!"
    assert response.usage is not None
    assert response.usage.total_tokens == 5


def test_completion_with_several_prompts_and_choices(client: OpenAI) -> None:
    response = client.completions.create(model="chat", prompt=["a", "b"], n=2, echo=True)

    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]

    texts = [choice.text for choice in response.choices]
    assert texts == ["aHello world!", "aHello world!", "bHello world!", "bHello world!"]


def test_completion_with_logprobs(client: OpenAI) -> None:
    response = client.completions.create(model="chat", prompt="say hi", logprobs=1)

    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hello", " world", "!"]
    assert logprobs.text_offset == [0, 5, 11]


async def test_streamed_completion(later: AsyncOpenAI) -> None:
    stream = await later.completions.create(model="chat", prompt="say hi", stream=True)
    chunks = [chunk async for chunk in stream]

    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world!"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_embeddings_use_base64_by_default(client: OpenAI) -> None:
    response = client.embeddings.create(model="embed", input=["a", "b c"])

    assert [one.embedding for one in response.data] == [A, B_C]
    assert response.usage.prompt_tokens == 3


async def test_embeddings_as_floats_and_from_token_ids(later: AsyncOpenAI) -> None:
    floats = await later.embeddings.create(model="embed", input="a", encoding_format="float")
    tokens = await later.embeddings.create(model="embed", input=[[1, 2, 3]], dimensions=2)

    assert floats.data[0].embedding == A
    assert tokens.data[0].embedding == [3.0, 3.0]


def test_base64_embedding_is_returned_on_request(client: OpenAI) -> None:
    response = client.embeddings.create(model="embed", input="a", encoding_format="base64")

    raw = base64.b64decode(cast("str", response.data[0].embedding))
    assert list(struct.unpack("<4f", raw)) == A


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    assert {"chat", "org/chat", "embed"} <= {model.id for model in client.models.list()}
    retrieved = client.models.retrieve("org/chat")
    assert (retrieved.id, retrieved.object) == ("org/chat", "model")


@pytest.mark.parametrize("base", ["/v1", "/serving-endpoints", "/v3"])
async def test_every_openai_compatible_base_url_serves_embeddings_and_models(
    gateway: str, later: AsyncOpenAI, base: str
) -> None:
    one = later.with_options(base_url=gateway + base)

    assert (await one.embeddings.create(model="embed", input="a")).data[0].embedding == A
    assert "chat" in [model.id async for model in one.models.list()]
