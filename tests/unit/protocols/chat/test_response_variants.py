"""Differences in responses between the chat protocols, and fields beside the text."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from protocols.chat.embeddings import EmbeddingEncoder
from protocols.chat.responses import ChatEncoder, CompletionEncoder, ResponseStyle
from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import StreamBroken
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    PromptEcho,
    ReasoningDelta,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    Usage,
)
from protocols.core.interfaces import ResponseContext, ResponseEncoder
from protocols.core.request import EmbeddingRequest, GenerationRequest, ResponseOptions

CHAT = GenerationRequest(model="m", kind="chat")
TEXT = GenerationRequest(model="m", kind="completion", prompts=("a b",))
EMBED = EmbeddingRequest(model="m", inputs=("a",))
QUIET = ResponseOptions(usage="none")
IDS = ResponseOptions(usage="none", token_ids=True)
ENCODERS = [(ChatEncoder, CHAT), (CompletionEncoder, TEXT), (EmbeddingEncoder, EMBED)]


def build_streaming_request(
    request: GenerationRequest, want: ResponseOptions = QUIET
) -> GenerationRequest:
    return msgspec.structs.replace(request, stream=True, response_options=want)


def encode_unary_body(encoder: ResponseEncoder, events: Sequence[Event]) -> Any:
    fold = ResponseAccumulator()
    fold.add(events)
    return json.loads(encoder.encode_unary(fold.result()).body)


def encode_stream_choices(encoder: ResponseEncoder, events: Sequence[Event]) -> list[Any]:
    """Return the only choice of each chunk."""
    lines = encoder.encode_events(events).decode().removesuffix("data: [DONE]\n\n").split("\n\n")
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line]


def test_response_style_controls_chat_chunks(response_context: ResponseContext) -> None:
    style = ResponseStyle(
        chunk_keys=("choices", "created", "model", "object", "usage"),
        chat_chunk_keys=("index", "logprobs", "delta", "finish_reason"),
        first_delta=b'{"role":"assistant","content":null}',
        last_delta=b'{"content":""}',
        usage_position="finish",
        event_prefix=b"data:",
    )
    encoder = ChatEncoder(
        style,
        build_streaming_request(CHAT, ResponseOptions(usage="final")),
        response_context,
        model="other",
    )
    body = encoder.encode_events(
        [
            TextDelta("a"),
            ChoiceEnd("length"),
            Usage(2, 1),
            ResponseMetadata(fingerprint="x"),
            StreamEnd(),
        ]
    )
    tail = '"created":1700000000,"model":"other","object":"chat.completion.chunk"'
    usage = '{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}'
    shape = 'data:{"choices":[{"index":0,"logprobs":null,"delta":{%s},"finish_reason":%s}],'

    assert body.decode().split("\n\n") == [
        shape % ('"role":"assistant","content":null', "null") + tail + "}",
        shape % ('"content":"a"', "null") + tail + "}",
        shape % ('"content":""', '"length"') + f'{tail},"usage":{usage}}}',
        "data: [DONE]",
        "",
    ]


def test_response_style_controls_unary_key_order(response_context: ResponseContext) -> None:
    style = ResponseStyle(
        unary_keys=("choices", "object"),
        chat_choice_keys=("finish_reason", "message"),
        message_keys=("content", "refusal", "role"),
        default_values={"refusal": b"false"},
    )
    fold = ResponseAccumulator()

    fold.add(
        [
            ReasoningDelta("hm"),
            TextDelta("a"),
            ChoiceEnd("eos"),
            Usage(2, 1),
            ResponseMetadata(fingerprint="x"),
            StreamEnd(),
        ]
    )

    assert ChatEncoder(style, CHAT, response_context).encode_unary(fold.result()).body == (
        b'{"choices":[{"finish_reason":"stop","message":'
        b'{"content":"a","refusal":false,"role":"assistant"}}],"object":"chat.completion"}'
    )


def test_stream_without_token_counts_has_no_usage(response_context: ResponseContext) -> None:
    encoder = ChatEncoder(
        ResponseStyle(usage_position="finish"),
        build_streaming_request(CHAT, ResponseOptions(usage="final")),
        response_context,
    )

    body = encoder.encode_events([TextDelta("a"), ChoiceEnd("eos"), StreamEnd()])

    assert b"usage" not in body
    assert body.endswith(b'"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')


def test_index_scope_prompt_shares_the_index_of_a_prompt(response_context: ResponseContext) -> None:
    request = msgspec.structs.replace(TEXT, prompts=("a", "b"), n=2)
    events = [e for i in range(4) for e in (TextDelta("x", i), ChoiceEnd("eos", i))] + [StreamEnd()]
    style = ResponseStyle(index_scope="prompt")

    response = encode_unary_body(CompletionEncoder(style, request, response_context), events)
    stream = encode_stream_choices(
        CompletionEncoder(style, build_streaming_request(request), response_context), events
    )

    assert [choice["index"] for choice in response["choices"]] == [0, 0, 1, 1]
    assert [choice["index"] for choice in stream if choice["finish_reason"]] == [0, 0, 1, 1]


@pytest.mark.parametrize(("encoder", "request_"), ENCODERS)
def test_elapsed_header_reports_milliseconds(
    response_context: ResponseContext, encoder: Any, request_: Any
) -> None:
    times: Iterator[float] = iter([10.0, 10.0425])
    clock = lambda: next(times)  # noqa: E731 - a clock that is read twice
    style = ResponseStyle(headers=(("x-a", "b"),), elapsed_header="x-ms", version_header=None)
    moved = msgspec.structs.replace(response_context, clock=clock)

    measured_encoder = encoder(style, request_, moved, headers=(("x-c", "d"),))

    assert measured_encoder.headers() == (("x-a", "b"), ("x-c", "d"), ("x-ms", "42"))


@pytest.mark.parametrize(("encoder", "request_"), ENCODERS)
def test_response_style_encodes_error_events(
    response_context: ResponseContext, encoder: Any, request_: Any
) -> None:
    style = ResponseStyle(encode_error_event=lambda error: error.message.encode())

    assert (
        encoder(style, request_, response_context).encode_error_event(StreamBroken("it stopped"))
        == b"it stopped"
    )


def test_unary_response_with_token_ids_and_fingerprint(response_context: ResponseContext) -> None:
    events: list[Event] = [
        ResponseMetadata(fingerprint="fp_1"),
        TextDelta("a", token_ids=(7,)),
        TextDelta("b", token_ids=(8,)),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]
    for encoder, request in ((ChatEncoder, CHAT), (CompletionEncoder, TEXT)):
        wanted = msgspec.structs.replace(request, response_options=IDS)

        response = encode_unary_body(encoder(ResponseStyle(), wanted, response_context), events)
        unasked = encode_unary_body(encoder(ResponseStyle(), request, response_context), events)

        assert response["choices"][0]["token_ids"] == [7, 8]
        assert response["system_fingerprint"] == "fp_1"
        assert "token_ids" not in unasked["choices"][0]


def test_completion_stream_with_token_ids(response_context: ResponseContext) -> None:
    events: list[Event] = [
        StreamStart(2),
        ResponseMetadata(fingerprint="fp_1"),
        TextDelta("a", token_ids=(7,)),
        TextDelta(""),
        TextDelta("", token_ids=(8,)),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]

    chunks = encode_stream_choices(
        CompletionEncoder(ResponseStyle(), build_streaming_request(TEXT, IDS), response_context),
        events,
    )
    unasked = encode_stream_choices(
        CompletionEncoder(ResponseStyle(), build_streaming_request(TEXT), response_context), events
    )

    assert [(one["text"], one.get("token_ids")) for one in chunks] == [
        ("a", [7]),
        ("", [8]),
        ("", None),
    ]
    assert [one["text"] for one in unasked] == ["a", ""]
    assert all("token_ids" not in one for one in unasked)


def test_events_without_text_write_nothing(response_context: ResponseContext) -> None:
    events: list[Event] = [StreamStart(2), ResponseMetadata(), TextDelta("")]

    assert (
        ChatEncoder(ResponseStyle(), build_streaming_request(CHAT), response_context).encode_events(
            events
        )
        == b""
    )
    assert (
        CompletionEncoder(
            ResponseStyle(), build_streaming_request(TEXT), response_context
        ).encode_events(events)
        == b""
    )
    assert (
        EmbeddingEncoder(ResponseStyle(), EMBED, response_context).encode_events(
            [Embedding(0, (1.0,))]
        )
        == b""
    )


def test_chat_response_includes_the_echoed_prompt(response_context: ResponseContext) -> None:
    events: list[Event] = [
        PromptEcho(0, "say hi"),
        TextDelta(" Hello"),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]

    stream = encode_stream_choices(
        ChatEncoder(ResponseStyle(), build_streaming_request(CHAT), response_context), events
    )
    response = encode_unary_body(ChatEncoder(ResponseStyle(), CHAT, response_context), events)

    assert [one["delta"].get("content") for one in stream] == ["", "say hi", " Hello", None]
    assert response["choices"][0]["message"]["content"] == "say hi Hello"


def test_embeddings_response_without_token_counts_has_no_usage(
    response_context: ResponseContext,
) -> None:
    response = encode_unary_body(
        EmbeddingEncoder(ResponseStyle(), EMBED, response_context),
        [Embedding(0, (1.0,)), StreamEnd()],
    )

    assert list(response) == ["object", "data", "model"]
