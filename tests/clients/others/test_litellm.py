"""LiteLLM as a client, in the protocols of its providers."""

import litellm
import pytest

HI = [{"role": "user", "content": "say hi"}]


@pytest.mark.parametrize("provider", ["ollama", "ollama_chat"])
def test_ollama_whole_and_streamed(gateway: str, key: str, provider: str) -> None:
    named = {"model": f"{provider}/chat", "api_base": gateway, "api_key": key}

    response = litellm.completion(messages=HI, **named)
    chunks = litellm.completion(messages=HI, stream=True, **named)

    assert response.choices[0].message.content == "Hello world!"
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == "Hello world!"


def test_azure(gateway: str, key: str) -> None:
    response = litellm.completion(
        model="azure/chat", api_base=gateway, api_key=key, api_version="2024-10-21", messages=HI
    )

    assert response.choices[0].message.content == "Hello world!"


def test_openai_without_v1(gateway: str, key: str) -> None:
    response = litellm.completion(model="openai/chat", api_base=gateway, api_key=key, messages=HI)

    assert response.choices[0].message.content == "Hello world!"


def test_anthropic_whole_and_streamed(gateway: str, key: str) -> None:
    named = {"model": "anthropic/chat", "api_base": gateway, "api_key": key}

    response = litellm.completion(messages=HI, **named)
    chunks = litellm.completion(messages=HI, stream=True, **named)

    assert response.choices[0].message.content == "Hello world!"
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == "Hello world!"


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_responses_whole(gateway: str, key: str, provider: str) -> None:
    base = f"{gateway}/v1" if provider == "openai" else gateway

    response = litellm.responses(
        model=f"{provider}/chat", api_base=base, api_key=key, input="say hi", max_output_tokens=20
    )

    assert response.status == "completed"
    assert response.output[0].content[0].text == "Hello world!"


def test_responses_streamed_and_continued(gateway: str, key: str) -> None:
    named = {"model": "openai/chat", "api_base": f"{gateway}/v1", "api_key": key}

    events = list(litellm.responses(input="say hi", stream=True, **named))
    last = events[-1].response
    again = litellm.responses(input="and again", previous_response_id=last.id, **named)

    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"

    texts = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(texts) == "Hello world!"
    assert again.previous_response_id
    assert again.output[0].content[0].text == "Hello world!"


def test_responses_of_an_unknown_model_raise_not_found(gateway: str, key: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.responses(
            model="openai/nope", api_base=f"{gateway}/v1", api_key=key, input="say hi"
        )


@pytest.mark.parametrize(
    ("provider", "path"), [("cohere", ""), ("jina_ai", "/v1"), ("hosted_vllm", "")]
)
def test_rerank(gateway: str, key: str, provider: str, path: str) -> None:
    response = litellm.rerank(
        model=f"{provider}/rank",
        api_base=gateway + path,
        api_key=key,
        query="blue sky",
        documents=["green grass", "the blue sky", "blue"],
        top_n=2,
    )

    scores = [one["relevance_score"] for one in response.results]
    assert scores == sorted(scores, reverse=True)
    assert [one["index"] for one in response.results] == [2, 1]
