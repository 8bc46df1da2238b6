"""Characters that a server writes as two escaped halves, also in two events."""

from typing import Any

import pytest

from gateway.runtime.build import build_adapter
from protocols.core.events import StreamEnd, TextDelta
from protocols.core.request import GenerationRequest, Message, TextPart
from protocols.core.sse import ResponseBodyReader, SseParser

CHAT = GenerationRequest(
    model="m", kind="chat", messages=(Message("user", (TextPart("hi"),)),), stream=True
)
PROMPT = GenerationRequest(model="m", kind="completion", prompts=("hi",), stream=True)
CHUNK = '{"id":"a","model":"w","choices":[{"index":0,"delta":{"content":"%s"}}]}'
CHUNK_END = '{"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
MESSAGE_DELTA = '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"%s"}}'
MESSAGE_END = '{"type":"message_stop"}'
RESPONSE_END = '{"type":"response.completed","response":{"status":"completed"}}'
WORKERS: dict[str, tuple[Any, GenerationRequest, str, tuple[str, ...]]] = {
    "openai": (build_adapter("openai", "vllm", {}), CHAT, CHUNK, (CHUNK_END, "[DONE]")),
    "ovms": (build_adapter("ovms", None, {}), CHAT, CHUNK, (CHUNK_END, "[DONE]")),
    "databricks": (build_adapter("databricks", None, {}), CHAT, CHUNK, (CHUNK_END, "[DONE]")),
    "anthropic": (
        build_adapter("anthropic", None, {}),
        CHAT,
        MESSAGE_DELTA,
        ('{"type":"message_delta","delta":{"stop_reason":"end_turn"}}', MESSAGE_END),
    ),
    "responses": (
        build_adapter("openai", "openai", {"worker_api": "responses"}),
        CHAT,
        '{"type":"response.output_text.delta","output_index":0,"delta":"%s"}',
        (RESPONSE_END,),
    ),
    "tgi": (
        build_adapter("tgi", None, {}),
        PROMPT,
        '{"token":{"id":1,"text":"%s"}}',
        ('{"token":{"id":2,"text":""},"generated_text":"","details":{"finish_reason":"length"}}',),
    ),
    "triton": (
        build_adapter("triton", None, {}),
        PROMPT,
        '{"model_name":"m","text_output":"%s"}',
        ('{"model_name":"m","text_output":"","finish_reason":"stop"}',),
    ),
    "mindie": (
        build_adapter("mindie", None, {}),
        PROMPT,
        '{"text_output":"%s"}',
        ('{"text_output":"","details":{"finish_reason":"length"}}',),
    ),
}


@pytest.mark.parametrize("name", WORKERS)
def test_halves_in_two_events_are_one_character(name: str) -> None:
    worker, request, event, ends = WORKERS[name]
    texts = ["a", r"b\ud83d", r"\ude00c", "d"]
    payloads = [*(event % one for one in texts), *ends]
    decoder = worker.create_decoder(request)

    events = [one for text in payloads for one in decoder.feed(b"data: %b\n\n" % text.encode())]
    events += decoder.close()

    assert "".join(one.text for one in events if isinstance(one, TextDelta)) == "ab\U0001f600cd"


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "cut off"])
@pytest.mark.parametrize("name", WORKERS)
def test_first_half_without_a_second_is_the_replacement_character(name: str, *, ends: bool) -> None:
    worker, request, event, last = WORKERS[name]
    payloads = [event % "a", event % r"b\ud83d", *last]
    lines = b"".join([b"data: %b\n\n" % one.encode() for one in payloads])
    decoder = worker.create_decoder(request)

    events = [*decoder.feed(lines if ends else lines[:-2]), *decoder.close()]

    assert "".join(one.text for one in events if isinstance(one, TextDelta)) == "ab\ufffd"
    assert isinstance(events[-1], StreamEnd)


@pytest.mark.parametrize(
    ("data", "parsed"),
    [
        (rb"\ud83d\ude00", rb"\ud83d\ude00"),
        (rb"\ude00", rb"\ufffd"),
        (rb"C:\\ud83d", rb"C:\\ud83d"),
        (rb"\uD83Dx", rb"\ufffdx"),
    ],
)
def test_only_halves_are_replaced(data: bytes, parsed: bytes) -> None:
    assert list(SseParser().feed(b"data: %b\n\n" % data)) == [parsed]
    assert list(SseParser().feed(b": ping\ndata: %b\n\n" % data)) == [parsed]


@pytest.mark.parametrize(
    ("sent", "parsed"),
    [
        ((rb'"a\ud83d b"', rb'"\ude00"'), [rb'"a\ufffd b"', rb'"\ufffd"']),
        (
            (rb'"a\ud83d"', rb'"b\ude00"', rb'"\ude00c"'),
            [rb'"a"', rb'"b\ufffd"', rb'"\ud83d\ude00c"'],
        ),
        (
            (rb'"a\ud83d"', rb'"\ude00\ud83d"', rb'"\ude00"'),
            [rb'"a"', rb'"\ud83d\ude00"', rb'"\ud83d\ude00"'],
        ),
        (
            (rb'"a\ud83d"', rb'"b"', rb'""', rb'"\ude00"'),
            [rb'"a"', rb'"b"', rb'""', rb'"\ud83d\ude00"'],
        ),
        (
            (rb'"a\ud83d"', *[rb'"b"'] * 16, rb'"\ude00"'),
            [rb'"a\ufffd"', *[rb'"b"'] * 16, rb'"\ufffd"'],
        ),
        (
            (rb'["\ud83d\ude00","\ud83d","\ude00"]',),
            [rb'["\ud83d\ude00","","\ud83d\ude00"]'],
        ),
        (
            (rb'["a\ud83d","b\ud83d","\ude00"]', *[rb'"b"'] * 16),
            [rb'["a","b\ufffd","\ud83d\ude00"]', *[rb'"b"'] * 16],
        ),
        (
            (rb'["a\ud83d","b\ud83d"]', rb'"\ude00"', rb'"\ude01"'),
            [rb'["a","b"]', rb'"\ud83d\ude00"', rb'"\ud83d\ude01"'],
        ),
    ],
    ids=[
        "a first half within a text",
        "a second half within a text",
        "one character after the other",
        "events between the halves",
        "a second half that comes too late",
        "both halves in one event",
        "one of two first halves without its second",
        "two first halves in one event",
    ],
)
def test_only_halves_at_the_edges_of_texts_are_joined(
    sent: tuple[bytes, ...], parsed: list[bytes]
) -> None:
    for line in (b"data: %b\n\n", b": ping\ndata: %b\n\n"):
        parser = SseParser()

        assert [one for text in sent for one in parser.feed(line % text)] == parsed
        assert parser.close() == []


def test_a_document_has_the_replacement_character_for_each_lone_half() -> None:
    reader = ResponseBodyReader()
    reader.feed(rb'{"a":"\ud83d","b":"\ude00","c":"\ud83d\ude00"}')

    assert bytes(reader.unary_body or b"") == rb'{"a":"\ufffd","b":"\ufffd","c":"\ud83d\ude00"}'
