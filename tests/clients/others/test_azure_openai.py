"""openai-python's AzureOpenAI, and LangChain's."""

import openai
import pytest
from langchain_openai import AzureChatOpenAI
from pydantic import SecretStr

VERSION = "2024-10-21"


@pytest.fixture
def client(gateway: str, key: str) -> openai.AzureOpenAI:
    return openai.AzureOpenAI(
        azure_endpoint=gateway, api_key=key, api_version=VERSION, max_retries=0
    )


def test_chat_whole_and_streamed(client: openai.AzureOpenAI) -> None:
    response = client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "hi"}]
    )
    with client.chat.completions.stream(
        model="chat", messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        streamed = stream.get_final_completion()

    assert response.choices[0].message.content == "Hello world!"
    assert streamed.choices[0].message.content == "Hello world!"


def test_responses_whole_and_streamed(gateway: str, key: str) -> None:
    """The client sends them to /openai/responses, with the version in the query."""
    client = openai.AzureOpenAI(
        azure_endpoint=gateway, api_key=key, api_version="2025-04-01-preview", max_retries=0
    )
    whole = client.responses.create(model="chat", input="hi")
    with client.responses.stream(model="chat", input="hi") as stream:
        streamed = stream.get_final_response()

    assert (whole.output_text, streamed.output_text) == ("Hello world!", "Hello world!")
    assert client.responses.retrieve(whole.id).output_text == "Hello world!"


def test_deployment_of_the_client_wins(gateway: str, key: str) -> None:
    client = openai.AzureOpenAI(
        azure_endpoint=gateway, azure_deployment="embed", api_key=key, api_version=VERSION
    )

    assert len(client.embeddings.create(model="other", input="a b").data[0].embedding) == 4


def test_base_url_of_v1(gateway: str, key: str) -> None:
    azure = openai.AzureOpenAI(base_url=f"{gateway}/openai/v1/", api_key=key, api_version="preview")
    plain = openai.OpenAI(base_url=f"{gateway}/openai/v1/", api_key=key)

    for client in (azure, plain):
        response = client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "hi"}]
        )
        assert response.choices[0].message.content == "Hello world!"


def test_errors_have_their_classes(client: openai.AzureOpenAI, gateway: str) -> None:
    def ask(model: str, client: openai.AzureOpenAI = client) -> None:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])

    with pytest.raises(openai.NotFoundError) as unknown:
        ask("nope")
    assert unknown.value.code == "DeploymentNotFound"
    with pytest.raises(openai.RateLimitError, match="Please retry after 1 seconds"):
        ask("limited")

    stranger = openai.AzureOpenAI(azure_endpoint=gateway, api_key="x", api_version=VERSION)
    with pytest.raises(openai.AuthenticationError, match="Access denied"):
        ask("chat", stranger)


def test_langchain_chats(gateway: str, key: str) -> None:
    model = AzureChatOpenAI(
        azure_endpoint=gateway,
        azure_deployment="chat",
        api_version=VERSION,
        api_key=SecretStr(key),
    )

    assert model.invoke("say hi").content == "Hello world!"
    assert "".join(str(one.content) for one in model.stream("say hi")) == "Hello world!"
