"""Implausible token counts and other numbers of workers are ignored."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.runtime.build import build_adapter
from protocols.core.aggregate import UnaryResponse, aggregate
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    Usage,
)
from protocols.core.interfaces import ResponseContext, UpstreamAdapter
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Message,
    ResponseOptions,
    TextPart,
)
from protocols.core.token_counts import MAX_TOKENS, UsageReader
from protocols.mindie.params import PROFILES
from protocols.mindie.responses import TextEncoder

IMPLAUSIBLE = {
    "negative": -1,
    "above any context": MAX_TOKENS * 8 + 1,
    "2^62": 2**62,
    "2^63": 2**63,
    "10^18": 10**18,
    "30 digits": 10**30,
    "float": 2.5,
    "whole float": 2.0,
    "string": "2",
    "list": [2],
    "object": {"tokens": 2},
    "boolean": True,
}
CHAT = GenerationRequest(model="m", kind="chat", messages=(Message("user", (TextPart("hi"),)),))
PROMPT = GenerationRequest(
    model="m", kind="completion", prompts=("hi",), response_options=ResponseOptions(details=True)
)
PROTOCOLS = {
    "openai": ("openai", "vllm", CHAT),
    "databricks": ("databricks", None, CHAT),
    "ovms": ("ovms", None, CHAT),
    "mindie chat": ("mindie", None, CHAT),
    "mindie generate": ("mindie", None, PROMPT),
    "triton": ("triton", "vllm", PROMPT),
    "tgi chat": ("tgi", None, CHAT),
    "tgi generate": ("tgi", None, PROMPT),
    "anthropic": ("anthropic", None, CHAT),
}


def build(name: str) -> tuple[UpstreamAdapter, GenerationRequest]:
    protocol, profile, request = PROTOCOLS[name]
    adapter: Any = build_adapter(protocol, profile, {})
    return adapter, request


def write_chat(prompt: Any, completion: Any, *, stream: bool) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    head = {"id": "c", "created": 1, "model": "m"}
    if not stream:
        choice = {"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}
        return json.dumps(head | {"choices": [choice], "usage": usage}).encode()
    chunks: list[dict[str, Any]] = [
        head | {"choices": [{"index": 0, "delta": {"content": "Hello"}}]},
        head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage},
    ]
    return write_events(*chunks) + b"data: [DONE]\n\n"


def write_message(prompt: Any, completion: Any, *, stream: bool) -> bytes:
    usage = {"input_tokens": prompt, "output_tokens": completion}
    if not stream:
        content = [{"type": "text", "text": "Hello"}]
        message = {"id": "c", "model": "m", "content": content, "stop_reason": "end_turn"}
        return json.dumps(message | {"usage": usage}).encode()
    return write_events(
        {"type": "message_start", "message": {"id": "c", "model": "m"}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "Hello"},
        },
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
        {"type": "message_stop"},
    )


def write_events(*events: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)


def write(name: str, prompt: Any, completion: Any, *, stream: bool) -> bytes:
    """Build a worker's response "Hello" with these token counts."""
    fields: dict[str, Any]
    match name:
        case "triton":
            fields = {
                "model_name": "m",
                "text_output": "Hello",
                "finish_reason": "stop",
                "num_input_tokens": prompt,
                "num_output_tokens": completion,
            }
        case "tgi generate":
            details = {
                "finish_reason": "eos_token",
                "generated_tokens": completion,
                "input_length": prompt,
            }
            fields = {"generated_text": "Hello", "details": details}
            if stream:
                fields["token"] = {"id": 1, "text": "Hello", "special": False}
        case "anthropic":
            return write_message(prompt, completion, stream=stream)
        case "mindie generate":
            details = {"finish_reason": "eos_token", "generated_tokens": completion}
            fields = {"model_name": "m", "text_output": "Hello", "details": details}
        case _:
            return write_chat(prompt, completion, stream=stream)
    return write_events(fields) if stream else json.dumps(fields).encode()


def read(name: str, wire: bytes, *, stream: bool, **fields: Any) -> list[Event]:
    adapter, request = build(name)
    decoder = adapter.create_decoder(replace(request, stream=stream, **fields))
    return [*decoder.feed(wire), *decoder.close()]


def select(events: list[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_plausible_usage_is_read(name: str, *, stream: bool) -> None:
    events = read(name, write(name, 3, 2, stream=stream), stream=stream)

    assert events[-1] == StreamEnd()
    assert select(events, Usage) == ([] if name == "mindie generate" else [Usage(3, 2)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", IMPLAUSIBLE.values(), ids=IMPLAUSIBLE.keys())
@pytest.mark.parametrize("name", PROTOCOLS)
def test_implausible_usage_is_ignored_and_the_response_is_complete(
    name: str, value: Any, *, stream: bool
) -> None:
    for counts in ((3, value), (value, 2)):
        if name == "mindie generate" and counts[0] is value:
            continue  # it reports no prompt tokens
        if name == "triton" and isinstance(value, list):
            continue  # an array of one output
        events = read(name, write(name, *counts, stream=stream), stream=stream)

        assert events[-1] == StreamEnd(has_ignored_usage=True)
        assert select(events, Usage) == []
        texts = select(events, TextDelta)
        assert "".join(text.text for text in texts) == "Hello"
        assert all(0 <= text.tokens <= MAX_TOKENS for text in texts)
        assert select(events, StreamStart) in ([], [StreamStart(3)])
        assert [end.finish_reason for end in select(events, ChoiceEnd)] == ["eos"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_missing_usage_is_not_reported_as_implausible(name: str, *, stream: bool) -> None:
    events = read(name, write(name, None, None, stream=stream), stream=stream)

    assert select(events, Usage) == []
    assert events[-1] == StreamEnd()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_usage_above_the_context_length_is_ignored(name: str, *, stream: bool) -> None:
    wire = write(name, 3, 101, stream=stream)

    assert read(name, wire, stream=stream, context_length=100)[-1] == StreamEnd(True)
    assert read(name, wire, stream=stream, context_length=101)[-1] == StreamEnd()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("usage", [7, 1.5, "x", True, [1], [{}], 10**30])
@pytest.mark.parametrize("name", ["openai", "databricks", "ovms", "mindie chat", "tgi chat"])
def test_usage_that_is_no_object_is_ignored(name: str, usage: Any, *, stream: bool) -> None:
    wire = write_chat(1, 2, stream=stream).replace(
        b'{"prompt_tokens": 1, "completion_tokens": 2}', json.dumps(usage).encode()
    )
    events = read(name, wire, stream=stream)

    assert select(events, Usage) == []
    assert events[-1] == StreamEnd(has_ignored_usage=True)
    assert "".join(text.text for text in select(events, TextDelta)) == "Hello"


@pytest.mark.parametrize(
    ("details", "is_ignored"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 1}}, False),
        ({"prompt_tokens_details": {"cached_tokens": -1}}, True),
        ({"prompt_tokens_details": {"cached_tokens": "1"}}, True),
        ({"prompt_tokens_details": [1]}, False),
        ({"completion_tokens_details": "x", "reasoning_tokens": None}, False),
        ({"completion_tokens_details": {"reasoning_tokens": 2**62}}, True),
        ({"reasoning_tokens": 1.5}, True),
    ],
)
def test_usage_with_implausible_details_is_ignored(
    details: dict[str, Any], *, is_ignored: bool
) -> None:
    wire = write_chat(1, 2, stream=False)[:-2] + b"," + json.dumps(details).encode()[1:] + b"}"
    events = read("openai", wire, stream=False)

    assert events[-1] == StreamEnd(is_ignored)
    assert bool(select(events, Usage)) is not is_ignored


def test_the_last_usage_is_not_replaced_by_an_earlier_one_when_it_is_implausible() -> None:
    head = {"id": "c", "model": "m"}
    chunks = [
        head | {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": usage}
        for usage in ({"prompt_tokens": 1, "completion_tokens": 1},
                      {"prompt_tokens": 1, "completion_tokens": -1})
    ]  # fmt: skip
    end = head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}

    events = read("openai", write_events(*chunks, end) + b"data: [DONE]\n\n", stream=True)

    assert select(events, Usage) == []


def test_the_counts_of_a_triton_stream_are_bounded_together() -> None:
    events = [
        {"model_name": "m", "text_output": "a", "num_input_tokens": 1, "num_output_tokens": 60}
    ] * 3
    read_events = read("triton", write_events(*events), stream=True, context_length=100)

    assert select(read_events, Usage) == []
    assert read_events[-1] == StreamEnd(has_ignored_usage=True)
    assert sum(text.tokens for text in select(read_events, TextDelta)) == 62


def test_the_limits_of_token_counts_grow_with_prompts_and_choices() -> None:
    several = GenerationRequest(
        model="m", kind="completion", prompts=("a", "b"), n=3, best_of=4, context_length=10
    )
    reader = UsageReader(several)
    assert (reader.read_prompt_tokens(20), reader.read_completion_tokens(240)) == (20, 240)
    assert reader.build_end() == [StreamEnd()]
    assert reader.read_completion_tokens(241) is None
    assert reader.build_end() == [StreamEnd(has_ignored_usage=True)]

    reader = UsageReader(EmbeddingRequest(model="m", inputs=("a", "b"), context_length=10))
    assert (reader.read_prompt_tokens(20), reader.read_completion_tokens(10)) == (20, 10)
    assert reader.read_prompt_tokens(21) is None


@pytest.mark.parametrize("name", ["openai", "databricks", "ovms"])
def test_implausible_usage_of_embeddings_is_ignored(name: str) -> None:
    adapter, _ = build(name)
    request = EmbeddingRequest(model="m", inputs=("a",))
    for count, is_ignored in ((3, False), (-3, True), ("3", True)):
        body = {"data": [{"index": 0, "embedding": [1.0]}], "usage": {"prompt_tokens": count}}
        decoder = adapter.create_decoder(request)
        events = [*decoder.feed(json.dumps(body).encode()), *decoder.close()]

        assert events[-1] == StreamEnd(is_ignored)
        assert select(events, Usage) == ([] if is_ignored else [Usage(3, 0)])


@pytest.mark.parametrize("created", [-1, 2**62, 10**30, 1.5, True, "1"])
def test_an_implausible_time_of_creation_is_ignored(created: Any) -> None:
    wire = write_chat(1, 2, stream=False).replace(
        b'"created": 1', b'"created": %b' % json.dumps(created).encode()
    )

    assert select(read("openai", wire, stream=False), ResponseMetadata)[0].created is None


def test_a_mindie_response_lists_a_bounded_number_of_steps(
    response_context: ResponseContext,
) -> None:
    encoder = TextEncoder(PROFILES["2x"], PROMPT, response_context, ())
    response: UnaryResponse = aggregate(
        [TextDelta("a"), ChoiceEnd("eos"), Usage(1, 3_000_000), StreamEnd()]
    )

    assert len(encoder.encode_unary(response).body) < 1 << 19
