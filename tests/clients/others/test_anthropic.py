"""Anthropic's SDK: messages, streams, tools, counts, models and errors, and its own types."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from pydantic import ConfigDict, TypeAdapter, create_model

HI: Any = [{"role": "user", "content": "hi there"}]
TOOL: Any = {
    "name": "f",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
ASK: Any = [{"role": "user", "content": "use the tool"}]


@pytest.fixture
def client(gateway: str, key: str) -> Anthropic:
    return Anthropic(base_url=gateway, api_key=key, max_retries=0)


def test_message(client: Anthropic) -> None:
    message = client.messages.create(model="chat", max_tokens=50, messages=HI, system="be kind")

    assert message.content[0].text == "Hello world!"
    assert (message.stop_reason, message.usage.input_tokens) == ("end_turn", 4)
    assert message._request_id is not None


def test_stream_helper(client: Anthropic) -> None:
    with client.messages.stream(model="chat", max_tokens=50, messages=HI) as stream:
        assert list(stream.text_stream) == ["Hello", " world", "!"]
        message = stream.get_final_message()

    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 3)
    assert message.usage.input_tokens == 2


def test_stop_sequence(client: Anthropic) -> None:
    message = client.messages.create(
        model="chat", max_tokens=50, messages=HI, stop_sequences=[" world"]
    )

    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " world")


def test_tool_call_and_its_result(client: Anthropic) -> None:
    with client.messages.stream(model="chat", max_tokens=50, messages=ASK, tools=[TOOL]) as stream:
        call = stream.get_final_message()
    [use] = call.content
    assert (use.type, use.name, use.input, call.stop_reason) == (
        "tool_use",
        "f",
        {"x": 1},
        "tool_use",
    )

    result = {"type": "tool_result", "tool_use_id": use.id, "content": "5"}
    history = [
        *ASK,
        {"role": "assistant", "content": call.content},
        {"role": "user", "content": [result]},
    ]
    message = client.messages.create(
        model="chat", max_tokens=50, messages=history, tools=[TOOL], tool_choice={"type": "none"}
    )

    assert message.content[0].text == "Hello world!"


def test_structured_output(client: Anthropic) -> None:
    person = create_model(
        "Person", name=(str, ...), age=(int, ...), __config__=ConfigDict(extra="forbid")
    )

    parsed = client.messages.parse(
        model="structured", max_tokens=50, messages=HI, output_format=person
    )

    assert parsed.parsed_output == person(name="Ada", age=36)


def test_count_and_models(client: Anthropic) -> None:
    count = client.messages.count_tokens(model="chat", messages=HI, system="x", tools=[TOOL])

    assert count.input_tokens == 3

    names = [model.id for model in client.models.list(limit=2)]
    assert {"chat", "org/chat", "gpt-6-astra"} <= set(names)
    assert client.models.retrieve("org/chat").display_name == "org/chat"


@pytest.mark.parametrize(
    ("model", "kind"),
    [("none", anthropic.NotFoundError), ("limited", anthropic.RateLimitError),
     ("failing", anthropic.InternalServerError), ("down", anthropic.APIStatusError)],
)  # fmt: skip
def test_errors_have_the_classes_of_the_sdk(
    client: Anthropic, model: str, kind: type[anthropic.APIStatusError]
) -> None:
    with pytest.raises(kind) as excinfo:
        client.messages.create(model=model, max_tokens=5, messages=HI)

    assert excinfo.value.request_id is not None
    with pytest.raises(kind), client.messages.stream(model=model, max_tokens=5, messages=HI) as it:
        it.get_final_message()


def test_prompt_that_is_too_long(client: Anthropic) -> None:
    long: Any = [{"role": "user", "content": "word " * 20}]

    with pytest.raises(
        anthropic.BadRequestError, match="prompt is too long: 20 tokens > 8 maximum"
    ):
        client.messages.create(model="short", max_tokens=5, messages=long)


@pytest.mark.parametrize("model", ["broken", "cut"])
def test_broken_stream_raises(client: Anthropic, model: str) -> None:
    texts = []

    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(model=model, max_tokens=5, messages=HI) as stream,
    ):
        texts += stream.text_stream

    assert texts == ["Hello", " world"]


def test_wrong_key(gateway: str) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        Anthropic(base_url=gateway, api_key="no", max_retries=0).messages.create(
            model="chat", max_tokens=5, messages=HI
        )


# --- the SDK's types ------------------------------------------------------------------------------


def ask(gateway: str, key: str, path: str, body: Any = None) -> bytes:
    """Return a response's raw body."""
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    method = "GET" if body is None else "POST"
    return httpx.request(method, f"{gateway}{path}", json=body, headers=headers).content


def read_events(wire: bytes) -> Iterator[Any]:
    for block in wire.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        if event["type"] != "ping":
            yield event


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 0},
        {"stop_sequences": [" world"]},
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
        {"thinking": {"type": "adaptive"}},
    ],
)
def test_every_body_and_event_is_one_of_the_types(
    gateway: str, key: str, fields: dict[str, Any]
) -> None:
    body = {"model": "chat", "max_tokens": 50, "messages": HI, **fields}

    message = Message.model_validate_json(ask(gateway, key, "/v1/messages", body), strict=True)
    events = TypeAdapter(RawMessageStreamEvent)
    kinds = []

    for event in read_events(ask(gateway, key, "/v1/messages", {**body, "stream": True})):
        kinds.append(events.validate_json(json.dumps(event), strict=True).type)

    assert message.stop_reason
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])


def test_counts_and_models_are_of_the_types(gateway: str, key: str) -> None:
    count = ask(gateway, key, "/v1/messages/count_tokens", {"model": "chat", "messages": HI})

    assert MessageTokensCount.model_validate_json(count, strict=True).input_tokens == 2
    for item in json.loads(ask(gateway, key, "/v1/models"))["data"]:
        assert ModelInfo.model_validate_json(json.dumps(item), strict=True).id
