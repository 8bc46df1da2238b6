"""Answers as bytes."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from gateway.core.aggregate import Fold
from gateway.core.errors import StreamBroken
from gateway.core.ports import About, Encoder
from gateway.core.types import (
    CallArguments,
    CallStart,
    Done,
    End,
    Event,
    PromptEcho,
    Start,
    Text,
    Thought,
    TokenLogprob,
    Usage,
    Vector,
)
from protocols.databricks import Databricks

PATH = "/serving-endpoints/ep-ab/invocations"
HI = [{"role": "user", "content": "say hi"}]
DIALECT = Databricks()
HELLO: list[Event] = [
    Start(2), Text("Hello"), Text(" world"), Text("!"), End("eos"), Usage(2, 3), Done()
]  # fmt: skip


def encoder(make: Any, about: About, *, dialect: Databricks = DIALECT, **body: Any) -> Encoder:
    call = make(PATH, body)
    return dialect.create_encoder(call, dialect.decode_request(call), about)


def whole(of: Encoder, events: Sequence[Event]) -> bytes:
    fold = Fold()
    fold.add(events)
    return of.encode_unary(fold.result()).body


def test_a_chat(make: Any, about: About) -> None:
    of = encoder(make, about, messages=HI)
    assert ("served-model-name", "m-a") in of.headers()
    assert whole(of, HELLO) == (
        b'{"id":"chatcmpl-r1","object":"chat.completion","created":1716825108,'
        b'"model":"llama-3-8b","choices":[{"index":0,"message":{"role":"assistant",'
        b'"content":"Hello world!"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}}'
    )


def test_calls(make: Any, about: About) -> None:
    events: list[Event] = [
        CallStart(0, 0, "c1", "f"), CallArguments(0, 0, '{"x":1}'), End("tool_calls"), Done()
    ]  # fmt: skip
    assert (
        b'"message":{"role":"assistant","content":null,"tool_calls":[{"id":"c1",'
        b'"type":"function","function":{"name":"f","arguments":"{\\"x\\":1}"}}]},'
        b'"finish_reason":"tool_calls"'
    ) in whole(encoder(make, about, messages=HI), events)


def test_thoughts_and_logprobs(make: Any, about: About) -> None:
    events: list[Event] = [
        Thought("hm"), Text("Hi", logprobs=(TokenLogprob("Hi", -0.5),)), End("length"), Done()
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


def test_a_stream_tells_usage_in_its_last_chunk(make: Any, about: About) -> None:
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


def test_a_stream_tells_usage_as_it_was_asked_to(make: Any, about: About) -> None:
    options = {"include_usage": True}
    of = encoder(make, about, messages=HI, stream=True, stream_options=options)
    lines = of.encode_events(HELLO).split(b"\n\n")
    assert all(b'"usage":null' in line for line in lines[:5])
    assert b'"choices":[]' + USAGE in lines[5]
    assert lines[6:] == [b"data: [DONE]", b""]
    silent = encoder(make, about, messages=HI, stream=True, stream_options={"include_usage": False})
    assert b"usage" not in silent.encode_events(HELLO)


def test_nothing_but_data_in_a_stream(make: Any, about: About) -> None:
    of = encoder(make, about, messages=HI, stream=True, n=2)
    events: list[Event] = [
        Text("a", 0), Text("b", 1), Thought("c", 0), CallStart(1, 0, "c1", "f"), End("eos", 0),
        End("tool_calls", 1), Usage(1, 2), Done(),
    ]  # fmt: skip
    data = of.encode_events(events)
    assert {line[:6] for line in data.splitlines() if line} == {b"data: "}
    assert data.count(b'"role":"assistant"') == 2
    assert data.count(b'"usage"') == 1


def test_an_error_in_a_stream_has_the_shape_that_clients_raise_on(make: Any, about: About) -> None:
    of = encoder(make, about, messages=HI, stream=True)
    of.encode_events(HELLO[:2])
    data = of.encode_error_event(StreamBroken("the worker's answer stopped before its end"))
    assert data.startswith(b'data: {"error":{"message":"the worker')
    error = msgspec.json.decode(data[6:])["error"]
    assert error["type"] == "server_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_completions(make: Any, about: About) -> None:
    of = encoder(make, about, prompt=["a", "b"])
    events: list[Event] = [
        Text("x", 0), End("eos", 0), Text("y", 1), End("length", 1), Usage(2, 2), Done()
    ]  # fmt: skip
    assert whole(of, events) == (
        b'{"id":"cmpl-r1","object":"text_completion","created":1716825108,"model":"llama-3-8b",'
        b'"choices":[{"index":0,"text":"x","finish_reason":"stop"},'
        b'{"index":1,"text":"y","finish_reason":"length"}],'
        b'"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4}}'
    )


TWICE: list[Event] = [
    Text("w", 0), End("eos", 0), Text("x", 1), End("eos", 1),
    Text("y", 2), End("eos", 2), Text("z", 3), End("length", 3), Usage(2, 4), Done(),
]  # fmt: skip


@pytest.mark.parametrize(("by", "indexes"), [("flat", [0, 1, 2, 3]), ("prompt", [0, 0, 1, 1])])
def test_what_an_index_counts(make: Any, about: About, by: Any, indexes: list[int]) -> None:
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


def test_an_index_of_a_conversation_is_its_choices(make: Any, about: About) -> None:
    dialect = Databricks(completion_index="prompt")
    events: list[Event] = [Text("a", 0), End("eos", 0), Text("b", 1), End("eos", 1), Done()]
    body = msgspec.json.decode(
        whole(encoder(make, about, dialect=dialect, messages=HI, n=2), events)
    )
    assert [one["index"] for one in body["choices"]] == [0, 1]


def test_echo_comes_first_and_suffix_last(make: Any, about: About) -> None:
    """The gateway puts both around the backend's events; here they are only written."""
    events: list[Event] = [
        PromptEcho(0, "a"), Text("Hi"), Text("<e>", tokens=0), End("eos"), Usage(1, 1), Done()
    ]  # fmt: skip
    said: dict[str, Any] = {"prompt": "a", "echo": True, "suffix": "<e>"}
    assert b'"text":"aHi<e>"' in whole(encoder(make, about, **said), events)
    chunks = encoder(make, about, **said, stream=True).encode_events(events).split(b"\n\n")
    texts = [msgspec.json.decode(c[6:])["choices"][0]["text"] for c in chunks[:-2]]
    assert texts == ["a", "Hi", "<e>", ""]


VECTORS: list[Event] = [Vector(0, (3.0, 0.5)), Vector(1, (1.0, -0.25)), Usage(3), Done()]


def test_embeddings(make: Any, about: About) -> None:
    of = encoder(make, about, input=["a b", "c"])
    assert of.headers() == (("served-model-name", "m-a"),)
    assert of.encode_events(VECTORS) == b""
    assert whole(of, VECTORS) == (
        b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[3.0,0.5]},'
        b'{"object":"embedding","index":1,"embedding":[1.0,-0.25]}],"model":"llama-3-8b",'
        b'"usage":{"prompt_tokens":3,"total_tokens":3},"id":"embd-r1"}'
    )


def test_embeddings_in_base64(make: Any, about: About) -> None:
    body = whole(encoder(make, about, input="a", encoding_format="base64"), VECTORS)
    assert msgspec.json.decode(body)["data"][0]["embedding"] == "AABAQAAAAD8="
