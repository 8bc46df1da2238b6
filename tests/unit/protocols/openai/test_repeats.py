"""Chunks that are like the one before mean what they would have meant had each been read."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

from gateway.core.errors import GatewayError
from gateway.core.ports import Decoder
from gateway.core.types import Done, End, Event, GenerateRequest, Text, apart
from protocols.openai.decoder import AnswerDecoder
from protocols.openai.incoming import probed, read_answer
from protocols.openai.passage import StreamPassage, WholePassage
from protocols.openai.wholes import whole
from protocols.repeats import Repeats

HEADING = {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "worker's"}
STREAMED = GenerateRequest(model="worker's", kind="chat", stream=True)


def chunk(
    delta: Any = None, finish: str | None = None, heading: Any = None, **more: Any
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta or {}, "logprobs": None, "finish_reason": finish} | more
    return (heading or HEADING) | {"choices": [choice]}


def event(told: Any) -> bytes:
    return b"data: " + msgspec.json.encode(told) + b"\n\n"


def said(text: str) -> bytes:
    return event(chunk({"content": text}))


class Forgetful(Repeats):
    """Learns nothing, so that each chunk is read."""

    def learn(self, *told: Any) -> bool:
        return False


def reading(request: GenerateRequest = STREAMED) -> AnswerDecoder:
    """A decoder that sees nothing at a glance."""
    made = AnswerDecoder(request)
    made._repeats = Forgetful()
    return made


class Fed:
    """Another decoder, of which a passage knows no more than that it is one."""

    def __init__(self, inner: Decoder) -> None:
        self.feed = inner.feed
        self.close = inner.close


def passing(decoder: Decoder) -> StreamPassage:
    return StreamPassage(decoder, {"model": "public"}, "worker's", b"data: [DONE]\n\n")


def told(step: Callable[[bytes], Any], close: Callable[[], Any], parts: Sequence[bytes]) -> Any:
    """All that comes of these bytes, to the error that ends it."""
    found: list[Any] = []
    try:
        found.extend(step(part) for part in parts)
        found.append(close())
    except GatewayError as error:
        return found, type(error), error.message
    return found


def pieces(decoder: Decoder) -> Callable[[bytes], Sequence[Event]]:
    """What feeds it, and gives each piece of a text as an event of its own."""
    return lambda data: apart(decoder.feed(data))


def flat(batches: Any) -> Any:
    """The events, without the batches that they came in."""
    return [event for batch in batches for event in batch]


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
    TEXTS.map(said),
    TEXTS.map(said),
    TEXTS.map(said),
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
        one, *others = [joined(told(way.feed, way.close, cut)) for way in map(passing, ways)]
        assert others == [one, one, one]


def test_texts_that_come_together_are_passed_on_as_one() -> None:
    passage, data = passing(AnswerDecoder(STREAMED)), b"".join(map(said, ["b", "\n", "", '"']))
    passage.feed(said("a") + said("a"))

    assert passage.feed(data) == (data.replace(b"worker's", b"public"), [Text('b\n"', 0, 3)])


# --- what is learned ------------------------------------------------------------------------------


def learned(text: str = "one", data: bytes | None = None) -> Repeats:
    repeats = Repeats()
    payload = data or said(text)[6:-2]
    repeats.learn(payload, text, read_answer, probed(read_answer(payload)))
    return repeats


def test_a_chunk_that_differs_in_its_text_alone_is_known() -> None:
    repeats = learned()

    assert repeats.known
    assert repeats.text(said("two")[6:-2]) == "two"
    assert repeats.text(said("")[6:-2]) == ""


@pytest.mark.parametrize(
    "other",
    [
        event(chunk({"content": "two"}, heading=HEADING | {"created": 8})),
        event(chunk({"content": "two"}, "stop")),
        said("x").replace(b'"x"', b'"x","y"'),
        said("x").replace(b'"x"', b'"'),
        said("x").replace(b'"x"', b'"\\x"'),
        said("x").replace(b'"x"', b'"\xff"'),
        said("x").replace(b'"x"', b'"\xff\\n"'),
        said("x").replace(b'"x"', b'"\x01"'),
    ],
    ids=[
        "other heading",
        "end",
        "more than a text",
        "less than a text",
        "no escape",
        "not UTF-8",
        "not UTF-8, with an escape",
        "control character",
    ],
)
def test_any_other_is_not(other: bytes) -> None:
    texts: list[str] = []

    assert learned().text(other[6:-2]) is None
    assert learned().run(said("a") + other, 0, texts) == len(said("a"))
    assert texts == ["a"]


@pytest.mark.parametrize("text", ["\n", "\\", "\u00e9", "\x7f", "\U0001f600 \t"])
def test_escapes_are_part_of_a_text(text: str) -> None:
    texts: list[str] = []
    data = said("a") + said(text) + said("") + said("b")

    assert learned().text(said(text)[6:-2]) == text
    assert learned().run(data, 0, texts) == len(data)
    assert texts == ["a", text, "", "b"]


def test_quotes_are_part_of_a_text_where_they_are_escaped() -> None:
    texts: list[str] = []
    data = said("a") + said('"') + said("") + said('\\"b')

    assert learned().text(said('"')[6:-2]) == '"'
    assert learned().run(data, 0, texts) == len(data)
    assert texts == ["a", '"', "", '\\"b']


@pytest.mark.parametrize(
    "odd",
    [
        said("x").replace(b'"x"', b'"x\\"'),
        said("x").replace(b'"x"', b'"\xff"'),
        said("x").replace(b'"x"', b'"\x01"'),
        said("x").replace(b'"x"', b'"x","y"'),
        said("x").replace(b'"x"', b'"\\ud83d"'),
        said("x").partition(b'"x')[2],
        b"data: [DONE]\n\n",
    ],
    ids=[
        "a backslash at the end",
        "not UTF-8",
        "control character",
        "more than a text",
        "half a character",
        "no beginning",
        "the end",
    ],
)
def test_many_are_known_up_to_one_that_is_odd(odd: bytes) -> None:
    texts: list[str] = []
    before = said("a") + said("") + said("b")

    assert learned().run(before + odd + said("c") + said("d"), 0, texts) == len(before)
    assert texts == ["a", "", "b"]


@pytest.mark.parametrize(
    ("data", "heard"),
    [
        (said("b"), ["b"]),
        (said(""), [""]),
        (said("b").replace(b'"b"', b'"b\\"'), None),
    ],
    ids=["a text", "no text", "odd"],
)
def test_one_may_come_alone(data: bytes, heard: list[str] | None) -> None:
    texts: list[str] = []

    assert learned().run(b"held" + data, 4, texts) == 4 + len(data) * (heard is not None)
    assert texts == (heard or [])


def test_any_number_are_known_at_once() -> None:
    texts: list[str] = []
    data = said("a") * 128

    assert learned().run(data + data + data[:-1], 0, texts) == 2 * len(data) + 127 * len(said("a"))
    assert texts == ["a"] * 383
    assert learned().run(data, 0, texts) == len(data)


def test_one_is_known_before_the_next_is_whole() -> None:
    texts: list[str] = []

    assert learned().run(said("a") + said("b")[:-1], 0, texts) == len(said("a"))
    assert learned().run(said("a")[:-1], 0, texts) == 0
    assert texts == ["a"]


@pytest.mark.parametrize(
    ("text", "payload"),
    [
        ("a\nb", None),
        ("a", msgspec.json.encode(chunk({"content": "a"})).replace(b'"a"', b'"\\u0061"')),
        ("id", msgspec.json.encode(chunk({"content": "id"}))),
        ("7", msgspec.json.encode(chunk({"content": "7"}) | {"choices": None})),
    ],
    ids=["an escape", "its text is not found", "found elsewhere", "found nowhere"],
)
def test_what_is_not_sure_is_not_learned(text: str, payload: bytes | None) -> None:
    assert not learned(text, payload).known


def test_a_text_whose_place_holds_something_else_is_not_learned() -> None:
    payload = b'{"choices":[{"index":0,"delta":{"content":"a"}}],"n":1}'.replace(b'"n"', b'"a"')
    swapped = b'{"a":1,"choices":[{"index":0,"delta":{"content":"a"}}]}'

    assert learned("a", payload).known
    assert not learned("a", swapped).known
    assert not learned("index", swapped.replace(b'"content":"a"', b'"content":"index"')).known


def test_a_text_that_stands_for_a_type_is_not_learned() -> None:
    payload = b'{"choices":[{"index":0,"finish_reason":"a","delta":{"content":"a"}}]}'

    assert not learned("a", payload.replace(b'"finish_reason":"a"', b'"text":"a"')).known


def test_completions_are_learned_by_their_text() -> None:
    payload = b'{"choices":[{"index":0,"text":"a"}]}'

    assert learned("a", payload).text(payload.replace(b'"a"', b'"b"')) == "b"


def test_a_probe_that_can_not_be_read_teaches_nothing() -> None:
    payload = b'{"choices":[{"index":0,"a":0,"delta":{"content":"a"}}],"created":1}'
    repeats = Repeats()
    wire = probed(read_answer(payload))
    repeats.learn(payload.replace(b'"created":1', b'"created":'), "a", read_answer, wire)

    assert not repeats.known


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


# --- whole answers --------------------------------------------------------------------------------

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


def asked_of(body: bytes, request: GenerateRequest) -> Any:
    """What the decoder reads of it, looking at no answer as a usual one."""
    decoder = AnswerDecoder(request)
    decoder.whole = lambda body: None  # type: ignore[method-assign]
    return told(decoder.feed, decoder.close, [body])


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_usual_answer_is_read_as_any_other(kind: Any) -> None:
    request = msgspec.structs.replace(ASKED, kind=kind)
    usual = 0
    for body in map(msgspec.json.encode, answers()):
        events = whole(request, body)
        decoder = AnswerDecoder(request)
        known = asked_of(body, request)
        assert told(decoder.feed, decoder.close, [body]) == known or events is not None
        if events is not None:
            usual += 1
            assert [*events] == flat(known)

    assert usual > (5 if kind == "chat" else 0)


@pytest.mark.parametrize("around", [b"", b" "])
def test_it_is_passed_on_with_its_public_name(around: bytes) -> None:
    passage = WholePassage(lambda: AnswerDecoder(ASKED), {"model": "public"}, partial(whole, ASKED))
    body = around + msgspec.json.encode(ANSWER) + b"\n"

    for part in (body[:40], body[40:]):
        raw, events = passage.feed(part)
        assert raw == b""
        assert not events
    raw, events = passage.close()

    assert json.loads(raw or b"") == ANSWER | {"model": "public"}
    assert End("eos") in events
    assert isinstance(events[-1], Done)


def test_an_unusual_one_is_read_when_the_whole_of_it_is_there() -> None:
    passage = WholePassage(lambda: AnswerDecoder(ASKED), {"model": "public"}, partial(whole, ASKED))
    body = msgspec.json.encode(ANSWER | {"usage": None})

    assert passage.feed(body[:30]) == (b"", ())
    passage.feed(body[30:])
    raw, events = passage.close()

    assert json.loads(raw or b"") == ANSWER | {"usage": None, "model": "public"}
    assert Text("Hello") in events


def test_a_stream_in_its_place_is_read_as_it_comes() -> None:
    passage = WholePassage(lambda: AnswerDecoder(ASKED), {"model": "public"}, partial(whole, ASKED))
    first: tuple[bytes | None, Sequence[Event]] = passage.feed(said("a"))

    assert Text("a") in first[1]
    passage.feed(event(chunk(finish="stop")) + b"data: [DONE]\n\n")
    assert passage.close()[0] is None
