"""A usual answer in one piece is read by a narrow type, and means what it would have meant."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.ports import Decoder
from gateway.core.types import Done, End, Event, GenerateRequest, Text
from protocols.glance import WholeDecoder
from protocols.openai.decoder import AnswerDecoder
from protocols.openai.passage import WholePassage
from protocols.openai.wholes import chat, completion
from tests.unit.protocols.openai.streams import chunk, event, flat, said, told

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
ASKED = GenerateRequest(model="worker's", kind="chat")
GLANCES = {"chat": chat, "completion": completion}


def answers() -> Iterator[dict[str, Any]]:
    """One that is as nearly all are, and each that differs from it."""
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


def read(decoder: Decoder, parts: Sequence[bytes]) -> Any:
    """All that it reads of these parts, to the error that ends it."""
    found = told(decoder.feed, decoder.close, parts)
    return (flat(found[0]), *found[1:]) if isinstance(found, tuple) else flat(found)


def alike(request: GenerateRequest, parts: Sequence[bytes]) -> Any:
    """What is read of these parts, the same by either decoder."""
    careful = partial(AnswerDecoder, request)
    known = read(careful(), parts)
    assert read(WholeDecoder(GLANCES[request.kind], careful), parts) == known
    return known


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_usual_answer_is_read_as_any_other(kind: Any) -> None:
    request = msgspec.structs.replace(ASKED, kind=kind)
    usual = 0
    for body in map(msgspec.json.encode, answers()):
        events = GLANCES[kind](body)
        known = alike(request, [body])
        if events is not None:
            usual += 1
            assert [*events] == known

    assert usual > (5 if kind == "chat" else 0)


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
    alike(msgspec.structs.replace(ASKED, kind=kind), parts)


def test_what_reads_any_answer_is_made_where_it_is_needed() -> None:
    made = []
    careful = partial(AnswerDecoder, ASKED)

    def counted() -> AnswerDecoder:
        made.append(careful())
        return made[-1]

    for body in (ANSWER, ANSWER | {"usage": None}):
        decoder = WholeDecoder(chat, counted)
        decoder.feed(msgspec.json.encode(body))
        assert Text("Hello", 0, 2 if body is ANSWER else 1) in decoder.close()

    assert len(made) == 1


@pytest.mark.parametrize("around", [b"", b" "])
def test_it_is_passed_on_with_its_public_name(around: bytes) -> None:
    passage = WholePassage(lambda: ASKED, AnswerDecoder, {"model": "public"}, chat)
    body = around + msgspec.json.encode(ANSWER) + b"\n"

    for part in (body[:40], body[40:]):
        raw, events = passage.feed([part])
        assert raw == b""
        assert not events
    raw, events = passage.close()

    assert json.loads(raw or b"") == ANSWER | {"model": "public"}
    assert End("eos") in events
    assert isinstance(events[-1], Done)


def test_an_unusual_one_is_read_when_the_whole_of_it_is_there() -> None:
    passage = WholePassage(lambda: ASKED, AnswerDecoder, {"model": "public"}, chat)
    body = msgspec.json.encode(ANSWER | {"usage": None})

    assert passage.feed([body[:30]]) == (b"", ())
    passage.feed([body[30:]])
    raw, events = passage.close()

    assert json.loads(raw or b"") == ANSWER | {"usage": None, "model": "public"}
    assert Text("Hello") in events


def test_a_stream_in_its_place_is_read_as_it_comes() -> None:
    passage = WholePassage(lambda: ASKED, AnswerDecoder, {"model": "public"}, chat)
    first: tuple[bytes | None, Sequence[Event]] = passage.feed([said("a")])

    assert Text("a") in first[1]
    passage.feed([event(chunk(finish="stop")) + b"data: [DONE]\n\n"])
    assert passage.close()[0] is None
