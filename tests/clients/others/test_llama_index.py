"""LlamaIndex's ``OpenAILike``, its client for servers in OpenAI's manner."""

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    """Who."""

    name: str
    age: int


def make_model(gateway: str, key: str, model: str = "chat", *, is_chat: bool = True) -> OpenAILike:
    return OpenAILike(
        api_base=f"{gateway}/v1",
        api_key=key,
        model=model,
        is_chat_model=is_chat,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_retries=0,
    )


def make_number(x: int) -> int:
    """Make a number."""
    return x + 1


NUMBER = FunctionTool.from_defaults(make_number, name="Number")
QUESTION = ChatMessage(role="user", content="use the tool")


def test_chat_returns_the_response_with_usage(gateway: str, key: str) -> None:
    response = make_model(gateway, key).chat([ChatMessage(role="user", content="say hi")])

    assert response.message.content == "Hello world!"
    assert response.raw.usage.total_tokens == 5
    assert response.raw.choices[0].finish_reason == "stop"


def test_chat_stream_returns_the_pieces(gateway: str, key: str) -> None:
    pieces = [
        response.delta
        for response in make_model(gateway, key).stream_chat(
            [ChatMessage(role="user", content="say hi")]
        )
    ]

    assert [piece for piece in pieces if piece] == ["Hello", " world", "!"]


@pytest.mark.parametrize("is_chat", [True, False])
def test_complete_returns_and_streams_the_text(gateway: str, key: str, is_chat: bool) -> None:
    """A model that is no chat model is asked at /v1/completions."""
    model = make_model(gateway, key, is_chat=is_chat)

    assert model.complete("say hi").text == "Hello world!"
    assert [response.text for response in model.stream_complete("say hi")][-1] == "Hello world!"


def test_tool_call_and_tool_result(gateway: str, key: str) -> None:
    model = make_model(gateway, key)

    called = model.chat_with_tools([NUMBER], chat_history=[QUESTION])
    [call] = model.get_tool_calls_from_response(called)
    assert (call.tool_name, call.tool_kwargs) == ("Number", {"x": 1})

    result = ChatMessage(
        role="tool",
        content=NUMBER(**call.tool_kwargs).content,
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    assert model.chat([QUESTION, called.message, result]).message.content == "Hello world!"


def test_streamed_tool_call(gateway: str, key: str) -> None:
    model = make_model(gateway, key)

    last = list(model.stream_chat_with_tools([NUMBER], chat_history=[QUESTION]))[-1]

    [call] = model.get_tool_calls_from_response(last)
    assert (call.tool_name, call.tool_kwargs) == ("Number", {"x": 1})


def test_structured_output_is_parsed(gateway: str, key: str) -> None:
    model = make_model(gateway, key, "structured").as_structured_llm(Person)

    assert model.complete("who?").raw == Person(name="Ada", age=36)


@pytest.mark.parametrize("model", ["broken", "cut"])
def test_broken_stream_raises_after_the_received_text(gateway: str, key: str, model: str) -> None:
    pieces: list[str | None] = []

    with pytest.raises(openai.APIError):
        pieces.extend(
            response.delta
            for response in make_model(gateway, key, model).stream_chat(
                [ChatMessage(role="user", content="say hi")]
            )
        )

    assert "".join(piece or "" for piece in pieces) == "Hello world"


def test_unknown_model_raises_not_found(gateway: str, key: str) -> None:
    with pytest.raises(openai.NotFoundError):
        make_model(gateway, key, "nope").complete("say hi")
