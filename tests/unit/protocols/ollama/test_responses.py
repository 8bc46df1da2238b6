"""Responses in JSON, and streams of JSON lines."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocols.core.aggregate import aggregate
from protocols.core.errors import StreamBroken
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    ReasoningDelta,
    RefusalDelta,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    Timing,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
    Usage,
)
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.ollama import Ollama
from protocols.ollama.responses import GenerationEncoder, ResponseTimer, normalize
from tests.unit.protocols.ollama.conftest import MakeCall

END = (ChoiceEnd("eos"), Usage(2, 3), StreamEnd())
CALL = (
    ToolCallStart(0, 0, "c1", "f"),
    ToolCallDelta(0, 0, '{"x"'),
    ToolCallDelta(0, 0, ": 1}"),
    ToolCallStart(0, 1, "c2", "g"),
)


@pytest.fixture
def chat(make: MakeCall) -> ClientRequest:
    messages = [{"role": "user", "content": "hi"}]
    return make("/api/chat", {"model": "m:latest", "messages": messages})


@pytest.fixture
def generate(make: MakeCall) -> ClientRequest:
    return make("/api/generate", {"model": "m", "prompt": "hi"})


def create(call: ClientRequest, response_context: ResponseContext) -> Any:
    adapter = Ollama()
    return adapter.create_encoder(call, adapter.decode_request(call), response_context)


def stream(encoder: GenerationEncoder, events: Sequence[Event]) -> list[Any]:
    """Encode a stream, each event in a batch of its own, and return the lines."""
    wire = b"".join(encoder.encode_events([event]) for event in events)
    assert wire.endswith(b"\n")
    assert wire.isascii()
    return [msgspec.json.decode(line) for line in wire[:-1].split(b"\n")]


def test_stream_has_a_line_for_each_piece(
    chat: ClientRequest, response_context: ResponseContext
) -> None:
    encoder = create(chat, response_context)

    lines = stream(encoder, (TextDelta("a\u2028"), TextDelta(""), TextDelta("🗼"), *END))

    assert encoder.content_type == "application/x-ndjson"
    assert encoder.headers() == ()
    assert [line["message"]["content"] for line in lines] == ["a\u2028", "🗼", ""]
    assert [line["done"] for line in lines] == [False, False, True]
    assert {line["model"] for line in lines} == {"m:latest"}
    assert lines[-1]["done_reason"] == "stop"
    assert (lines[-1]["prompt_eval_count"], lines[-1]["eval_count"]) == (2, 3)


def test_generate_has_the_text_as_response(
    generate: ClientRequest, response_context: ResponseContext
) -> None:
    lines = stream(create(generate, response_context), (ReasoningDelta("hm"), TextDelta("a"), *END))

    assert [(line["response"], line.get("thinking")) for line in lines] == [
        ("", "hm"),
        ("a", None),
        ("", None),
    ]


def test_think_false_shows_no_thinking(
    chat: ClientRequest, response_context: ResponseContext
) -> None:
    """Given a worker that reasons although it was asked not to."""
    message = b'{"role":"user","content":"hi"}'
    body = b'{"model":"m","messages":[%b],"think":false}' % message
    call = msgspec.structs.replace(chat, body=body)
    events = (ReasoningDelta("hm"), TextDelta("a"), *END)

    lines = stream(create(call, response_context), events)
    unary = msgspec.json.decode(create(call, response_context).encode_unary(aggregate(events)).body)

    assert [line["message"] for line in lines[:1]] == [{"role": "assistant", "content": "a"}]
    assert unary["message"] == {"role": "assistant", "content": "a"}


def test_reasoning_and_refusals_are_lines(
    chat: ClientRequest, response_context: ResponseContext
) -> None:
    events = (
        ReasoningDelta("hm"),
        ReasoningDelta(""),
        RefusalDelta("no"),
        ResponseMetadata(),
        ChoiceEnd("content_filter"),
        StreamEnd(),
    )

    first, second, last = stream(create(chat, response_context), events)

    assert first["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert second["message"]["content"] == "no"
    assert last["done_reason"] == "stop"
    assert "eval_count" not in last


def test_tool_calls_are_one_line_with_objects(
    chat: ClientRequest, response_context: ResponseContext
) -> None:
    first, last = stream(
        create(chat, response_context), (*CALL, ChoiceEnd("tool_calls"), StreamEnd())
    )

    assert first["message"]["tool_calls"] == [
        {"id": "c1", "function": {"index": 0, "name": "f", "arguments": {"x": 1}}},
        {"id": "c2", "function": {"index": 1, "name": "g", "arguments": {}}},
    ]
    assert last["done_reason"] == "stop"


@pytest.mark.parametrize("arguments", ['{"x', "[1]", "5", '"a"', '"'])
def test_arguments_that_are_no_object_are_one_argument(
    chat: ClientRequest, response_context: ResponseContext, arguments: str
) -> None:
    events = (ToolCallStart(0, 0, "c", "f"), ToolCallDelta(0, 0, arguments), *END)
    encoder = create(chat, response_context)

    [line, _] = stream(encoder, events)

    [call] = line["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"arguments": arguments}
    assert len(encoder.losses) == 1


def test_logprobs_are_on_the_line_of_their_token(
    chat: ClientRequest, response_context: ResponseContext
) -> None:
    top = (TopLogprob("b", float("-inf")),)
    delta = TextDelta("a", logprobs=(TokenLogprob("a", None, top, data=b"\xff"),))

    first, _ = stream(create(chat, response_context), (delta, *END))

    alternative = {"token": "b", "logprob": -9999.0, "bytes": [98]}
    expected = {"token": "a", "logprob": -9999.0, "bytes": [255], "top_logprobs": [alternative]}

    assert first["logprobs"] == [expected]
    assert first["message"]["content"] == "a"


def test_error_is_the_last_line(chat: ClientRequest, response_context: ResponseContext) -> None:
    wire = create(chat, response_context).encode_error_event(StreamBroken("the worker stöpped"))

    assert wire == b'{"error":"the worker st\\u00f6pped"}\n'


def test_unary_response_is_one_object(
    chat: ClientRequest, response_context: ResponseContext
) -> None:
    token = TokenLogprob("a", -0.5)
    events = (ReasoningDelta("hm"), TextDelta("a", logprobs=(token,)), *CALL, *END)

    response = create(chat, response_context).encode_unary(aggregate(events))

    body = msgspec.json.decode(response.body)
    assert body["message"]["content"] == "a"
    assert body["message"]["thinking"] == "hm"
    assert len(body["message"]["tool_calls"]) == 2
    assert body["logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    assert body["created_at"].startswith("1970-01-01T00:00:0")
    assert body["done"]


def test_unary_response_without_choices_is_empty(
    generate: ClientRequest, response_context: ResponseContext
) -> None:
    response = create(generate, response_context).encode_unary(aggregate([StreamEnd()]))

    assert msgspec.json.decode(response.body)["response"] == ""


def test_durations_of_the_worker_are_preferred(
    generate: ClientRequest, response_context: ResponseContext
) -> None:
    timing = Timing(queue=0.25, prefill=0.5)

    response = create(generate, response_context).encode_unary(
        aggregate([timing, TextDelta("a"), *END])
    )

    body = msgspec.json.decode(response.body)
    assert body["load_duration"] == 250_000_000
    assert body["prompt_eval_duration"] == 500_000_000

    parts = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert sum(body[name] for name in parts) == body["total_duration"]


def test_durations_are_measured(response_context: ResponseContext) -> None:
    timer = ResponseTimer(
        response_context.clock, 0.0
    )  # each reading of the clock advances it by a second
    timer.record_events([StreamStart()])
    timer.record_events([TextDelta("a")])
    timer.record_events([TextDelta("b")])

    second = 1_000_000_000
    assert timer.measure() == (3 * second, second, second, second)


def test_timing_of_a_stream_is_used(chat: ClientRequest, response_context: ResponseContext) -> None:
    *_, last = stream(create(chat, response_context), (Timing(queue=0.5), TextDelta("a"), *END))

    assert last["load_duration"] == 500_000_000


def test_length_is_a_reason(chat: ClientRequest, response_context: ResponseContext) -> None:
    *_, last = stream(
        create(chat, response_context), (TextDelta("a"), ChoiceEnd("length"), StreamEnd())
    )

    assert last["done_reason"] == "length"


def test_embed_is_normalized_and_shortened(
    make: MakeCall, response_context: ResponseContext
) -> None:
    events = (Embedding(0, (3.0, 4.0, 9.0)), Embedding(1, (0.0, 0.0, 1.0)), Usage(5), StreamEnd())
    call = make("/api/embed", {"model": "m", "input": ["a", "b"], "dimensions": 2})

    encoder = create(call, response_context)
    body = msgspec.json.decode(encoder.encode_unary(aggregate(events)).body)

    assert body["embeddings"] == [[0.6, 0.8], [0.0, 0.0]]
    assert body["prompt_eval_count"] == 5
    assert encoder.headers() == ()
    assert encoder.encode_events(events) == b""
    assert encoder.encode_error_event(StreamBroken("x")) == b'{"error":"x"}'


def test_embed_without_usage_has_no_count(
    make: MakeCall, response_context: ResponseContext
) -> None:
    call = make("/api/embed", {"model": "m", "input": "a", "dimensions": 0})

    response = create(call, response_context).encode_unary(
        aggregate([Embedding(0, (2.0,)), StreamEnd()])
    )

    body = msgspec.json.decode(response.body)
    assert body["embeddings"] == [[1.0]]
    assert "prompt_eval_count" not in body


def test_embeddings_is_the_vector_of_the_worker(
    make: MakeCall, response_context: ResponseContext
) -> None:
    call = make("/api/embeddings", {"model": "m", "prompt": "a"})

    response = create(call, response_context).encode_unary(
        aggregate([Embedding(0, (3.0, 4.0)), StreamEnd()])
    )

    assert response.body == b'{"embedding":[3.0,4.0]}'


def test_zero_vector_stays() -> None:
    assert normalize((0.0, 0.0)) == [0.0, 0.0]
