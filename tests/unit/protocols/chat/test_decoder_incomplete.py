"""Responses with missing fields, in forms of their own, or too large."""

import json
from typing import Any

import msgspec
import pytest

from protocols.chat.wire_responses import decode_response_without_logprobs
from protocols.core.errors import RateLimitExceeded, StreamBroken, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from protocols.core.request import EmbeddingRequest, GenerationRequest, Request
from protocols.openai.endpoints import OpenAI

CHAT = GenerationRequest(model="m", kind="chat")
TEXT = GenerationRequest(model="m", kind="completion", prompts=("ab",))
ECHO = GenerationRequest(model="m", kind="completion", prompts=("ab",), echo=True)
EMBED = EmbeddingRequest(model="m", inputs=("a",))
STOP = {"finish_reason": "stop"}


def decode_unary_response(body: Any, request: Request = CHAT) -> list[Event]:
    """Decode a unary response without the metadata."""
    reader = OpenAI().create_decoder(request)
    reader.feed(json.dumps(body).encode())
    return [event for event in reader.close() if not isinstance(event, ResponseMetadata)]


def build_response(**fields: Any) -> dict[str, Any]:
    return {"choices": [{**STOP, **fields}]}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 2, "completion_tokens": 1}, [Usage(2, 1)]),
        ({"prompt_tokens": 2}, []),
        ({"completion_tokens": 1}, []),
        ({}, []),
        (
            {
                "prompt_tokens": 2,
                "completion_tokens": 5,
                "completion_tokens_details": {"reasoning_tokens": 3},
            },
            [Usage(2, 5, reasoning_tokens=3)],
        ),
        (
            {"prompt_tokens": 2, "completion_tokens": 5, "reasoning_tokens": 3},
            [Usage(2, 5, reasoning_tokens=3)],
        ),
    ],
)
def test_incomplete_usage_is_ignored(usage: dict[str, Any], expected: list[Event]) -> None:
    events = decode_unary_response({**build_response(message={"content": ""}), "usage": usage})

    assert events == [ChoiceEnd("eos"), *expected, StreamEnd()]


@pytest.mark.parametrize(
    ("logprobs", "tokens"),
    [
        ({"content": None}, ()),
        ({"tokens": []}, ()),
        ({"refusal": [{"token": "no", "logprob": -1}]}, (TokenLogprob("no", -1.0),)),
        ({"content": [{"token": "a", "bytes": [300]}]}, (TokenLogprob("a", None),)),
        (
            {"content": [{"token": "a", "logprob": -1, "top_logprobs": [{"token": "b"}]}]},
            (TokenLogprob("a", -1.0, (TopLogprob("b", float("-inf")),)),),
        ),
        ({"tokens": ["a"]}, (TokenLogprob("a", None),)),
        (
            {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"b": None}]},
            (TokenLogprob("a", -1.0, (TopLogprob("b", float("-inf")),)),),
        ),
    ],
)
def test_incomplete_logprobs_are_decoded(
    logprobs: dict[str, Any], tokens: tuple[TokenLogprob, ...]
) -> None:
    events = decode_unary_response(build_response(text="a", logprobs=logprobs), TEXT)

    assert events == [TextDelta("a", logprobs=tokens), ChoiceEnd("eos"), StreamEnd()]


@pytest.mark.parametrize(
    "logprobs",
    [
        {"tokens": ["a"], "token_logprobs": [-1, -2]},
        {"tokens": ["a"], "top_logprobs": [None, None]},
    ],
)
def test_logprobs_columns_of_different_length_are_lost_and_the_text_is_kept(
    logprobs: dict[str, Any],
) -> None:
    lost = ResponseExtra("", "response", ((("choices[0]", "logprobs"), True),))

    events = decode_unary_response(build_response(text="a", logprobs=logprobs), TEXT)

    assert events == [lost, TextDelta("a"), ChoiceEnd("eos"), StreamEnd()]


def build_lost_part(part: dict[str, Any]) -> ResponseExtra:
    """Return the report of the first part of a content, which nothing represents."""
    return ResponseExtra("", "message", ((("content[0]",), part),))


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "text", "text": "a"}, [TextDelta("a")]),
        ({"type": "output_text", "text": "a"}, [TextDelta("a")]),
        ({"type": "thinking", "thinking": "hm"}, [ReasoningDelta("hm")]),
        (
            {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
            [ReasoningDelta("hm")],
        ),
        ({"type": "refusal", "refusal": "no"}, [RefusalDelta("no")]),
        ({"type": "reasoning", "summary": ["hm"]}, [ReasoningDelta("hm")]),
        (
            {"type": "reasoning", "summary": [{"text": "hm", "signature": 5}]},
            [ReasoningDelta("hm")],
        ),
        ({"type": "image"}, [build_lost_part({"type": "image"})]),
        ({}, [build_lost_part({})]),
    ],
)
def test_content_parts_are_decoded(part: dict[str, Any], expected: list[Event]) -> None:
    assert decode_unary_response(build_response(message={"content": [part]})) == [
        *expected,
        ChoiceEnd("eos"),
        StreamEnd(),
    ]


def test_echoed_prompt_without_text_is_decoded() -> None:
    assert decode_unary_response(build_response(text="ab"), ECHO) == [
        PromptEcho(0, "ab"),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]


def test_failure_finish_reason_raises_worker_failed() -> None:
    with pytest.raises(WorkerFailed, match="broke off"):
        decode_unary_response(
            {"choices": [{"message": {"content": "a"}, "finish_reason": "invalid flag"}]}
        )


def test_events_without_data_are_ignored() -> None:
    reader = OpenAI().create_decoder(CHAT)
    chunk = json.dumps({"choices": [{"delta": {"content": "a"}, **STOP}]}).encode()

    assert not reader.feed(b"\r\n ")

    events = reader.feed(b"data: \n\ndata: " + chunk + b"\n\n")

    assert events == [TextDelta("a")]
    assert reader.close() == [ChoiceEnd("eos"), StreamEnd()]


def test_events_before_an_error_are_emitted_first() -> None:
    reader = OpenAI().create_decoder(CHAT)
    wire = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"error":{"code":429}}\n\n'

    assert reader.feed(wire) == [TextDelta("a")]
    with pytest.raises(RateLimitExceeded):
        reader.feed(b"data: [DONE]\n\n")
    with pytest.raises(RateLimitExceeded):
        reader.close()


@pytest.mark.parametrize("request_", [CHAT, EMBED])
def test_oversized_response_raises_worker_failed(
    monkeypatch: pytest.MonkeyPatch, request_: Request
) -> None:
    monkeypatch.setattr("protocols.core.sse.MAX_UNARY_BYTES", 100)
    reader = OpenAI().create_decoder(request_)

    reader.feed(b"{" + b" " * 99)

    with pytest.raises(WorkerFailed, match="large"):
        reader.feed(b" ")


def test_stream_length_is_unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.core.sse.MAX_UNARY_BYTES", 100)
    reader = OpenAI().create_decoder(CHAT)
    chunk = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'

    events = [event for _ in range(9) for event in reader.feed(chunk)]

    assert events == [TextDelta("a")] * 9
    with pytest.raises(StreamBroken):
        reader.close()


def test_a_negative_index_is_lost_and_the_choice_kept() -> None:
    body = build_response(text="a", logprobs=None)
    body["choices"][0]["index"] = -1

    events = decode_unary_response(body, TEXT)

    lost = ResponseExtra("", "response", ((("choices[0]", "index"), -1),))
    assert events == [lost, TextDelta("a"), ChoiceEnd("eos"), StreamEnd()]


def test_log_probabilities_that_are_skipped_do_not_hide_an_odd_value() -> None:
    body = build_response(text="a", logprobs={"tokens": 5}, token_ids="odd")

    response = decode_response_without_logprobs(msgspec.json.encode(body))

    assert response.choices is not None
    assert response.choices[0].text == "a"
    assert (("token_ids",), "odd") in response.choices[0].extra
