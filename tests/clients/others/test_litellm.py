"""LiteLLM, which speaks the protocols of its providers."""

import litellm
import pytest

HI = [{"role": "user", "content": "say hi"}]


@pytest.mark.parametrize("provider", ["ollama", "ollama_chat"])
def test_ollama_whole_and_streamed(gateway: str, key: str, provider: str) -> None:
    named = {"model": f"{provider}/chat", "api_base": gateway, "api_key": key}

    whole = litellm.completion(messages=HI, **named)
    chunks = litellm.completion(messages=HI, stream=True, **named)

    assert whole.choices[0].message.content == "Hello world!"
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == "Hello world!"


def test_azure(gateway: str, key: str) -> None:
    answer = litellm.completion(
        model="azure/chat", api_base=gateway, api_key=key, api_version="2024-10-21", messages=HI
    )

    assert answer.choices[0].message.content == "Hello world!"


def test_openai_without_v1(gateway: str, key: str) -> None:
    answer = litellm.completion(model="openai/chat", api_base=gateway, api_key=key, messages=HI)

    assert answer.choices[0].message.content == "Hello world!"
