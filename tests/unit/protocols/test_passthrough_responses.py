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
from tests.unit.protocols.chat.streams import chunk, event, flat, said, told

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
ASKED = GenerationRequest(model="worker's", kind="chat")


def answers() -> Iterator[dict[str, Any]]:
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


def read(decoder: ResponseDecoder, parts: Sequence[bytes]) -> Any:
    """All that it reads of these parts, to the error that ends it."""
    found = told(decoder.feed, decoder.close, parts)
    return (flat(found[0]), *found[1:]) if isinstance(found, tuple) else flat(found)


BODIES = st.one_of(
    st.sampled_from([*answers()]).map(msgspec.json.encode),
    st.just(said("a") + event(chunk(finish="stop")) + b"data: [DONE]\n\n"),
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
def test_it_is_read_alike_however_it_comes(body: bytes, cuts: list[int], kind: Any) -> None:
    parts = [body[start:end] for start, end in pairwise([0, *cuts, len(body)])]
    request = msgspec.structs.replace(ASKED, kind=kind)
    assert read(GenerationDecoder(request), parts) == read(GenerationDecoder(request), [body])


@pytest.mark.parametrize("around", [b"", b" "])
def test_it_is_passed_on_with_its_public_name(around: bytes) -> None:
    passage = UnaryPassthroughReader(GenerationDecoder(ASKED), NameReplacer({"model": "public"}))
    body = around + msgspec.json.encode(ANSWER) + b"\n"

    for part in (body[:40], body[40:]):
        raw, events = passage.feed([part])
        assert raw == b""
        assert not events
    raw, events = passage.close()

    assert json.loads(raw or b"") == ANSWER | {"model": "public"}
    assert ChoiceEnd("eos") in events
    assert isinstance(events[-1], StreamEnd)


def test_one_without_usage_is_read_when_the_whole_of_it_is_there() -> None:
    passage = UnaryPassthroughReader(GenerationDecoder(ASKED), NameReplacer({"model": "public"}))
    body = msgspec.json.encode(ANSWER | {"usage": None})

    assert passage.feed([body[:30]]) == (b"", [])
    passage.feed([body[30:]])
    raw, events = passage.close()

    assert json.loads(raw or b"") == ANSWER | {"usage": None, "model": "public"}
    assert TextDelta("Hello") in events


def test_a_stream_in_its_place_is_read_as_it_comes() -> None:
    passage = UnaryPassthroughReader(GenerationDecoder(ASKED), NameReplacer({"model": "public"}))
    first: tuple[bytes | None, Sequence[Event]] = passage.feed([said("a")])

    assert TextDelta("a") in first[1]
    passage.feed([event(chunk(finish="stop")) + b"data: [DONE]\n\n"])
    assert passage.close()[0] is None
