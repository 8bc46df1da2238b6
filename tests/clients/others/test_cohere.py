"""Cohere's SDK: conversations, streams, tools, documents, reranking and errors."""

from typing import Any

import cohere
import pytest
from cohere import ClientV2
from cohere.core import ApiError

HI: Any = [{"role": "user", "content": "hi there"}]
ASK: Any = [{"role": "user", "content": "use the tool"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "looks up",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}


@pytest.fixture
def client(gateway: str, key: str) -> ClientV2:
    return ClientV2(api_key=key, base_url=gateway, max_retries=0)


def test_chat(client: ClientV2) -> None:
    response = client.chat(model="chat", messages=HI, temperature=0.3, k=5, p=0.9, seed=7)

    assert response.message.content[0].text == "Hello world!"
    assert response.finish_reason == "COMPLETE"
    assert (response.usage.tokens.input_tokens, response.usage.tokens.output_tokens) == (2, 3)


def test_stream(client: ClientV2) -> None:
    events = list(client.chat_stream(model="chat", messages=HI))

    kinds = [event.type for event in events]
    assert kinds == [
        "message-start",
        "content-start",
        *["content-delta"] * 3,
        "content-end",
        "message-end",
    ]
    pieces = [one.delta.message.content.text for one in events if one.type == "content-delta"]
    assert pieces == ["Hello", " world", "!"]
    assert events[-1].delta.finish_reason == "COMPLETE"
    assert events[-1].delta.usage.tokens.output_tokens == 3


def test_line_separators_stay_in_their_event(client: ClientV2) -> None:
    events = client.chat_stream(model="separators", messages=HI)

    pieces = [one.delta.message.content.text for one in events if one.type == "content-delta"]
    assert "".join(pieces) == "a\u2028b\u0085c\u00e9"


def test_stop_sequence_and_limit(client: ClientV2) -> None:
    stopped = client.chat(model="chat", messages=HI, stop_sequences=[" world"])
    limited = client.chat(model="chat", messages=HI, max_tokens=1)

    assert (stopped.message.content[0].text, stopped.finish_reason) == ("Hello", "STOP_SEQUENCE")
    assert (limited.message.content[0].text, limited.finish_reason) == ("Hello", "MAX_TOKENS")


def test_tool_call_and_its_result(client: ClientV2) -> None:
    response = client.chat(model="chat", messages=ASK, tools=[TOOL], tool_choice="REQUIRED")

    [call] = response.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"x":1}')
    assert response.finish_reason == "TOOL_CALL"

    document: Any = {"type": "document", "document": {"data": {"value": 5}}}
    history = [
        *ASK,
        response.message,
        {"role": "tool", "tool_call_id": call.id, "content": [document]},
    ]
    answer = client.chat(model="chat", messages=history, tools=[TOOL], tool_choice="NONE")
    assert answer.message.content[0].text == "Hello world!"


def test_tool_call_in_a_stream(client: ClientV2) -> None:
    events = list(
        client.chat_stream(model="chat", messages=ASK, tools=[TOOL], tool_choice="REQUIRED")
    )

    [start] = [one for one in events if one.type == "tool-call-start"]
    assert start.delta.message.tool_calls.function.name == "f"
    pieces = [
        one.delta.message.tool_calls.function.arguments
        for one in events
        if one.type == "tool-call-delta"
    ]
    assert "".join(pieces) == '{"x":1}'
    assert events[-1].delta.finish_reason == "TOOL_CALL"


def test_reasoning(client: ClientV2) -> None:
    response = client.chat(model="thinking", messages=HI)
    silent = client.chat(model="thinking", messages=HI, thinking=cohere.Thinking(type="disabled"))

    assert [one.type for one in response.message.content] == ["thinking", "text"]
    assert response.message.content[0].thinking == "hm"
    assert [one.type for one in silent.message.content] == ["text"]


def test_documents_and_a_schema(client: ClientV2) -> None:
    response = client.chat(
        model="chat",
        messages=HI,
        documents=["a b", {"id": "d", "data": {"text": "c"}}],
        citation_options=cohere.CitationOptions(mode="OFF"),
        safety_mode="CONTEXTUAL",
        logprobs=True,
        response_format=cohere.JsonObjectResponseFormatV2(json_schema={"type": "object"}),
    )

    assert response.finish_reason == "COMPLETE"
    assert response.logprobs is not None


def test_rerank(client: ClientV2) -> None:
    documents = ["green grass", "the blue sky", "blue"]
    response = client.rerank(model="rank", query="blue sky", documents=documents, top_n=2)

    assert [one.index for one in response.results] == [2, 1]
    assert response.meta.api_version.version == "2"


@pytest.mark.parametrize(
    ("model", "kind", "status"),
    [
        ("nobody", cohere.NotFoundError, 404),
        ("limited", cohere.TooManyRequestsError, 429),
        ("down", cohere.ServiceUnavailableError, 503),
        ("failing", ApiError, 502),
    ],
)
def test_errors(client: ClientV2, model: str, kind: type[ApiError], status: int) -> None:
    with pytest.raises(kind) as caught:
        client.chat(model=model, messages=HI)

    assert caught.value.status_code == status
    assert caught.value.body["message"]


def test_refused_key_and_parameter(gateway: str, client: ClientV2) -> None:
    with pytest.raises(cohere.UnauthorizedError):
        ClientV2(api_key="sk-other", base_url=gateway).chat(model="chat", messages=HI)
    with pytest.raises(cohere.BadRequestError, match="'k'"):
        client.chat(model="chat", messages=HI, k=501)


def test_broken_stream_ends_with_an_error(client: ClientV2) -> None:
    events = list(client.chat_stream(model="broken", messages=HI))

    assert events[-1].type == "message-end"
    assert events[-1].delta.finish_reason == "ERROR"
    assert events[-1].delta.error
