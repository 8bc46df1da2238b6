"""Chunks that are like the one before mean what they would have meant had each been read."""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

from gateway.core.errors import GatewayError
from gateway.core.ports import Decoder
from gateway.core.types import End, Event, GenerateRequest, Text
from protocols.openai.decoder import AnswerDecoder
from protocols.openai.passage import StreamPassage
from protocols.repeats import Repeats
from tests.unit.protocols.openai.streams import HEADING, STREAMED, chunk, event, pieces, said, told


class Forgetful(Repeats):
    """Learns nothing, so that each chunk is read."""

    def learn(self, *told: Any) -> bool:
        return False


def reading(request: GenerateRequest = STREAMED) -> AnswerDecoder:
    """A decoder that sees nothing at a glance, and takes no chunk for a usual one."""
    made = AnswerDecoder(request)
    made._repeats = Forgetful()
    made._usual = False
    return made


class Fed:
    """Another decoder, of which a passage knows no more than that it is one."""

    def __init__(self, inner: Decoder) -> None:
        self.feed = inner.feed
        self.close = inner.close


def passing(decoder: Decoder) -> StreamPassage:
    return StreamPassage(decoder, {"model": "public"}, "worker's", b"data: [DONE]\n\n")


def joined(found: Any) -> Any:
    """The same, with texts that came together as one."""
    pieces, *error = found if isinstance(found, tuple) else (found,)
    return [(raw, [*merged(events)]) for raw, events in pieces], error


def merged(events: Sequence[Event]) -> Iterator[Event]:
    said: Text | None = None
    for one in events:
        text = one if isinstance(one, Text) and not one.token_ids and not one.logprobs else None
        if text is not None and said is not None and said.index == text.index:
            said = Text(said.text + text.text, said.index, said.tokens + text.tokens)
            continue
        if said is not None:
            yield said
        said = text
        if text is None:
            yield one
    if said is not None:
        yield said


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
def test_a_stream_means_the_same_whether_or_not_its_chunks_are_compared(
    stream: tuple[list[bytes], list[int]], n: int | None
) -> None:
    request = msgspec.structs.replace(STREAMED, n=n)
    for cut in (parts(*stream), stream[0]):
        one, other = AnswerDecoder(request), reading(request)
        assert told(pieces(one), one.close, cut) == told(other.feed, other.close, cut)


@forall(STREAMS)
def test_and_is_passed_on_the_same(stream: tuple[list[bytes], list[int]]) -> None:
    for cut in (parts(*stream), stream[0]):
        ways: list[Decoder] = [
            AnswerDecoder(STREAMED),
            reading(),
            Fed(AnswerDecoder(STREAMED)),
            Fed(reading()),
        ]
        reads = [[piece] for piece in cut]
        one, *others = [joined(told(way.feed, way.close, reads)) for way in map(passing, ways)]
        assert others == [one, one, one]


@forall(STREAMS, st.lists(st.integers(1, 9), min_size=14, max_size=14))
def test_it_is_the_same_in_whichever_pieces_it_comes(
    stream: tuple[list[bytes], list[int]], counts: list[int]
) -> None:
    for cut in (parts(*stream), stream[0]):
        left = iter(cut)
        reads = [read for count in counts if (read := [*islice(left, count)])]
        whole = [[b"".join(read)] for read in reads]
        one, other = passing(AnswerDecoder(STREAMED)), passing(AnswerDecoder(STREAMED))
        assert told(one.feed, one.close, reads) == told(other.feed, other.close, whole)


@pytest.mark.parametrize("alone", [True, False])
def test_texts_that_come_together_are_passed_on_as_one(*, alone: bool) -> None:
    passage, pieces = passing(AnswerDecoder(STREAMED)), [*map(said, ["b", "\n", "", '"'])]
    passage.feed([said("a") + said("a")])
    data = b"".join(pieces)
    found = passage.feed(pieces if alone else [data])

    assert found == (data.replace(b"worker's", b"public"), [Text('b\n"', 0, 3)])


def test_so_are_those_behind_a_chunk_that_is_like_none() -> None:
    opening = event(chunk({"role": "assistant", "content": ""}))
    pieces = [opening, said("a"), said("b"), said("c"), event(chunk(finish="stop"))]
    _, events = passing(AnswerDecoder(STREAMED)).feed(pieces)

    assert events[1:] == [Text("abc", 0, 3), End("eos")]


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
        passage = passing(AnswerDecoder(STREAMED))
        found.append(told(passage.feed, passage.close, [[said("a")], read]))

    assert found[0] == found[1]


@pytest.mark.parametrize("first", ["", "a"])
def test_what_follows_the_chunk_that_tells_the_role_is_known_at_once(first: str) -> None:
    decoder, events = AnswerDecoder(STREAMED), list[Event]()
    opening = event(chunk({"role": "assistant", "content": first}))

    assert decoder.event(opening[6:-2], [])
    assert decoder.run(said("b"), 0, events) == len(said("b"))
    assert events == [Text("b")]


def test_what_follows_a_chunk_that_says_no_text_is_not() -> None:
    decoder = AnswerDecoder(STREAMED)

    assert not decoder.event(event(chunk({"role": "assistant"}))[6:-2], [])


# --- one decoder ----------------------------------------------------------------------------------


def test_likeness_is_not_sought_for_ever() -> None:
    repeats, decoder = Repeats(), AnswerDecoder(STREAMED)
    decoder._repeats = repeats

    for number in range(30):
        decoder.feed(event(chunk({"content": "x"}, heading=HEADING | {"created": number})))

    assert repeats._tries == 0
    assert decoder.feed(said("y")) == [Text("y")]


@pytest.mark.parametrize(("text", "heard"), [("", []), ("x", [Text("x")])])
def test_a_chunk_that_comes_in_pieces_is_known_too(text: str, heard: list[Event]) -> None:
    decoder, data = AnswerDecoder(STREAMED), said(text)
    decoder.feed(said("a") + said("b"))

    assert [*decoder.feed(data[:50]), *decoder.feed(data[50:])] == heard


def test_an_end_is_remembered() -> None:
    decoder = AnswerDecoder(STREAMED)
    decoder.feed(said("a") + said("b") + said("c"))
    decoder.feed(event(chunk(finish="stop")))

    with pytest.raises(GatewayError, match="went on with choice 0"):
        decoder.feed(said("d"))
