"""LangChain with openai 2."""

import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr


class Person(BaseModel):
    """Who."""

    name: str
    age: int


class Number(BaseModel):
    """A number."""

    x: int


def make_chat_model(gateway: str, key: str, model: str = "chat") -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{gateway}/v1", api_key=SecretStr(key), model=model, max_retries=0)


def test_invoke_returns_the_response_with_usage(gateway: str, key: str) -> None:
    response = make_chat_model(gateway, key).invoke("say hi")

    assert response.content == "Hello world!"
    assert response.response_metadata["finish_reason"] == "stop"
    assert response.usage_metadata is not None
    assert response.usage_metadata["total_tokens"] == 5


def test_stream_returns_the_chunks(gateway: str, key: str) -> None:
    chunks = list(make_chat_model(gateway, key).stream("say hi"))

    message = sum(chunks[1:], chunks[0])
    assert isinstance(message, AIMessageChunk)
    assert [chunk.content for chunk in chunks if chunk.content] == ["Hello", " world", "!"]
    assert message.response_metadata["finish_reason"] == "stop"


def test_stream_usage_reports_tokens_once(gateway: str, key: str) -> None:
    chunks = list(make_chat_model(gateway, key).stream("say hi", stream_usage=True))

    assert [one.usage_metadata["total_tokens"] for one in chunks if one.usage_metadata] == [5]


def test_structured_output_is_parsed(gateway: str, key: str) -> None:
    response = (
        make_chat_model(gateway, key, "structured").with_structured_output(Person).invoke("who?")
    )

    assert response == Person(name="Ada", age=36)


def test_structured_output_by_function_calling(gateway: str, key: str) -> None:
    model = make_chat_model(gateway, key).with_structured_output(Number, method="function_calling")

    assert model.invoke("which?") == Number(x=1)


def test_tool_call_and_tool_result(gateway: str, key: str) -> None:
    model = make_chat_model(gateway, key).bind_tools([Number])
    question = HumanMessage("use the tool")

    called = model.invoke([question])
    [call] = called.tool_calls
    assert (call["name"], call["args"]) == ("Number", {"x": 1})

    tool_message = ToolMessage("2", tool_call_id=call["id"])
    after = make_chat_model(gateway, key).invoke([question, called, tool_message])
    assert after.content == "Hello world!"


def test_streamed_tool_call(gateway: str, key: str) -> None:
    chunks = list(make_chat_model(gateway, key).bind_tools([Number]).stream("use the tool"))

    message = sum(chunks[1:], chunks[0])
    assert isinstance(message, AIMessageChunk)
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("Number", {"x": 1})]


def test_completion_model_invokes_and_streams(gateway: str, key: str) -> None:
    model = OpenAI(base_url=f"{gateway}/v1", api_key=SecretStr(key), model="chat")

    assert model.invoke("say hi") == "Hello world!"
    assert "".join(model.stream("say hi")) == "Hello world!"


def test_documents_and_queries_are_embedded(gateway: str, key: str) -> None:
    model = OpenAIEmbeddings(
        base_url=f"{gateway}/v1",
        api_key=SecretStr(key),
        model="embed",
        check_embedding_ctx_length=False,
    )

    assert [vector[0] for vector in model.embed_documents(["a", "b c"])] == [1.0, 3.0]
    assert model.embed_query("a") == [1.0, 1.0, 0.5, -0.25]


@pytest.mark.parametrize("model", ["broken", "cut"])
def test_broken_stream_raises_after_the_received_text(gateway: str, key: str, model: str) -> None:
    chunks: list[object] = []

    with pytest.raises(openai.APIError):
        chunks.extend(
            chunk.content for chunk in make_chat_model(gateway, key, model).stream("say hi")
        )

    assert "".join(map(str, chunks)) == "Hello world"


def test_unknown_model_raises_not_found(gateway: str, key: str) -> None:
    with pytest.raises(openai.NotFoundError):
        make_chat_model(gateway, key, "nope").invoke("say hi")
