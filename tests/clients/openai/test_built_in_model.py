"""The client's own examples with the built-in models."""

from typing import Any

import msgspec
import pytest
from openai import APIResponse, BadRequestError, OpenAI
from openai.types.chat import ChatCompletion

pytestmark = pytest.mark.slow


def test_built_in_model_serves_a_chat_request(small: OpenAI) -> None:
    response = small.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
    )

    assert "Paris" in (response.choices[0].message.content or "")


def test_built_in_model_streams_a_chat_response(small: OpenAI) -> None:
    with small.chat.completions.stream(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        stream_options={"include_usage": True},
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()

    assert len(pieces) > 1
    assert "Paris" in "".join(pieces)
    assert final.usage is not None
    assert final.usage.completion_tokens >= len(pieces)


def _request_json(small: OpenAI, properties: dict[str, Any]) -> APIResponse[ChatCompletion]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    json_schema = {"name": "capital", "schema": schema, "strict": True}
    create: Any = small.chat.completions.with_raw_response.create  # the arguments are wire JSON
    response: APIResponse[ChatCompletion] = create(
        model="smollm2",
        messages=[{"role": "user", "content": "Name the capital of France as JSON."}],
        response_format={"type": "json_schema", "json_schema": json_schema},
        max_tokens=64,
    )
    return response


def test_built_in_model_output_matches_the_json_schema(small: OpenAI) -> None:
    response = _request_json(small, {"capital": {"type": "string", "maxLength": 20}})

    assert "x-interlingua-loss" not in response.headers

    content = response.parse().choices[0].message.content or ""
    assert list(msgspec.json.decode(content, type=dict[str, str])) == ["capital"]


def test_unsupported_json_schema_keyword_is_named_in_the_error(small: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="uniqueItems") as refused:
        _request_json(small, {"names": {"type": "array", "uniqueItems": True}})
    assert (refused.value.param or "").startswith("response_format")


def test_embeddings_of_similar_texts_are_close(small: OpenAI) -> None:
    texts = ["a cat sleeps", "a kitten naps", "interest rates rose"]
    response = small.embeddings.create(model="minilm", input=texts)

    cat, kitten, rates = (one.embedding for one in response.data)
    assert sum(a * b for a, b in zip(cat, kitten, strict=True)) > sum(
        a * b for a, b in zip(cat, rates, strict=True)
    )
