"""Responses for clients, byte for byte."""

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
ADAPTER = Databricks()
HELLO: list[Event] = [
    StreamStart(2), TextDelta("Hello"), TextDelta(" world"), TextDelta("!"), ChoiceEnd("eos"),
    Usage(2, 3), StreamEnd()
]  # fmt: skip


def create_encoder(
    make: Any, response_context: ResponseContext, *, adapter: Databricks = ADAPTER, **body: Any
) -> ResponseEncoder:
    call = make(PATH, body)
    return adapter.create_encoder(call, adapter.decode_request(call), response_context)


def encode_unary_body(of: ResponseEncoder, events: Sequence[Event]) -> bytes:
    fold = ResponseAccumulator()
    fold.add(events)
    return of.encode_unary(fold.result()).body


def test_unary_chat_response(make: Any, response_context: ResponseContext) -> None:
    of = create_encoder(make, response_context, messages=HI)
    assert ("served-model-name", "m-a") in of.headers()
    assert encode_unary_body(of, HELLO) == (
        b'{"id":"chatcmpl-r1","object":"chat.completion","created":1716825108,'
        b'"model":"llama-3-8b","choices":[{"index":0,"message":{"role":"assistant",'
        b'"content":"Hello world!"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}}'
    )


def test_unary_response_with_tool_calls(make: Any, response_context: ResponseContext) -> None:
    events: list[Event] = [
        ToolCallStart(0, 0, "c1", "f"), ToolCallDelta(0, 0, '{"x":1}'), ChoiceEnd("tool_calls"),
        StreamEnd()
    ]  # fmt: skip
    assert (
        b'"message":{"role":"assistant","content":null,"tool_calls":[{"id":"c1",'
        b'"type":"function","function":{"name":"f","arguments":"{\\"x\\":1}"}}]},'
        b'"finish_reason":"tool_calls"'
    ) in encode_unary_body(create_encoder(make, response_context, messages=HI), events)


def test_unary_response_with_reasoning_and_logprobs(
    make: Any, response_context: ResponseContext
) -> None:
    events: list[Event] = [
        ReasoningDelta("hm"), TextDelta("Hi", logprobs=(TokenLogprob("Hi", -0.5),)),
        ChoiceEnd("length"), StreamEnd()
    ]  # fmt: skip
    body = msgspec.json.decode(
        encode_unary_body(
            create_encoder(make, response_context, messages=HI, logprobs=True), events
        )
    )
    choice = body["choices"][0]

    assert choice["message"] == {
        "role": "assistant",
        "content": "Hi",
        "reasoning_content": "hm",
    }
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["content"][0]["logprob"] == -0.5


def format_chat_chunk(delta: bytes, reason: bytes = b"null", usage: bytes = b"") -> bytes:
    return (
        b'data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1716825108,'
        b'"model":"llama-3-8b","choices":[{"index":0,"delta":' + delta + b',"finish_reason":'
        + reason + b"}]" + usage + b"}\n\n"
    )  # fmt: skip


USAGE = b',"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}'
FIRST = format_chat_chunk(b'{"role":"assistant","content":""}')


def test_stream_has_usage_in_its_last_chunk(make: Any, response_context: ResponseContext) -> None:
    of = create_encoder(make, response_context, messages=HI, stream=True)
    assert of.content_type == "text/event-stream; charset=utf-8"
    assert b"".join(of.encode_events([event]) for event in HELLO) == (
        FIRST
        + format_chat_chunk(b'{"content":"Hello"}')
        + format_chat_chunk(b'{"content":" world"}')
        + format_chat_chunk(b'{"content":"!"}')
        + format_chat_chunk(b"{}", b'"stop"', USAGE)
        + b"data: [DONE]\n\n"
    )


def test_include_usage_option_controls_usage_in_a_stream(
    make: Any, response_context: ResponseContext
) -> None:
    options = {"include_usage": True}
    of = create_encoder(make, response_context, messages=HI, stream=True, stream_options=options)
    lines = of.encode_events(HELLO).split(b"\n\n")

    assert all(b'"usage":null' in line for line in lines[:5])
    assert b'"choices":[]' + USAGE in lines[5]
    assert lines[6:] == [b"data: [DONE]", b""]

    silent = create_encoder(
        make, response_context, messages=HI, stream=True, stream_options={"include_usage": False}
    )
    assert b"usage" not in silent.encode_events(HELLO)


def test_stream_has_only_data_lines_and_one_role_per_choice(
    make: Any, response_context: ResponseContext
) -> None:
    of = create_encoder(make, response_context, messages=HI, stream=True, n=2)
    events: list[Event] = [
        TextDelta("a", 0), TextDelta("b", 1), ReasoningDelta("c", 0),
        ToolCallStart(1, 0, "c1", "f"), ChoiceEnd("eos", 0),
        ChoiceEnd("tool_calls", 1), Usage(1, 2), StreamEnd(),
    ]  # fmt: skip

    data = of.encode_events(events)

    assert {line[:6] for line in data.splitlines() if line} == {b"data: "}
    assert data.count(b'"role":"assistant"') == 2
    assert data.count(b'"usage"') == 1


def test_stream_error_has_the_openai_error_shape(
    make: Any, response_context: ResponseContext
) -> None:
    of = create_encoder(make, response_context, messages=HI, stream=True)
    of.encode_events(HELLO[:2])
    data = of.encode_error_event(StreamBroken("the worker's answer stopped before its end"))

    assert data.startswith(b'data: {"error":{"message":"the worker')

    error = msgspec.json.decode(data[6:])["error"]
    assert error["type"] == "server_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_unary_completion_response(make: Any, response_context: ResponseContext) -> None:
    of = create_encoder(make, response_context, prompt=["a", "b"])
    events: list[Event] = [
        TextDelta("x", 0), ChoiceEnd("eos", 0), TextDelta("y", 1), ChoiceEnd("length", 1),
        Usage(2, 2), StreamEnd()
    ]  # fmt: skip

    assert encode_unary_body(of, events) == (
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
def test_completion_index_option_numbers_choices_or_prompts(
    make: Any, response_context: ResponseContext, by: Any, indexes: list[int]
) -> None:
    adapter = Databricks(completion_index=by)
    fields: dict[str, Any] = {"prompt": ["a", "b"], "n": 2}

    body = msgspec.json.decode(
        encode_unary_body(create_encoder(make, response_context, adapter=adapter, **fields), TWICE)
    )
    assert [(one["index"], one["text"]) for one in body["choices"]] == list(
        zip(indexes, "wxyz", strict=True)
    )

    stream = create_encoder(
        make, response_context, adapter=adapter, **fields, stream=True
    ).encode_events(TWICE)
    chunks = [msgspec.json.decode(one[6:]) for one in stream.split(b"\n\n")[:-2]]
    choices = [one["choices"][0] for one in chunks]

    assert [one["index"] for one in choices if one["text"]] == indexes
    assert [one["index"] for one in choices if one["finish_reason"]] == indexes
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_chat_index_numbers_the_choices(make: Any, response_context: ResponseContext) -> None:
    adapter = Databricks(completion_index="prompt")
    events: list[Event] = [
        TextDelta("a", 0),
        ChoiceEnd("eos", 0),
        TextDelta("b", 1),
        ChoiceEnd("eos", 1),
        StreamEnd(),
    ]

    body = msgspec.json.decode(
        encode_unary_body(
            create_encoder(make, response_context, adapter=adapter, messages=HI, n=2), events
        )
    )

    assert [one["index"] for one in body["choices"]] == [0, 1]


def test_echo_precedes_and_suffix_follows_the_text(
    make: Any, response_context: ResponseContext
) -> None:
    """The gateway adds both to the events; the adapter only encodes them."""
    events: list[Event] = [
        PromptEcho(0, "a"), TextDelta("Hi"), TextDelta("<e>", tokens=0), ChoiceEnd("eos"),
        Usage(1, 1), StreamEnd()
    ]  # fmt: skip
    body: dict[str, Any] = {"prompt": "a", "echo": True, "suffix": "<e>"}
    assert b'"text":"aHi<e>"' in encode_unary_body(
        create_encoder(make, response_context, **body), events
    )

    chunks = (
        create_encoder(make, response_context, **body, stream=True)
        .encode_events(events)
        .split(b"\n\n")
    )
    texts = [msgspec.json.decode(c[6:])["choices"][0]["text"] for c in chunks[:-2]]
    assert texts == ["a", "Hi", "<e>", ""]


VECTORS: list[Event] = [Embedding(0, (3.0, 0.5)), Embedding(1, (1.0, -0.25)), Usage(3), StreamEnd()]


def test_embeddings_response(make: Any, response_context: ResponseContext) -> None:
    of = create_encoder(make, response_context, input=["a b", "c"])
    assert of.headers() == (("served-model-name", "m-a"),)
    assert of.encode_events(VECTORS) == b""
    assert encode_unary_body(of, VECTORS) == (
        b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[3.0,0.5]},'
        b'{"object":"embedding","index":1,"embedding":[1.0,-0.25]}],"model":"llama-3-8b",'
        b'"usage":{"prompt_tokens":3,"total_tokens":3},"id":"embd-r1"}'
    )


def test_base64_embeddings_response(make: Any, response_context: ResponseContext) -> None:
    body = encode_unary_body(
        create_encoder(make, response_context, input="a", encoding_format="base64"), VECTORS
    )
    assert msgspec.json.decode(body)["data"][0]["embedding"] == "AABAQAAAAD8="
