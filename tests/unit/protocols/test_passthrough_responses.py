"""An answer in one piece is read, and passed on, the same however it is cut."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.chat.decoder import GenerationDecoder
from protocols.core.events import ChoiceEnd, Event, StreamEnd, TextDelta
from protocols.core.interfaces import ResponseDecoder
from protocols.core.request import GenerationRequest
from protocols.passthrough import NameReplacer, UnaryPassthroughReader
from tests.unit.protocols.chat.streams import (
    build_chunk,
    flatten,
    format_event,
    format_text_event,
    run_steps,
)

CHOICE: dict[str, Any] = {
    "index": 0,
    "message": {"role": "assistant", "content": "Hello", "tool_calls": []},
    "finish_reason": "stop",
}
ANSWER: dict[str, Any] = {
    "id": "c-1",
    "model": "worker's",
    "created": 7,
    "system_fingerprint": "fp",
    "choices": [CHOICE],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
REQUEST = GenerationRequest(model="worker's", kind="chat")


def list_responses() -> Iterator[dict[str, Any]]:
    """One, and each that differs from it."""
    yield ANSWER
    for name in ANSWER:
        yield {key: value for key, value in ANSWER.items() if key != name}
        yield ANSWER | {name: None}
        yield ANSWER | {name: 7.5}
    yield {key: value for key, value in ANSWER.items() if key not in ("id", "model")}
    yield ANSWER | {"error": {"message": "no"}}
    yield ANSWER | {"usage": {"prompt_tokens": 3}}
    yield ANSWER | {"usage": {"prompt_tokens": 3, "completion_tokens": 0}}
    yield ANSWER | {"choices": [CHOICE, CHOICE]}
    for more in (
        {"finish_reason": "length"},
        {"finish_reason": "tool_calls"},
        {"finish_reason": None},
        {"index": None},
        {"index": 1},
        {"stop_reason": "END"},
        {"matched_stop": 2},
        {"token_ids": [1, 2, 3]},
        {"logprobs": {"content": [{"token": "Hello", "logprob": -0.5}]}},
        {"text": "Hello"},
        {"delta": {"content": "other"}},
    ):
        yield ANSWER | {"choices": [CHOICE | more]}
    for message in (
        {"content": ""},
        {"content": None},
        {"content": [{"type": "text", "text": "Hello"}]},
        {"content": "Hello", "reasoning_content": "Hm"},
        {"content": "Hello", "refusal": "no"},
        {"content": "Hello", "tool_calls": [{"id": "x", "function": {"name": "f"}}]},
        {"content": "Hello", "function_call": {"name": "f"}},
    ):
        yield ANSWER | {"choices": [CHOICE | {"message": message}]}
    yield ANSWER | {"choices": [{"index": 0, "text": "Hello", "finish_reason": "stop"}]}


def decode_parts(decoder: ResponseDecoder, parts: Sequence[bytes]) -> Any:
    """All that it reads of these parts, to the error that ends it."""
    outputs = run_steps(decoder.feed, decoder.close, parts)
    return (flatten(outputs[0]), *outputs[1:]) if isinstance(outputs, tuple) else flatten(outputs)


BODIES = st.one_of(
    st.sampled_from([*list_responses()]).map(msgspec.json.encode),
    st.just(
        format_text_event("a") + format_event(build_chunk(finish="stop")) + b"data: [DONE]\n\n"
    ),
    st.sampled_from([b"", b"{", b"{}", b"[]", b'{"error": "no"}']),
)


@given(
    body=st.tuples(
        st.sampled_from([b"", b"", b" ", b"\xef\xbb\xbf"]),
        BODIES,
        st.sampled_from([b"", b"\n", b"x"]),
    ).map(b"".join),
    cuts=st.lists(st.integers(0, 400), max_size=3).map(sorted),
    kind=st.sampled_from(["chat", "completion"]),
)
def test_unary_response_decodes_the_same_in_any_packets(
    body: bytes, cuts: list[int], kind: Any
) -> None:
    parts = [body[start:end] for start, end in pairwise([0, *cuts, len(body)])]
    request = msgspec.structs.replace(REQUEST, kind=kind)
    assert decode_parts(GenerationDecoder(request), parts) == decode_parts(
        GenerationDecoder(request), [body]
    )


@pytest.mark.parametrize("around", [b"", b" "])
def test_unary_response_is_passed_through_with_its_public_name(around: bytes) -> None:
    passage = UnaryPassthroughReader(GenerationDecoder(REQUEST), NameReplacer({"model": "public"}))
    body = around + msgspec.json.encode(ANSWER) + b"\n"

    for part in (body[:40], body[40:]):
        raw, events = passage.feed([part])
        assert raw == b""
        assert not events
    raw, events = passage.close()

    assert json.loads(raw or b"") == ANSWER | {"model": "public"}
    assert ChoiceEnd("eos") in events
    assert isinstance(events[-1], StreamEnd)


def test_response_without_usage_is_decoded_at_its_end() -> None:
    passage = UnaryPassthroughReader(GenerationDecoder(REQUEST), NameReplacer({"model": "public"}))
    body = msgspec.json.encode(ANSWER | {"usage": None})

    assert passage.feed([body[:30]]) == (b"", [])
    passage.feed([body[30:]])
    raw, events = passage.close()

    assert json.loads(raw or b"") == ANSWER | {"usage": None, "model": "public"}
    assert TextDelta("Hello") in events


def test_stream_response_to_a_unary_request_is_decoded_at_once() -> None:
    passage = UnaryPassthroughReader(GenerationDecoder(REQUEST), NameReplacer({"model": "public"}))
    first: tuple[bytes | None, Sequence[Event]] = passage.feed([format_text_event("a")])

    assert TextDelta("a") in first[1]
    passage.feed([format_event(build_chunk(finish="stop")) + b"data: [DONE]\n\n"])
    assert passage.close()[0] is None
