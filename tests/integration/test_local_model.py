"""The built-in configuration and model answer in every protocol, without any set-up."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.integration.test_command import Command

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """``interlingua serve`` without a file, on free ports."""
    command = Command("serve", env={"PORT": "0"})
    yield command.serving()
    command.stop()
    command.close()


def send_post(url: str, path: str, **body: Any) -> httpx.Response:
    response = httpx.post(url + path, json=body, timeout=110)
    assert response.status_code == 200, response.text
    return response


def test_openai_client_gets_a_unary_response(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=110)

    response = client.chat.completions.create(model="smollm2", messages=MESSAGES)  # type: ignore[arg-type]

    assert "Paris" in (response.choices[0].message.content or "")
    assert response.usage is not None
    assert response.usage.completion_tokens > 0


def test_openai_client_gets_a_streamed_response(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=110)

    stream = client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
    )
    chunks = [chunk for chunk in stream if isinstance(chunk, ChatCompletionChunk)]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]

    assert "Paris" in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 3


def test_triton_generate_response(url: str) -> None:
    response = send_post(url, "/v2/models/smollm2/generate", id="42", text_input=QUESTION).json()

    assert response.keys() == {"id", "model_name", "model_version", "text_output"}
    assert "Paris" in response["text_output"]


def test_triton_generate_stream_response(url: str) -> None:
    path = "/v2/models/smollm2/generate_stream"
    response = send_post(url, path, text_input=QUESTION, parameters={"stream": True})

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"

    events = [msgspec.json.decode(one[6:]) for one in response.text.strip().split("\n\n")]
    assert "Paris" in "".join(event["text_output"] for event in events)
    assert len(events) > 3


def test_mindie_generate_stream_has_token_details(url: str) -> None:
    path = "/mindie/v2/models/smollm2/generate_stream"
    body = {"id": "a123", "text_input": QUESTION, "parameters": {"details": True}}
    response = send_post(url, path, **body)

    events = [msgspec.json.decode(one[5:]) for one in response.text.strip().split("\n\n")]
    assert "Paris" in "".join(event["text_output"] for event in events)
    assert [event["details"]["generated_tokens"] for event in events][:3] == [1, 2, 3]
    assert events[-1]["details"]["finish_reason"] == "eos_token"


def test_mindie_chat_response(url: str) -> None:
    response = send_post(
        url, "/mindie/v1/chat/completions", model="smollm2", messages=MESSAGES
    ).json()

    assert "Paris" in response["choices"][0]["message"]["content"]


def test_ovms_chat_response(url: str) -> None:
    response = send_post(url, "/v3/chat/completions", model="smollm2", messages=MESSAGES).json()

    assert "Paris" in response["choices"][0]["message"]["content"]


def test_databricks_chat_response(url: str) -> None:
    response = send_post(url, "/serving-endpoints/smollm2/invocations", messages=MESSAGES)

    assert "Paris" in response.json()["choices"][0]["message"]["content"]
    assert response.headers["served-model-name"]


def test_databricks_completion_response(url: str) -> None:
    response = send_post(url, "/serving-endpoints/smollm2/invocations", prompt=QUESTION).json()

    assert "Paris" in response["choices"][0]["text"]


def test_databricks_embedding_is_a_unit_vector(url: str) -> None:
    response = send_post(url, "/serving-endpoints/minilm/invocations", input=[QUESTION]).json()

    [item] = response["data"]
    assert len(item["embedding"]) == 384
    assert abs(sum(x * x for x in item["embedding"]) - 1) < 1e-3


def test_loss_header_names_parameters_unsupported_by_the_local_model(url: str) -> None:
    tool = {"type": "custom", "custom": {"name": "f"}}
    response = send_post(
        url, "/v1/chat/completions", model="smollm2", messages=MESSAGES, tools=[tool], foo=1
    )

    losses = response.headers["x-interlingua-loss"].split(",")
    assert sorted(losses) == ["foo=dropped", "tools[0].custom=emulated"]


def test_prompt_longer_than_the_context_is_rejected(url: str) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "word " * 9000}]}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=110)

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
