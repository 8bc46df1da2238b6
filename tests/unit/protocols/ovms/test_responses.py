"""Responses, byte for byte: order of keys, frames, and errors."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import RateLimitExceeded, StreamBroken
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    FinishReason,
    PromptEcho,
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
    Usage,
)
from protocols.core.interfaces import ResponseContext, ResponseEncoder
from protocols.ovms.endpoints import OVMS

CHAT = "/v3/chat/completions"
TEXT = "/v3/completions"
USED = Usage(2, 3)


def create_encoder(
    make: Any, response_context: ResponseContext, path: str, *, profile: str = "2026", **fields: Any
) -> ResponseEncoder:
    body = {"messages": [{"role": "user", "content": "say hi"}], "prompt": "a b", "input": "a"}
    call = make(path, {"model": "llama3"} | body | fields)
    adapter = OVMS(profile)
    return adapter.create_encoder(call, adapter.decode_request(call), response_context)


def encode_unary_body(of: ResponseEncoder, events: Sequence[Event]) -> bytes:
    fold = ResponseAccumulator()
    fold.add(events)
    return of.encode_unary(fold.result()).body


def build_text_events(reason: FinishReason = "eos") -> list[Event]:
    return [
        StreamStart(2), TextDelta("Hello"), TextDelta(" world"), TextDelta("!"), ChoiceEnd(reason),
         USED, StreamEnd()
    ]  # fmt: skip


# --- unary responses ------------------------------------------------------------------------------


def test_documented_chat_response_of_profile_2024(
    make: Any, response_context: ResponseContext
) -> None:
    """The example in the documentation of that release."""
    events: list[Event] = [
        TextDelta("\n\nHow can I help you?"),
        ChoiceEnd("eos"),
        USED,
        StreamEnd(),
    ]
    assert encode_unary_body(
        create_encoder(make, response_context, CHAT, profile="2024"), events
    ) == (
        b'{"choices":[{"finish_reason":"stop","index":0,"logprobs":null,"message":{"content":'
        b'"\\n\\nHow can I help you?","role":"assistant"}}],"created":1716825108,'
        b'"model":"llama3","object":"chat.completion"}'
    )


def test_unary_chat_response_of_profile_2026(make: Any, response_context: ResponseContext) -> None:
    assert encode_unary_body(create_encoder(make, response_context, CHAT), build_text_events()) == (
        b'{"choices":[{"finish_reason":"stop","index":0,"logprobs":null,"message":{"content":'
        b'"Hello world!","role":"assistant","tool_calls":[]}}],"created":1716825108,'
        b'"model":"llama3","object":"chat.completion",'
        b'"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}}'
    )


@pytest.mark.parametrize(
    ("profile", "usage"),
    [
        ("2026", b',"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}'),
        ("2024", b""),
    ],
)
def test_unary_completion_response_per_profile(
    make: Any, response_context: ResponseContext, profile: str, usage: bytes
) -> None:
    assert encode_unary_body(
        create_encoder(make, response_context, TEXT, profile=profile), build_text_events()
    ) == (
        b'{"choices":[{"finish_reason":"stop","index":0,"logprobs":null,"text":"Hello world!"}],'
        b'"created":1716825108,"model":"llama3","object":"text_completion"' + usage + b"}"
    )


@pytest.mark.parametrize(
    ("reason", "today", "early"),
    [
        ("eos", "stop", "stop"),
        ("stop", "stop", "stop"),
        ("length", "length", "stop"),
        ("tool_calls", "tool_calls", "stop"),
        ("content_filter", "unknown", "stop"),
        ("unknown", "unknown", "stop"),
    ],
)
def test_finish_reason_names_by_profile(
    make: Any, response_context: ResponseContext, reason: FinishReason, today: str, early: str
) -> None:
    for profile, expected in (("2026", today), ("2024", early)):
        body = encode_unary_body(
            create_encoder(make, response_context, CHAT, profile=profile), build_text_events(reason)
        )
        assert msgspec.json.decode(body)["choices"][0]["finish_reason"] == expected


@pytest.mark.parametrize("profile", ["2026", "2024"])
def test_unknown_finish_reason_is_shown_as_the_worker_wrote_it(
    make: Any, response_context: ResponseContext, profile: str
) -> None:
    end = ChoiceEnd("unknown", own_word="later")
    events: list[Event] = [TextDelta("a"), end, USED, StreamEnd()]

    body = encode_unary_body(create_encoder(make, response_context, CHAT, profile=profile), events)

    assert msgspec.json.decode(body)["choices"][0]["finish_reason"] == "later"


def test_unary_response_with_reasoning_and_tool_calls(
    make: Any, response_context: ResponseContext
) -> None:
    events: list[Event] = [
        ReasoningDelta("hm"),
        ToolCallStart(0, 0, "c1", "f"),
        ToolCallDelta(0, 0, '{"x":1}'),
        ChoiceEnd("tool_calls"),
        StreamEnd(),
    ]
    body = encode_unary_body(create_encoder(make, response_context, CHAT), events)

    assert (
        b'"message":{"content":"","reasoning_content":"hm","role":"assistant","tool_calls":['
        in body
    )
    assert (
        b'{"id":"c1","type":"function","function":{"name":"f","arguments":"{\\"x\\":1}"}}' in body
    )
    assert b"usage" not in body  # usage is never invented


def test_chat_logprobs(make: Any, response_context: ResponseContext) -> None:
    events: list[Event] = [
        TextDelta("é", logprobs=(TokenLogprob("é", -0.5),)),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]
    assert (
        b'"logprobs":{"content":[{"token":"\xc3\xa9","logprob":-0.5,"bytes":[195,169],'
        b'"top_logprobs":[]}]}'
    ) in encode_unary_body(create_encoder(make, response_context, CHAT, logprobs=True), events)


def test_completion_logprobs_use_byte_offsets(make: Any, response_context: ResponseContext) -> None:
    tokens = (TokenLogprob("é", None), TokenLogprob("b", -1.5))
    events: list[Event] = [TextDelta("éb", logprobs=tokens), ChoiceEnd("eos"), StreamEnd()]
    assert (
        b'"logprobs":{"tokens":["\xc3\xa9","b"],"token_logprobs":[null,-1.5],'
        b'"top_logprobs":[{"\xc3\xa9":null},{"b":-1.5}],"text_offset":[0,2]}'
    ) in encode_unary_body(create_encoder(make, response_context, TEXT, logprobs=1), events)


def test_unary_response_with_two_choices(make: Any, response_context: ResponseContext) -> None:
    events: list[Event] = [
        TextDelta("a", 0),
        ChoiceEnd("eos", 0),
        TextDelta("b", 1),
        ChoiceEnd("length", 1),
        StreamEnd(),
    ]
    choices = msgspec.json.decode(
        encode_unary_body(create_encoder(make, response_context, CHAT, n=2, best_of=2), events)
    )["choices"]

    assert [(c["index"], c["finish_reason"]) for c in choices] == [(0, "stop"), (1, "length")]


def test_echo_and_refusal_are_part_of_the_text(
    make: Any, response_context: ResponseContext
) -> None:
    echoed: list[Event] = [PromptEcho(0, "a b"), TextDelta("c"), ChoiceEnd("eos"), StreamEnd()]
    assert b'"text":"a bc"' in encode_unary_body(
        create_encoder(make, response_context, TEXT, echo=True), echoed
    )

    refused: list[Event] = [RefusalDelta("no"), ChoiceEnd("eos"), StreamEnd()]
    assert b'"content":"no"' in encode_unary_body(
        create_encoder(make, response_context, CHAT), refused
    )


# --- streams --------------------------------------------------------------------------------------

TAIL = b',"created":1716825108,"model":"llama3","object":"chat.completion.chunk"'
HANDSHAKE = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null},'
    b'"finish_reason":null}]' + TAIL + b"}\n\n"
)


def format_chat_chunk(delta: bytes, reason: bytes = b"null", usage: bytes = b"") -> bytes:
    return (
        b'data: {"choices":[{"index":0,"logprobs":null,"delta":' + delta + b',"finish_reason":'
        + reason + b"}]" + TAIL + usage + b"}\n\n"
    )  # fmt: skip


def test_chat_stream_bytes_and_headers(make: Any, response_context: ResponseContext) -> None:
    of = create_encoder(make, response_context, CHAT, stream=True)
    assert of.content_type == "text/event-stream"
    assert of.headers() == ()
    assert of.encode_events([StreamStart(2), ResponseMetadata(model="x")]) == b""
    assert of.encode_events([TextDelta("Hello")]) == HANDSHAKE + format_chat_chunk(
        b'{"content":"Hello"}'
    )
    assert of.encode_events([TextDelta(' "w"\n')]) == format_chat_chunk(
        b'{"content":" \\"w\\"\\n"}'
    )
    assert of.encode_events([TextDelta("")]) == b""
    assert of.encode_events([TextDelta("!"), ChoiceEnd("length")]) == format_chat_chunk(
        b'{"content":"!"}', b'"length"'
    )
    assert of.encode_events([USED, Timing(queue=1.0), StreamEnd()]) == b"data: [DONE]\n\n"


def test_finish_reason_without_text_is_a_separate_chunk(
    make: Any, response_context: ResponseContext
) -> None:
    of = create_encoder(make, response_context, CHAT, stream=True)
    of.encode_events([TextDelta("Hello")])
    assert of.encode_events([ChoiceEnd("eos")]) == format_chat_chunk(b"{}", b'"stop"')

    empty = create_encoder(make, response_context, CHAT, stream=True)
    assert empty.encode_events([ChoiceEnd("eos"), StreamEnd()]) == (
        HANDSHAKE + format_chat_chunk(b"{}", b'"stop"') + b"data: [DONE]\n\n"
    )


def test_stream_with_include_usage(make: Any, response_context: ResponseContext) -> None:
    of = create_encoder(
        make, response_context, CHAT, stream=True, stream_options={"include_usage": True}
    )
    assert of.encode_events(build_text_events()) == (
        HANDSHAKE
        + format_chat_chunk(b'{"content":"Hello"}', usage=b',"usage":null')
        + format_chat_chunk(b'{"content":" world"}', usage=b',"usage":null')
        + format_chat_chunk(b'{"content":"!"}', b'"stop"', b',"usage":null')
        + b'data: {"choices":[]' + TAIL
        + b',"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}}\n\n'
        + b"data: [DONE]\n\n"
    )  # fmt: skip


def test_chat_stream_with_reasoning_and_tool_calls(
    make: Any, response_context: ResponseContext
) -> None:
    of = create_encoder(make, response_context, CHAT, stream=True)
    events: list[Event] = [
        ReasoningDelta("hm"),
        ToolCallStart(0, 0, "c1", "f"),
        ToolCallDelta(0, 0, '{"x"'),
    ]

    assert of.encode_events(events) == (
        HANDSHAKE
        + format_chat_chunk(b'{"reasoning_content":"hm"}')
        + format_chat_chunk(
            b'{"tool_calls":[{"id":"c1","type":"function","index":0,"function":{"name":"f"}}]}'
        )
        + format_chat_chunk(b'{"tool_calls":[{"index":0,"function":{"arguments":"{\\"x\\""}}]}')
    )
    assert of.encode_events([ChoiceEnd("tool_calls")]) == format_chat_chunk(b"{}", b'"tool_calls"')


def test_completion_stream(make: Any, response_context: ResponseContext) -> None:
    of = create_encoder(make, response_context, TEXT, stream=True)
    tail = b',"created":1716825108,"model":"llama3","object":"text_completion.chunk"}\n\n'
    begun = b'data: {"choices":[{"index":0,"text":"","finish_reason":null}]' + tail
    chunk = (
        b'data: {"choices":[{"index":0,"logprobs":null,"text":"Hi","finish_reason":null}]' + tail
    )
    ended = (
        b'data: {"choices":[{"index":0,"logprobs":null,"text":"","finish_reason":"stop"}]' + tail
    )

    assert of.encode_events([TextDelta("Hi")]) == begun + chunk
    assert of.encode_events([ChoiceEnd("eos"), StreamEnd()]) == ended + b"data: [DONE]\n\n"


def test_profile_2024_stream_has_no_role_chunk(
    make: Any, response_context: ResponseContext
) -> None:
    of = create_encoder(make, response_context, CHAT, profile="2024", stream=True)
    head = b'data: {"choices":[{"finish_reason":'

    assert of.encode_events(build_text_events("length")[:2]) == (
        head + b'null,"index":0,"logprobs":null,"delta":{"content":"Hello"}}]' + TAIL + b"}\n\n"
    )
    assert of.encode_events([ReasoningDelta("hm")]) == b""
    assert of.encode_events([ChoiceEnd("length"), USED, StreamEnd()]) == (
        head + b'"stop","index":0,"logprobs":null,"delta":{}}]' + TAIL + b"}\n\ndata: [DONE]\n\n"
    )


def test_stream_error_is_a_json_object_without_sse_framing(
    make: Any, response_context: ResponseContext
) -> None:
    of = create_encoder(make, response_context, CHAT, stream=True)
    of.encode_events([TextDelta("Hello")])

    assert of.encode_error_event(StreamBroken("the worker's answer stopped before its end")) == (
        b'{"error":"Mediapipe execution failed. MP status - INVALID_ARGUMENT: '
        b'CalculatorGraph::Run() failed: \\nCalculator::Process() for node \\"LLMExecutor\\" '
        b"failed: the worker's answer stopped before its end\"}"
    )
    assert of.encode_error_event(RateLimitExceeded("slow down")) == b'{"error":"slow down"}'


# --- embeddings -----------------------------------------------------------------------------------


def build_embedding_events() -> list[Event]:
    return [Embedding(0, (3.0, 0.5)), Embedding(1, (1.0, -0.25)), Usage(3), StreamEnd()]


def test_embeddings_response(make: Any, response_context: ResponseContext) -> None:
    of = create_encoder(make, response_context, "/v3/embeddings")
    assert of.headers() == ()
    assert encode_unary_body(of, build_embedding_events()) == (
        b'{"object":"list","data":[{"object":"embedding","embedding":[3.0,0.5],"index":0},'
        b'{"object":"embedding","embedding":[1.0,-0.25],"index":1}],'
        b'"usage":{"prompt_tokens":3,"total_tokens":3}}'
    )


def test_embeddings_encoder_writes_no_stream_events(
    make: Any, response_context: ResponseContext
) -> None:
    of = create_encoder(make, response_context, "/v3/embeddings")
    assert of.encode_events(build_embedding_events()) == b""
    assert b'node \\"EmbeddingsExecutor\\" failed: cut' in of.encode_error_event(
        StreamBroken("cut")
    )


def test_base64_embeddings_response(make: Any, response_context: ResponseContext) -> None:
    body = encode_unary_body(
        create_encoder(make, response_context, "/v3/embeddings", encoding_format="base64"),
        build_embedding_events(),
    )
    assert msgspec.json.decode(body)["data"][0]["embedding"] == "AABAQAAAAD8="
