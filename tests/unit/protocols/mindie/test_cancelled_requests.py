"""A request that its client cancels ends early with a valid end."""

from typing import Any

import msgspec
import pytest

from protocols.core.errors import ClientDisconnected
from protocols.core.events import ChoiceEnd, StreamStart, TextDelta, ToolCallDelta, ToolCallStart

GONE = ClientDisconnected("the request was stopped")
TEXT = "/v2/models/m/generate_stream"
CHAT = "/v1/chat/completions"
TALK = {
    "model": "m",
    "stream": True,
    "temperature": 1,
    "messages": [{"role": "user", "content": "x"}],
}


def decode_stream_events(sent: bytes) -> list[Any]:
    """Return the JSON of every event; [DONE] is returned unchanged."""
    blocks = [block.removeprefix(b"data:").strip() for block in sent.split(b"\n\n")[:-1]]
    return [block if block == b"[DONE]" else msgspec.json.decode(block) for block in blocks]


def test_cancelled_generate_stream_with_details_ends_with_stop_sequence(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(TEXT, {"text_input": "x", "parameters": {"details": True}})
    sent = one.stream(encoder, StreamStart(1), TextDelta("a"), TextDelta("b"))

    first, last = decode_stream_events(sent + encoder.encode_error_event(GONE))

    assert "finish_reason" not in first["details"]
    assert (last["text_output"], last["details"]["finish_reason"]) == ("b", "stop_sequence")
    assert last["details"]["generated_tokens"] == 2


def test_cancelled_generate_stream_without_details_sends_nothing_more(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(TEXT, {"text_input": "x"})

    one.stream(encoder, TextDelta("a"))

    assert encoder.encode_error_event(GONE) == b""


@pytest.mark.parametrize("path", ["/infer", "/generate_stream", "/"])
def test_cancelled_tgi_style_stream_ends_with_stop_sequence(bench: Any, path: str) -> None:
    one = bench(model="m")
    body = {"inputs": "x", "stream": True, "parameters": {"details": True}}
    encoder = one.encoder(path, body)
    one.stream(encoder, TextDelta("a"), TextDelta("b"))

    [last] = decode_stream_events(encoder.encode_error_event(GONE))

    assert last["generated_text"] == "ab"
    assert last["details"]["finish_reason"] == "stop_sequence"


def test_cancelled_vllm_style_stream_sends_nothing_more(bench: Any) -> None:
    one = bench(model="m")
    encoder = one.encoder("/generate", {"prompt": "x", "stream": True})

    one.stream(encoder, TextDelta("a"))

    assert encoder.encode_error_event(GONE) == b""


@pytest.mark.parametrize(("profile", "reason"), [("2x", "stop"), ("rc1", "stop_sequence")])
def test_cancelled_chat_stream_ends_with_finish_reason_and_done(
    bench: Any, profile: str, reason: str
) -> None:
    one = bench(profile)
    encoder = one.encoder(CHAT, TALK)
    one.stream(encoder, StreamStart(4), TextDelta("a"))

    last, done = decode_stream_events(encoder.encode_error_event(GONE))

    assert last["choices"][0]["finish_reason"] == reason
    assert done == b"[DONE]"
    if profile == "2x":
        assert last["usage"] == {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}


def test_cancelled_chat_stream_sends_one_finish_reason_per_choice(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(CHAT, TALK | {"n": 2})
    one.stream(encoder, StreamStart(4), TextDelta("a"), ChoiceEnd("length"), TextDelta("b", 1))

    *ends, done = decode_stream_events(encoder.encode_error_event(GONE))

    finishes = [(end["choices"][0]["index"], end["choices"][0]["finish_reason"]) for end in ends]
    assert finishes == [(0, "length"), (1, "stop")]
    assert done == b"[DONE]"


def test_cancelled_incomplete_tool_call_finishes_with_stop(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(CHAT, TALK)
    one.stream(encoder, ToolCallStart(0, 0, "c", "f"), ToolCallDelta(0, 0, '{"x'))

    last, _ = decode_stream_events(encoder.encode_error_event(GONE))

    assert last["choices"][0]["finish_reason"] == "stop"
