"""The fast path for text chunks gives the same events as a full parse."""

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
from protocols.core.events import ChoiceEnd, Event, ResponseExtra, TextDelta, Usage
from protocols.core.interfaces import ResponseContext, ResponseDecoder
from protocols.core.request import ResponseOptions
from protocols.passthrough_readers import StreamPassthroughReader
from tests.unit.protocols.chat.streams import (
    HEADING,
    STREAMED,
    build_chunk,
    format_event,
    format_text_event,
    run_steps,
)

USAGE = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
DONE = b"data: [DONE]\n\n"


class FullParseDecoder(GenerationDecoder):
    """A decoder that parses every chunk completely."""

    def _read_texts(self, *chunk: Any) -> bool:
        return False


class OpaqueDecoder:
    """A decoder of another type, for which passthrough has no fast path."""

    def __init__(self, inner: ResponseDecoder) -> None:
        self.feed = inner.feed
        self.close = inner.close


def create_passthrough_reader(decoder: ResponseDecoder) -> StreamPassthroughReader:
    response_context = ResponseContext("r1", 1, "public", "v1", "worker's", lambda: 0.0)

    style = ResponseStyle(source="openai")
    return StreamPassthroughReader(decoder, lambda: ChatEncoder(style, STREAMED, response_context))


# --- property -------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.sampled_from(["a", " token", "", "content", "\n", '"', "\\", "é", "worker's", "stop"]),
    st.text(max_size=6),
)
EVENTS = st.one_of(
    *[TEXTS.map(format_text_event)] * 3,
    TEXTS.map(lambda text: format_event(build_chunk({"role": "assistant", "content": text}))),
    TEXTS.map(lambda text: format_event(build_chunk({"reasoning_content": text}))),
    TEXTS.map(
        lambda text: format_event(build_chunk({"content": text}, heading=HEADING | {"created": 8}))
    ),
    TEXTS.map(lambda text: format_event(build_chunk({"content": text}, index=1))),
    TEXTS.map(lambda text: format_event(build_chunk({"content": text}, token_ids=[1, 2]))),
    TEXTS.map(lambda text: format_event(build_chunk({"content": text}, "stop"))),
    st.sampled_from(
        [
            format_event(build_chunk(finish="stop")),
            format_event(
                HEADING | {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
            ),
            format_event(
                build_chunk(finish="stop") | {"usage": {"prompt_tokens": 1, "completion_tokens": 2}}
            ),
            format_event({"error": {"message": "no", "code": 500}}),
            format_text_event("x").replace(b'"x"', b'"\xff"'),
            format_text_event("x").replace(b"\n\n", b"\r\n\r\n"),
            format_text_event("x").replace(b"data: ", b"data:"),
            format_text_event("x").replace(b'"content":"x"', b'"content":"x","content":"y"'),
            b": still here\n\n",
            b"data: [DONE]\n\n",
            b'{"error": "a bare line"}\n',
        ]
    ),
)
STREAMS = st.tuples(st.lists(EVENTS, max_size=14), st.lists(st.integers(0, 900), max_size=5))


def split_stream(events: Sequence[bytes], cuts: Sequence[int]) -> Sequence[bytes]:
    data = b"".join(events)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(ends)]


@forall(STREAMS, st.sampled_from([None, 2]))
def test_text_chunk_fast_path_equals_full_parsing(
    stream: tuple[list[bytes], list[int]], n: int | None
) -> None:
    request = msgspec.structs.replace(STREAMED, n=n)
    for cut in (split_stream(*stream), stream[0]):
        one, other = GenerationDecoder(request), FullParseDecoder(request)
        assert run_steps(one.feed, one.close, cut) == run_steps(other.feed, other.close, cut)


@forall(STREAMS)
def test_passthrough_fast_path_equals_full_parsing(stream: tuple[list[bytes], list[int]]) -> None:
    for cut in (split_stream(*stream), stream[0]):
        decoders: list[ResponseDecoder] = [
            GenerationDecoder(STREAMED, source="openai"),
            FullParseDecoder(STREAMED, source="openai"),
            OpaqueDecoder(GenerationDecoder(STREAMED, source="openai")),
            OpaqueDecoder(FullParseDecoder(STREAMED, source="openai")),
        ]
        reads = [[piece] for piece in cut]
        one, *others = [
            run_steps(decoder.feed, decoder.close, reads)
            for decoder in map(create_passthrough_reader, decoders)
        ]
        assert others == [one, one, one]


@forall(STREAMS, st.lists(st.integers(1, 9), min_size=14, max_size=14))
def test_passthrough_output_is_independent_of_packet_boundaries(
    stream: tuple[list[bytes], list[int]], counts: list[int]
) -> None:
    for cut in (split_stream(*stream), stream[0]):
        left = iter(cut)
        reads = [read for count in counts if (read := [*islice(left, count)])]
        whole = [[b"".join(read)] for read in reads]
        one, other = (
            create_passthrough_reader(GenerationDecoder(STREAMED, source="openai")),
            create_passthrough_reader(GenerationDecoder(STREAMED, source="openai")),
        )
        assert run_steps(one.feed, one.close, reads) == run_steps(other.feed, other.close, whole)


def test_text_events_in_one_read_are_passed_through_together() -> None:
    reader, pieces = (
        create_passthrough_reader(GenerationDecoder(STREAMED, source="openai")),
        [*map(format_text_event, ["b", "\n", "", '"'])],
    )
    reader.feed([format_text_event("a") + format_text_event("a")])
    passed = reader.feed(pieces)

    data = b"".join(pieces).replace(b"worker's", b"public")
    assert passed == (data, [TextDelta('b\n"', tokens=3)])


def test_text_events_after_the_role_chunk_are_decoded_together() -> None:
    opening = format_event(build_chunk({"role": "assistant", "content": ""}))
    pieces = [
        opening,
        format_text_event("a"),
        format_text_event("b"),
        format_text_event("c"),
        format_event(build_chunk(finish="stop")),
    ]

    _, events = create_passthrough_reader(GenerationDecoder(STREAMED, source="openai")).feed(pieces)

    assert events[1:] == [TextDelta("a"), TextDelta("bc", tokens=2), ChoiceEnd("eos")]


@pytest.mark.parametrize(
    "middle",
    [
        format_event(build_chunk({"content": "x"}, heading=HEADING | {"created": 8})),
        format_event(build_chunk({"content": "x"}, finish="stop")) + format_text_event("y"),
        format_text_event("x") + format_text_event("y"),
        format_text_event("x").replace(b'"x"', b'"\xff"'),
        format_text_event("x")[:-2],
    ],
)
def test_irregular_packets_between_text_events_are_decoded(middle: bytes) -> None:
    pieces = [format_text_event("b"), middle, format_text_event("c")]
    events = []

    for read in (pieces, [b"".join(pieces)]):
        reader = create_passthrough_reader(GenerationDecoder(STREAMED, source="openai"))
        events.append(run_steps(reader.feed, reader.close, [[format_text_event("a")], read]))

    assert events[0] == events[1]


@pytest.mark.parametrize("name", ["content", "reasoning_content"])
@pytest.mark.parametrize("end", [DONE, b""])
def test_content_passed_through_after_an_end_takes_the_end_back(name: str, end: bytes) -> None:
    plain = format_event(build_chunk({name: "a"}))
    ended = format_event(build_chunk({name: "a"}, finish="stop"))
    reader = create_passthrough_reader(GenerationDecoder(STREAMED, source="openai"))

    reader.feed([plain, ended, plain, end])

    with pytest.raises(GatewayError, match=r"without a finish reason|stopped before its end"):
        reader.close()


def test_choice_that_was_not_requested_is_reported_before_forwarded_text() -> None:
    reader = create_passthrough_reader(GenerationDecoder(STREAMED, source="openai"))
    other = format_event(build_chunk({"content": "b"}, index=1))

    reader.feed([format_text_event("a"), other, format_text_event("c")])
    _, events = reader.feed([format_event(build_chunk(finish="stop"))])

    reported = [event.values for event in events if isinstance(event, ResponseExtra)]
    assert reported == [((("choices[1]",), True),)]


# --- single decoder -------------------------------------------------------------------------------


def list_chunks() -> Iterator[Any]:
    """Return the usual chunks, and some that differ."""
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
            yield build_chunk(delta, finish)
    for fields in (
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
        yield HEADING | {"choices": [choice | fields]}
    for name in HEADING:
        yield build_chunk({"content": "a"}, heading={k: v for k, v in HEADING.items() if k != name})
        yield build_chunk({"content": "a"}, heading=HEADING | {name: 7.5})
    yield build_chunk({"content": "a"}) | USAGE
    yield build_chunk({}, "stop") | USAGE
    yield build_chunk({"content": "a"}) | {"usage": {"prompt_tokens": 3}}
    yield build_chunk({"content": "a"}) | {"error": {"message": "no"}}
    yield HEADING | {"choices": []} | USAGE
    yield HEADING | {"choices": build_chunk({"content": "a"})["choices"] * 2}
    yield HEADING | {"choices": None}
    yield HEADING


CHUNKS: Sequence[bytes] = [format_event(one) for one in list_chunks()]


@pytest.mark.parametrize("usage", ["final", "each"])
@pytest.mark.parametrize("n", [None, 2])
def test_each_pair_of_chunks_decodes_as_with_full_parsing(usage: Any, n: int | None) -> None:
    request = msgspec.structs.replace(STREAMED, response_options=ResponseOptions(usage=usage), n=n)
    for first in CHUNKS:
        for second in CHUNKS:
            one, other = GenerationDecoder(request), FullParseDecoder(request)
            stream = [first, second, format_text_event("a"), DONE]
            assert run_steps(one.feed, one.close, stream) == run_steps(
                other.feed, other.close, stream
            )


def test_text_chunk_fast_path_starts_after_the_first_chunk() -> None:
    decoder, choice = GenerationDecoder(STREAMED), build_chunk({"content": "a"})["choices"][0]
    decoder.feed(format_text_event("a"))
    earlier: list[Event] = []

    for fields, is_fast in (({}, True), ({"logprobs": None}, True), ({"token_ids": [1]}, False)):
        payload = msgspec.json.encode(HEADING | {"choices": [choice | fields]})
        assert bool(decoder._read_texts(iter([payload]), earlier)) is is_fast

    assert earlier == [TextDelta("a"), TextDelta("a")]


class CountingPayloads(list[bytes]):
    """Counts how often a payload is read."""

    reads = 0

    def __iter__(self) -> Iterator[bytes]:
        for payload in super().__iter__():
            self.reads += 1
            yield payload

    def __getitem__(self, key: Any) -> Any:
        self.reads += 1
        return super().__getitem__(key)


def test_chunks_that_are_no_text_chunks_are_read_a_fixed_number_of_times() -> None:
    decoder, choice = GenerationDecoder(STREAMED), build_chunk({"content": "a"})["choices"][0]
    decoder.feed(format_text_event("a"))
    payload = msgspec.json.encode(HEADING | {"choices": [choice | {"token_ids": [1]}]})
    payloads = CountingPayloads([payload] * 1000)

    decoder._read_payloads(payloads, [])

    assert payloads.reads <= 3000


@pytest.mark.parametrize(("text", "events"), [("", []), ("x", [TextDelta("x")])])
def test_text_chunk_split_over_two_packets_is_decoded(text: str, events: list[Event]) -> None:
    decoder, data = GenerationDecoder(STREAMED), format_text_event(text)
    decoder.feed(format_text_event("a") + format_text_event("b"))

    assert [*decoder.feed(data[:50]), *decoder.feed(data[50:])] == events


@pytest.mark.parametrize("blank", [b"data: \n\n", b"data:  \n\n"])
def test_event_without_data_is_ignored(blank: bytes) -> None:
    decoder = GenerationDecoder(STREAMED)
    decoder.feed(format_text_event("a"))

    assert decoder.feed(blank) == []
    assert decoder.feed(format_text_event("b") + blank + format_text_event("c")) == [
        TextDelta("b"),
        TextDelta("c"),
    ]


def test_text_after_the_finish_reason_is_an_error() -> None:
    decoder = GenerationDecoder(STREAMED)
    decoder.feed(format_text_event("a") + format_text_event("b") + format_text_event("c"))

    decoder.feed(format_event(build_chunk(finish="stop")))

    with pytest.raises(GatewayError, match="went on with choice 0"):
        decoder.feed(format_text_event("d"))


def test_usage_is_emitted_at_the_end() -> None:
    decoder = GenerationDecoder(STREAMED)
    decoder.feed(format_text_event("a"))

    decoder.feed(format_event(build_chunk(finish="stop") | USAGE))

    assert Usage(3, 2) in decoder.feed(DONE)


def count_decoder_calls(pieces: Sequence[bytes]) -> int:
    """Return the number of Python and C functions called to decode these pieces."""
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
@pytest.mark.parametrize(
    "fields", [{}, {"obfuscation": ""}, USAGE], ids=["text", "fields", "usage"]
)
def test_decoding_cost_grows_linearly_with_the_chunks(fields: Any, *, at_once: bool) -> None:
    def cost(many: int) -> int:
        pieces = [
            format_event(
                build_chunk({"content": f" {i}"}, heading=HEADING | {"created": i}) | fields
            )
            for i in range(many)
        ]
        return count_decoder_calls([b"".join(pieces)] if at_once else pieces)

    cost(10)
    few, many = cost(200), cost(2_000)

    assert many < 10.5 * few


def test_decoder_shows_how_many_choices_have_ended() -> None:
    decoder = GenerationDecoder(STREAMED)
    decoder.feed(format_text_event("a"))
    assert repr(decoder) == "<GenerationDecoder 1 choices, 0 ended>"
    decoder.feed(format_event(build_chunk(finish="stop")) + b"data: [DONE]\n\n")
    assert repr(decoder) == "<GenerationDecoder 1 choices, done>"
