"""A chunk that says a text alone means what it would have meant had all of it been looked at."""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

from protocols.chat.decoder import GenerationDecoder
from protocols.chat.responses import ChatEncoder, ResponseStyle
from protocols.core.errors import GatewayError
from protocols.core.events import ChoiceEnd, Event, ResponseMetadata, TextDelta, Usage
from protocols.core.interfaces import ResponseContext, ResponseDecoder
from protocols.core.request import ResponseOptions
from protocols.passthrough import StreamPassthroughReader
from tests.unit.protocols.chat.streams import HEADING, STREAMED, chunk, event, said, told

USAGE = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
DONE = b"data: [DONE]\n\n"


class Thorough(GenerationDecoder):
    """Looks at all of each chunk."""

    def _read_texts(self, *told: Any) -> bool:
        return False


class Fed:
    """Another decoder, of which a passage knows no more than that it is one."""

    def __init__(self, inner: ResponseDecoder) -> None:
        self.feed = inner.feed
        self.close = inner.close


def passing(decoder: ResponseDecoder) -> StreamPassthroughReader:
    about = ResponseContext("r1", 1, "public", "v1", "worker's", lambda: 0.0)

    def encoder(metadata: ResponseMetadata) -> ChatEncoder:
        return ChatEncoder(ResponseStyle(), STREAMED, about, id=metadata.id)

    return StreamPassthroughReader(decoder, encoder)


# --- the law --------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.sampled_from(["a", " token", "", "content", "\n", '"', "\\", "é", "worker's", "stop"]),
    st.text(max_size=6),
)
EVENTS = st.one_of(
    *[TEXTS.map(said)] * 3,
    TEXTS.map(lambda text: event(chunk({"role": "assistant", "content": text}))),
    TEXTS.map(lambda text: event(chunk({"reasoning_content": text}))),
    TEXTS.map(lambda text: event(chunk({"content": text}, heading=HEADING | {"created": 8}))),
    TEXTS.map(lambda text: event(chunk({"content": text}, index=1))),
    TEXTS.map(lambda text: event(chunk({"content": text}, token_ids=[1, 2]))),
    TEXTS.map(lambda text: event(chunk({"content": text}, "stop"))),
    st.sampled_from(
        [
            event(chunk(finish="stop")),
            event(HEADING | {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}),
            event(chunk(finish="stop") | {"usage": {"prompt_tokens": 1, "completion_tokens": 2}}),
            event({"error": {"message": "no", "code": 500}}),
            said("x").replace(b'"x"', b'"\xff"'),
            said("x").replace(b"\n\n", b"\r\n\r\n"),
            said("x").replace(b"data: ", b"data:"),
            said("x").replace(b'"content":"x"', b'"content":"x","content":"y"'),
            b": still here\n\n",
            b"data: [DONE]\n\n",
            b'{"error": "a bare line"}\n',
        ]
    ),
)
STREAMS = st.tuples(st.lists(EVENTS, max_size=14), st.lists(st.integers(0, 900), max_size=5))


def parts(events: Sequence[bytes], cuts: Sequence[int]) -> Sequence[bytes]:
    data = b"".join(events)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(ends)]


@forall(STREAMS, st.sampled_from([None, 2]))
def test_a_stream_means_the_same_whether_or_not_all_of_its_chunks_is_looked_at(
    stream: tuple[list[bytes], list[int]], n: int | None
) -> None:
    request = msgspec.structs.replace(STREAMED, n=n)
    for cut in (parts(*stream), stream[0]):
        one, other = GenerationDecoder(request), Thorough(request)
        assert told(one.feed, one.close, cut) == told(other.feed, other.close, cut)


@forall(STREAMS)
def test_and_is_passed_on_the_same(stream: tuple[list[bytes], list[int]]) -> None:
    for cut in (parts(*stream), stream[0]):
        ways: list[ResponseDecoder] = [
            GenerationDecoder(STREAMED),
            Thorough(STREAMED),
            Fed(GenerationDecoder(STREAMED)),
            Fed(Thorough(STREAMED)),
        ]
        reads = [[piece] for piece in cut]
        one, *others = [told(way.feed, way.close, reads) for way in map(passing, ways)]
        assert others == [one, one, one]


@forall(STREAMS, st.lists(st.integers(1, 9), min_size=14, max_size=14))
def test_it_is_the_same_in_whichever_pieces_it_comes(
    stream: tuple[list[bytes], list[int]], counts: list[int]
) -> None:
    for cut in (parts(*stream), stream[0]):
        left = iter(cut)
        reads = [read for count in counts if (read := [*islice(left, count)])]
        whole = [[b"".join(read)] for read in reads]
        one, other = passing(GenerationDecoder(STREAMED)), passing(GenerationDecoder(STREAMED))
        assert told(one.feed, one.close, reads) == told(other.feed, other.close, whole)


def test_texts_that_come_together_are_passed_on_in_one_piece() -> None:
    passage, pieces = passing(GenerationDecoder(STREAMED)), [*map(said, ["b", "\n", "", '"'])]
    passage.feed([said("a") + said("a")])
    found = passage.feed(pieces)

    data = b"".join(pieces).replace(b"worker's", b"public")
    assert found == (data, [TextDelta("b"), TextDelta("\n"), TextDelta('"')])


def test_so_are_those_behind_a_chunk_that_is_like_none() -> None:
    opening = event(chunk({"role": "assistant", "content": ""}))
    pieces = [opening, said("a"), said("b"), said("c"), event(chunk(finish="stop"))]
    _, events = passing(GenerationDecoder(STREAMED)).feed(pieces)

    assert events[1:] == [TextDelta("a"), TextDelta("b"), TextDelta("c"), ChoiceEnd("eos")]


@pytest.mark.parametrize(
    "middle",
    [
        event(chunk({"content": "x"}, heading=HEADING | {"created": 8})),
        event(chunk({"content": "x"}, finish="stop")) + said("y"),
        said("x") + said("y"),
        said("x").replace(b'"x"', b'"\xff"'),
        said("x")[:-2],
    ],
)
def test_pieces_that_are_no_event_like_the_others_are_seen(middle: bytes) -> None:
    pieces = [said("b"), middle, said("c")]
    found = []
    for read in (pieces, [b"".join(pieces)]):
        passage = passing(GenerationDecoder(STREAMED))
        found.append(told(passage.feed, passage.close, [[said("a")], read]))

    assert found[0] == found[1]


# --- one decoder ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("usage", ["final", "each"])
@pytest.mark.parametrize("n", [None, 2])
def test_chunks_of_a_text_alone_are_read_as_any_other(usage: Any, n: int | None) -> None:
    request = msgspec.structs.replace(STREAMED, response_options=ResponseOptions(usage=usage), n=n)
    for first in CHUNKS:
        for second in CHUNKS:
            one, other = GenerationDecoder(request), Thorough(request)
            stream = [first, second, said("a"), DONE]
            assert told(one.feed, one.close, stream) == told(other.feed, other.close, stream)


def test_a_piece_of_text_is_told_after_the_first_chunk() -> None:
    decoder, choice = GenerationDecoder(STREAMED), chunk({"content": "a"})["choices"][0]
    decoder.feed(said("a"))
    known: list[Event] = []
    for more, seen in (({}, True), ({"logprobs": None}, True), ({"token_ids": [1]}, False)):
        payload = msgspec.json.encode(HEADING | {"choices": [choice | more]})
        assert decoder._read_texts([payload], known) is seen

    assert known == [TextDelta("a"), TextDelta("a")]


@pytest.mark.parametrize(("text", "heard"), [("", []), ("x", [TextDelta("x")])])
def test_a_chunk_that_comes_in_pieces_is_known_too(text: str, heard: list[Event]) -> None:
    decoder, data = GenerationDecoder(STREAMED), said(text)
    decoder.feed(said("a") + said("b"))

    assert [*decoder.feed(data[:50]), *decoder.feed(data[50:])] == heard


@pytest.mark.parametrize("blank", [b"data: \n\n", b"data:  \n\n"])
def test_an_event_without_data_is_nothing(blank: bytes) -> None:
    decoder = GenerationDecoder(STREAMED)
    decoder.feed(said("a"))
    assert decoder.feed(blank) == []
    assert decoder.feed(said("b") + blank + said("c")) == [TextDelta("b"), TextDelta("c")]


def test_an_end_is_remembered() -> None:
    decoder = GenerationDecoder(STREAMED)
    decoder.feed(said("a") + said("b") + said("c"))
    decoder.feed(event(chunk(finish="stop")))

    with pytest.raises(GatewayError, match="went on with choice 0"):
        decoder.feed(said("d"))


def test_usage_is_told_at_the_end() -> None:
    decoder = GenerationDecoder(STREAMED)
    decoder.feed(said("a"))
    decoder.feed(event(chunk(finish="stop") | USAGE))

    assert Usage(3, 2) in decoder.feed(DONE)


def count_calls(pieces: Sequence[bytes]) -> int:
    """How many functions run, Python's and C's, to decode these pieces."""
    decoder, calls = GenerationDecoder(STREAMED), 0

    def count(frame: object, name: str, value: object) -> None:
        nonlocal calls
        del frame, value
        calls += name in ("call", "c_call")

    sys.setprofile(count)
    try:
        for piece in pieces:
            decoder.feed(piece)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("more", [{}, {"obfuscation": ""}, USAGE], ids=["text", "more", "usage"])
def test_ten_times_the_chunks_cost_ten_times_as_much(more: Any, *, at_once: bool) -> None:
    def cost(many: int) -> int:
        pieces = [
            event(chunk({"content": f" {i}"}, heading=HEADING | {"created": i}) | more)
            for i in range(many)
        ]
        return count_calls([b"".join(pieces)] if at_once else pieces)

    cost(10)
    few, many = cost(200), cost(2_000)
    assert many < 10.5 * few
