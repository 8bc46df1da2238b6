"""Answers as bytes."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import StreamBroken
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    PromptEcho,
    ReasoningDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import ResponseContext, ResponseEncoder
from protocols.databricks.endpoints import Databricks

PATH = "/serving-endpoints/ep-ab/invocations"
HI = [{"role": "user", "content": "say hi"}]
DIALECT = Databricks()
HELLO: list[Event] = [
    StreamStart(2), TextDelta("Hello"), TextDelta(" world"), TextDelta("!"), ChoiceEnd("eos"),
    Usage(2, 3), StreamEnd()
]  # fmt: skip


def encoder(
    make: Any, about: ResponseContext, *, dialect: Databricks = DIALECT, **body: Any
) -> ResponseEncoder:
    call = make(PATH, body)
    return dialect.create_encoder(call, dialect.decode_request(call), about)


def whole(of: ResponseEncoder, events: Sequence[Event]) -> bytes:
    fold = ResponseAccumulator()
    fold.add(events)
    return of.encode_unary(fold.result()).body


def test_a_chat(make: Any, about: ResponseContext) -> None:
    of = encoder(make, about, messages=HI)
    assert ("served-model-name", "m-a") in of.headers()
    assert whole(of, HELLO) == (
        b'{"id":"chatcmpl-r1","object":"chat.completion","created":1716825108,'
        b'"model":"llama-3-8b","choices":[{"index":0,"message":{"role":"assistant",'
        b'"content":"Hello world!"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}}'
    )


def test_calls(make: Any, about: ResponseContext) -> None:
    events: list[Event] = [
        ToolCallStart(0, 0, "c1", "f"), ToolCallDelta(0, 0, '{"x":1}'), ChoiceEnd("tool_calls"),
        StreamEnd()
    ]  # fmt: skip
    assert (
        b'"message":{"role":"assistant","content":null,"tool_calls":[{"id":"c1",'
        b'"type":"function","function":{"name":"f","arguments":"{\\"x\\":1}"}}]},'
        b'"finish_reason":"tool_calls"'
    ) in whole(encoder(make, about, messages=HI), events)


def test_thoughts_and_logprobs(make: Any, about: ResponseContext) -> None:
    events: list[Event] = [
        ReasoningDelta("hm"), TextDelta("Hi", logprobs=(TokenLogprob("Hi", -0.5),)),
        ChoiceEnd("length"), StreamEnd()
    ]  # fmt: skip
    body = msgspec.json.decode(whole(encoder(make, about, messages=HI, logprobs=True), events))
    choice = body["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hi",
        "reasoning_content": "hm",
    }
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["content"][0]["logprob"] == -0.5


def chunk(delta: bytes, reason: bytes = b"null", usage: bytes = b"") -> bytes:
    return (
        b'data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1716825108,'
        b'"model":"llama-3-8b","choices":[{"index":0,"delta":' + delta + b',"finish_reason":'
        + reason + b"}]" + usage + b"}\n\n"
    )  # fmt: skip


USAGE = b',"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}'
FIRST = chunk(b'{"role":"assistant","content":""}')


def test_a_stream_tells_usage_in_its_last_chunk(make: Any, about: ResponseContext) -> None:
    of = encoder(make, about, messages=HI, stream=True)
    assert of.content_type == "text/event-stream; charset=utf-8"
    assert b"".join(of.encode_events([event]) for event in HELLO) == (
        FIRST
        + chunk(b'{"content":"Hello"}')
        + chunk(b'{"content":" world"}')
        + chunk(b'{"content":"!"}')
        + chunk(b"{}", b'"stop"', USAGE)
        + b"data: [DONE]\n\n"
    )


def test_a_stream_tells_usage_as_it_was_asked_to(make: Any, about: ResponseContext) -> None:
    options = {"include_usage": True}
    of = encoder(make, about, messages=HI, stream=True, stream_options=options)
    lines = of.encode_events(HELLO).split(b"\n\n")
    assert all(b'"usage":null' in line for line in lines[:5])
    assert b'"choices":[]' + USAGE in lines[5]
    assert lines[6:] == [b"data: [DONE]", b""]
    silent = encoder(make, about, messages=HI, stream=True, stream_options={"include_usage": False})
    assert b"usage" not in silent.encode_events(HELLO)


def test_nothing_but_data_in_a_stream(make: Any, about: ResponseContext) -> None:
    of = encoder(make, about, messages=HI, stream=True, n=2)
    events: list[Event] = [
        TextDelta("a", 0), TextDelta("b", 1), ReasoningDelta("c", 0),
        ToolCallStart(1, 0, "c1", "f"), ChoiceEnd("eos", 0),
        ChoiceEnd("tool_calls", 1), Usage(1, 2), StreamEnd(),
    ]  # fmt: skip
    data = of.encode_events(events)
    assert {line[:6] for line in data.splitlines() if line} == {b"data: "}
    assert data.count(b'"role":"assistant"') == 2
    assert data.count(b'"usage"') == 1


def test_an_error_in_a_stream_has_the_shape_that_clients_raise_on(
    make: Any, about: ResponseContext
) -> None:
    of = encoder(make, about, messages=HI, stream=True)
    of.encode_events(HELLO[:2])
    data = of.encode_error_event(StreamBroken("the worker's answer stopped before its end"))
    assert data.startswith(b'data: {"error":{"message":"the worker')
    error = msgspec.json.decode(data[6:])["error"]
    assert error["type"] == "server_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_completions(make: Any, about: ResponseContext) -> None:
    of = encoder(make, about, prompt=["a", "b"])
    events: list[Event] = [
        TextDelta("x", 0), ChoiceEnd("eos", 0), TextDelta("y", 1), ChoiceEnd("length", 1),
        Usage(2, 2), StreamEnd()
    ]  # fmt: skip
    assert whole(of, events) == (
        b'{"id":"cmpl-r1","object":"text_completion","created":1716825108,"model":"llama-3-8b",'
        b'"choices":[{"index":0,"text":"x","finish_reason":"stop"},'
        b'{"index":1,"text":"y","finish_reason":"length"}],'
        b'"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4}}'
    )


TWICE: list[Event] = [
    TextDelta("w", 0), ChoiceEnd("eos", 0), TextDelta("x", 1), ChoiceEnd("eos", 1),
    TextDelta("y", 2), ChoiceEnd("eos", 2), TextDelta("z", 3), ChoiceEnd("length", 3), Usage(2, 4),
    StreamEnd(),
]  # fmt: skip


@pytest.mark.parametrize(("by", "indexes"), [("flat", [0, 1, 2, 3]), ("prompt", [0, 0, 1, 1])])
def test_what_an_index_counts(
    make: Any, about: ResponseContext, by: Any, indexes: list[int]
) -> None:
    dialect = Databricks(completion_index=by)
    asked: dict[str, Any] = {"prompt": ["a", "b"], "n": 2}

    body = msgspec.json.decode(whole(encoder(make, about, dialect=dialect, **asked), TWICE))
    assert [(one["index"], one["text"]) for one in body["choices"]] == list(
        zip(indexes, "wxyz", strict=True)
    )

    stream = encoder(make, about, dialect=dialect, **asked, stream=True).encode_events(TWICE)
    chunks = [msgspec.json.decode(one[6:]) for one in stream.split(b"\n\n")[:-2]]
    choices = [one["choices"][0] for one in chunks]
    assert [one["index"] for one in choices if one["text"]] == indexes
    assert [one["index"] for one in choices if one["finish_reason"]] == indexes
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_an_index_of_a_conversation_is_its_choices(make: Any, about: ResponseContext) -> None:
    dialect = Databricks(completion_index="prompt")
    events: list[Event] = [
        TextDelta("a", 0),
        ChoiceEnd("eos", 0),
        TextDelta("b", 1),
        ChoiceEnd("eos", 1),
        StreamEnd(),
    ]
    body = msgspec.json.decode(
        whole(encoder(make, about, dialect=dialect, messages=HI, n=2), events)
    )
    assert [one["index"] for one in body["choices"]] == [0, 1]


def test_echo_comes_first_and_suffix_last(make: Any, about: ResponseContext) -> None:
    """The gateway puts both around the backend's events; here they are only written."""
    events: list[Event] = [
        PromptEcho(0, "a"), TextDelta("Hi"), TextDelta("<e>", tokens=0), ChoiceEnd("eos"),
        Usage(1, 1), StreamEnd()
    ]  # fmt: skip
    said: dict[str, Any] = {"prompt": "a", "echo": True, "suffix": "<e>"}
    assert b'"text":"aHi<e>"' in whole(encoder(make, about, **said), events)
    chunks = encoder(make, about, **said, stream=True).encode_events(events).split(b"\n\n")
    texts = [msgspec.json.decode(c[6:])["choices"][0]["text"] for c in chunks[:-2]]
    assert texts == ["a", "Hi", "<e>", ""]


VECTORS: list[Event] = [Embedding(0, (3.0, 0.5)), Embedding(1, (1.0, -0.25)), Usage(3), StreamEnd()]


def test_embeddings(make: Any, about: ResponseContext) -> None:
    of = encoder(make, about, input=["a b", "c"])
    assert of.headers() == (("served-model-name", "m-a"),)
    assert of.encode_events(VECTORS) == b""
    assert whole(of, VECTORS) == (
        b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[3.0,0.5]},'
        b'{"object":"embedding","index":1,"embedding":[1.0,-0.25]}],"model":"llama-3-8b",'
        b'"usage":{"prompt_tokens":3,"total_tokens":3},"id":"embd-r1"}'
    )


def test_embeddings_in_base64(make: Any, about: ResponseContext) -> None:
    body = whole(encoder(make, about, input="a", encoding_format="base64"), VECTORS)
    assert msgspec.json.decode(body)["data"][0]["embedding"] == "AABAQAAAAD8="
