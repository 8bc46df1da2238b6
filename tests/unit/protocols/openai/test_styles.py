"""What a family writes otherwise, and what an answer says beside its text."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from gateway.core.aggregate import Fold
from gateway.core.errors import StreamBroken
from gateway.core.ports import About, Encoder
from gateway.core.types import (
    Done,
    EmbedRequest,
    End,
    Event,
    GenerateRequest,
    PromptEcho,
    Served,
    Start,
    Text,
    Thought,
    Usage,
    Vector,
    Want,
)
from protocols.openai.answers import ChatEncoder, Style, TextEncoder
from protocols.openai.vectors import VectorEncoder

CHAT = GenerateRequest(model="m", kind="chat")
TEXT = GenerateRequest(model="m", kind="completion", prompts=("a b",))
EMBED = EmbedRequest(model="m", inputs=("a",))
QUIET = Want(usage="none")
IDS = Want(usage="none", token_ids=True)
ENCODERS = [(ChatEncoder, CHAT), (TextEncoder, TEXT), (VectorEncoder, EMBED)]


def streamed(request: GenerateRequest, want: Want = QUIET) -> GenerateRequest:
    return msgspec.structs.replace(request, stream=True, want=want)


def whole(encoder: Encoder, events: Sequence[Event]) -> Any:
    fold = Fold()
    fold.add(events)
    return json.loads(encoder.encode_unary(fold.result()).body)


def pieces(encoder: Encoder, events: Sequence[Event]) -> list[Any]:
    """The one choice of each chunk."""
    lines = encoder.encode_events(events).decode().removesuffix("data: [DONE]\n\n").split("\n\n")
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line]


def test_a_style_of_another_family(about: About) -> None:
    style = Style(
        chunk_keys=("choices", "created", "model", "object", "usage"),
        chat_chunk_keys=("index", "logprobs", "delta", "finish_reason"),
        first_delta=b'{"role":"assistant","content":null}',
        last_delta=b'{"content":""}',
        usage_position="finish",
        event_prefix=b"data:",
    )
    encoder = ChatEncoder(style, streamed(CHAT, Want(usage="final")), about, model="other")
    body = encoder.encode_events(
        [Text("a"), End("length"), Usage(2, 1), Served(fingerprint="x"), Done()]
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


def test_a_whole_answer_has_the_styles_keys_in_their_order(about: About) -> None:
    style = Style(
        unary_keys=("choices", "object"),
        chat_choice_keys=("finish_reason", "message"),
        message_keys=("content", "refusal", "role"),
        default_values={"refusal": b"false"},
    )
    fold = Fold()
    fold.add([Thought("hm"), Text("a"), End("eos"), Usage(2, 1), Served(fingerprint="x"), Done()])

    assert ChatEncoder(style, CHAT, about).encode_unary(fold.result()).body == (
        b'{"choices":[{"finish_reason":"stop","message":'
        b'{"content":"a","refusal":false,"role":"assistant"}}],"object":"chat.completion"}'
    )


def test_a_stream_without_a_count_ends_without_usage(about: About) -> None:
    encoder = ChatEncoder(
        Style(usage_position="finish"), streamed(CHAT, Want(usage="final")), about
    )

    body = encoder.encode_events([Text("a"), End("eos"), Done()])

    assert b"usage" not in body
    assert body.endswith(b'"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')


def test_choices_of_one_prompt_may_share_its_index(about: About) -> None:
    request = msgspec.structs.replace(TEXT, prompts=("a", "b"), n=2)
    events = [e for i in range(4) for e in (Text("x", i), End("eos", i))] + [Done()]
    style = Style(index_scope="prompt")

    answer = whole(TextEncoder(style, request, about), events)
    stream = pieces(TextEncoder(style, streamed(request), about), events)

    assert [choice["index"] for choice in answer["choices"]] == [0, 0, 1, 1]
    assert [choice["index"] for choice in stream if choice["finish_reason"]] == [0, 0, 1, 1]


@pytest.mark.parametrize(("encoder", "request_"), ENCODERS)
def test_an_answer_says_in_how_many_milliseconds_it_came(
    about: About, encoder: Any, request_: Any
) -> None:
    times: Iterator[float] = iter([10.0, 10.0425])
    clock = lambda: next(times)  # noqa: E731 - a clock that is read twice
    style = Style(headers=(("x-a", "b"),), elapsed_header="x-ms", version_header=None)
    moved = msgspec.structs.replace(about, clock=clock)

    made = encoder(style, request_, moved, headers=(("x-c", "d"),))

    assert made.headers() == (("x-a", "b"), ("x-c", "d"), ("x-ms", "42"))


@pytest.mark.parametrize(("encoder", "request_"), ENCODERS)
def test_every_encoder_tells_of_an_error_in_the_styles_way(
    about: About, encoder: Any, request_: Any
) -> None:
    style = Style(encode_error_event=lambda error: error.message.encode())

    assert (
        encoder(style, request_, about).encode_error_event(StreamBroken("it stopped"))
        == b"it stopped"
    )


def test_token_ids_and_the_fingerprint_of_a_whole_answer(about: About) -> None:
    events: list[Event] = [
        Served(fingerprint="fp_1"),
        Text("a", token_ids=(7,)),
        Text("b", token_ids=(8,)),
        End("eos"),
        Done(),
    ]
    for encoder, request in ((ChatEncoder, CHAT), (TextEncoder, TEXT)):
        wanted = msgspec.structs.replace(request, want=IDS)

        answer = whole(encoder(Style(), wanted, about), events)
        unasked = whole(encoder(Style(), request, about), events)

        assert answer["choices"][0]["token_ids"] == [7, 8]
        assert answer["system_fingerprint"] == "fp_1"
        assert "token_ids" not in unasked["choices"][0]


def test_token_ids_of_a_streamed_completion(about: About) -> None:
    events: list[Event] = [
        Start(2),
        Served(fingerprint="fp_1"),
        Text("a", token_ids=(7,)),
        Text(""),
        Text("", token_ids=(8,)),
        End("eos"),
        Done(),
    ]

    asked = pieces(TextEncoder(Style(), streamed(TEXT, IDS), about), events)
    unasked = pieces(TextEncoder(Style(), streamed(TEXT), about), events)

    assert [(one["text"], one.get("token_ids")) for one in asked] == [
        ("a", [7]),
        ("", [8]),
        ("", None),
    ]
    assert [one["text"] for one in unasked] == ["a", ""]
    assert all("token_ids" not in one for one in unasked)


def test_what_has_no_text_says_nothing(about: About) -> None:
    events: list[Event] = [Start(2), Served(), Text("")]

    assert ChatEncoder(Style(), streamed(CHAT), about).encode_events(events) == b""
    assert TextEncoder(Style(), streamed(TEXT), about).encode_events(events) == b""
    assert VectorEncoder(Style(), EMBED, about).encode_events([Vector(0, (1.0,))]) == b""


def test_a_conversation_that_gives_the_prompt_back(about: About) -> None:
    events: list[Event] = [PromptEcho(0, "say hi"), Text(" Hello"), End("eos"), Done()]

    stream = pieces(ChatEncoder(Style(), streamed(CHAT), about), events)
    answer = whole(ChatEncoder(Style(), CHAT, about), events)

    assert [one["delta"].get("content") for one in stream] == ["", "say hi", " Hello", None]
    assert answer["choices"][0]["message"]["content"] == "say hi Hello"


def test_vectors_without_a_count(about: About) -> None:
    answer = whole(VectorEncoder(Style(), EMBED, about), [Vector(0, (1.0,)), Done()])

    assert list(answer) == ["object", "data", "model"]
