"""Chat, unary and streamed, with tools and structured output."""

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

SAY_HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "say hi"}]
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "any",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}


class Person(BaseModel):
    name: str
    age: int


def test_unary_chat_completion(client: OpenAI) -> None:
    response = client.chat.completions.create(model="chat", messages=SAY_HI)

    assert response.object == "chat.completion"
    assert response.id.startswith("chatcmpl-")
    assert response.model == "chat"
    assert response.choices[0].message.role == "assistant"
    assert response.choices[0].message.content == "Hello world!"
    assert response.choices[0].finish_reason == "stop"
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (2, 3)
    assert response._request_id


async def test_async_unary_chat_completion(later: AsyncOpenAI) -> None:
    response = await later.chat.completions.create(model="chat", messages=SAY_HI)

    assert response.choices[0].message.content == "Hello world!"


def test_null_parameters_are_treated_as_absent(client: OpenAI) -> None:
    response = client.chat.completions.create(
        model="chat", messages=SAY_HI, temperature=None, max_tokens=None, stop=None, seed=None
    )

    assert response.choices[0].message.content == "Hello world!"


def test_multiple_choices_are_truncated_at_max_tokens(client: OpenAI) -> None:
    response = client.chat.completions.create(model="chat", messages=SAY_HI, n=3, max_tokens=2)

    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert {choice.message.content for choice in response.choices} == {"Hello world"}
    assert {choice.finish_reason for choice in response.choices} == {"length"}


def test_chat_completion_with_logprobs(client: OpenAI) -> None:
    response = client.chat.completions.create(
        model="chat", messages=SAY_HI, logprobs=True, top_logprobs=2
    )

    assert response.choices[0].logprobs is not None

    content = response.choices[0].logprobs.content
    assert content is not None
    assert [one.token for one in content] == ["Hello", " world", "!"]
    assert bytes(content[1].bytes or ()) == b" world"
    assert [len(one.top_logprobs) for one in content] == [2, 2, 2]


def test_streamed_chat_completion(client: OpenAI) -> None:
    with client.chat.completions.create(model="chat", messages=SAY_HI, stream=True) as stream:
        chunks = list(stream)

    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1

    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant", None, None, None, None]
    assert [delta.content for delta in deltas] == ["", "Hello", " world", "!", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * 4, "stop"]
    assert {chunk.usage for chunk in chunks} == {None}


async def test_async_stream_with_usage(later: AsyncOpenAI) -> None:
    stream = await later.chat.completions.create(
        model="chat", messages=SAY_HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello world!"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 5


def test_stream_helper_collects_the_completion(client: OpenAI) -> None:
    with client.chat.completions.stream(model="chat", messages=SAY_HI) as stream:
        events = list(stream)
        final = stream.get_final_completion()

    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert deltas == ["", "Hello", " world", "!"]
    assert [event.content for event in events if event.type == "content.done"] == ["Hello world!"]
    assert final.choices[0].message.content == "Hello world!"


async def test_async_stream_helper_with_tools(later: AsyncOpenAI) -> None:
    async with later.chat.completions.stream(
        model="chat", messages=SAY_HI, tools=[TOOL], tool_choice="required"
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()

    pieces = [
        event.arguments_delta
        for event in events
        if event.type == "tool_calls.function.arguments.delta"
    ]

    assert "".join(pieces) == '{"x":1}'
    assert final.choices[0].finish_reason == "tool_calls"


def test_tool_call_and_tool_result(client: OpenAI) -> None:
    response = client.chat.completions.create(
        model="chat",
        messages=SAY_HI,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "f"}},
    )
    message = response.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None

    [call] = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("f", '{"x":1}')

    messages: list[ChatCompletionMessageParam] = [
        *SAY_HI,
        {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]},  # type: ignore[list-item]
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    after = client.chat.completions.create(model="chat", messages=messages, tools=[TOOL])
    assert after.choices[0].message.content == "Hello world!"


def test_structured_output_is_parsed(client: OpenAI) -> None:
    response = client.chat.completions.parse(
        model="structured", messages=SAY_HI, response_format=Person
    )

    assert response.choices[0].message.parsed == Person(name="Ada", age=36)


def test_streamed_structured_output_is_parsed(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="structured", messages=SAY_HI, response_format=Person
    ) as stream:
        final = stream.get_final_completion()

    assert final.choices[0].message.parsed == Person(name="Ada", age=36)


@pytest.mark.parametrize("base", ["/v1", "/serving-endpoints", "/v3", "/mindie/v1"])
def test_every_openai_compatible_base_url_serves_chat(
    gateway: str, client: OpenAI, base: str
) -> None:
    """The base URL is the client's only setting."""
    one = client.with_options(base_url=gateway + base)

    response = one.chat.completions.create(model="chat", messages=SAY_HI)
    with one.chat.completions.stream(model="chat", messages=SAY_HI) as stream:
        final = stream.get_final_completion()

    assert response.choices[0].message.content == "Hello world!"
    assert final.choices[0].message.content == "Hello world!"
    assert final.choices[0].finish_reason == "stop"
