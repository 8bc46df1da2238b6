"""A usual chunk is read by a narrow type, and means what it would have meant."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from gateway.core.types import GenerateRequest, Usage, Want
from protocols.openai.decoder import AnswerDecoder
from protocols.openai.usual_chunks import read_chunk
from tests.unit.protocols.openai.streams import HEADING, STREAMED, chunk, event, said, told

USAGE = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
DONE = b"data: [DONE]\n\n"


def chunks() -> Iterator[Any]:
    """Those that nearly all are, and some that differ from them."""
    for delta in (
        {},
        {"role": "assistant", "content": ""},
        {"content": "a", "tool_calls": []},
        {"content": None},
        {"content": "a", "reasoning_content": "b"},
        {"content": [{"type": "text", "text": "a"}]},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": "{}"}}]},
    ):
        for finish in (None, "stop", "length", "tool_calls"):
            yield chunk(delta, finish)
    for more in (
        {"delta": None, "text": "a"},
        {"delta": {"content": "a"}, "text": "b"},
        {"delta": None, "message": {"content": "a"}},
        {"index": 1},
        {"index": None},
        {"finish_reason": None, "delta": None, "text": "a"},
        {"stop_reason": "END"},
        {"token_ids": [1, 2]},
        {"logprobs": {"content": [{"token": "a", "logprob": -0.5}]}},
    ):
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
        yield HEADING | {"choices": [choice | more]}
    for name in HEADING:
        yield chunk({"content": "a"}, heading={k: v for k, v in HEADING.items() if k != name})
        yield chunk({"content": "a"}, heading=HEADING | {name: 7.5})
    yield chunk({"content": "a"}) | USAGE
    yield chunk({}, "stop") | USAGE
    yield chunk({"content": "a"}) | {"usage": {"prompt_tokens": 3}}
    yield chunk({"content": "a"}) | {"error": {"message": "no"}}
    yield HEADING | {"choices": []} | USAGE
    yield HEADING | {"choices": chunk({"content": "a"})["choices"] * 2}
    yield HEADING | {"choices": None}
    yield HEADING


CHUNKS: Sequence[bytes] = [event(one) for one in chunks()]


def careful(request: GenerateRequest) -> AnswerDecoder:
    """Takes no chunk for a usual one."""
    made = AnswerDecoder(request)
    made._usual = False
    return made


@pytest.mark.parametrize("usage", ["final", "each"])
def test_usual_chunks_are_read_as_any_other(usage: Any) -> None:
    request = msgspec.structs.replace(STREAMED, want=Want(usage=usage))
    usual = 0
    for first in CHUNKS:
        usual += read_chunk(first[6:-2]) is not None
        for second in CHUNKS:
            one, other = AnswerDecoder(request), careful(request)
            stream = [first, second, said("a"), DONE]
            assert told(one.feed, one.close, stream) == told(other.feed, other.close, stream)

    assert len(CHUNKS) / 4 < usual < len(CHUNKS) / 2


@pytest.mark.parametrize("payload", [b"{", b'{"choices":[],"model":"\xff"}', b"[" * 100_000])
def test_what_can_not_be_read_is_not_usual(payload: bytes) -> None:
    assert read_chunk(payload) is None


def test_one_choice_of_several_is_not_usual() -> None:
    decoder = AnswerDecoder(msgspec.structs.replace(STREAMED, n=2))

    assert not decoder._usual
    assert AnswerDecoder(STREAMED)._usual


def test_what_comes_after_an_unusual_chunk_is_read_as_one() -> None:
    decoder = AnswerDecoder(STREAMED)
    decoder.feed(event(chunk({"reasoning_content": "Hm"})))

    assert not decoder._usual


def test_usage_is_told_at_the_end() -> None:
    decoder = AnswerDecoder(STREAMED)
    decoder.feed(said("a"))
    decoder.feed(event(chunk(finish="stop") | USAGE))

    assert Usage(3, 2) in decoder.feed(DONE)
