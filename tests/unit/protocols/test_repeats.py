"""What events have in common is learned where it is sure, and compared to the byte."""

import msgspec
import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

from gateway.core.sse import plain_at
from protocols.openai.incoming import probed, read_answer
from protocols.repeats import Repeats
from tests.unit.protocols.openai.streams import HEADING, chunk, event, said


def learned(text: str = "one", data: bytes | None = None) -> Repeats:
    """What is known after this event, which says that text."""
    repeats = Repeats()
    payload = data or said(text)[6:-2]
    repeats.learn(payload, text, read_answer, probed(read_answer(payload)))
    return repeats


def run(data: bytes, start: int, texts: list[str]) -> int:
    """Where these events end, which add their texts; as one they say the same."""
    heard: list[str] = []
    end = learned().run(data, start, heard)
    assert learned().together(data, start) == ("".join(heard), len([*filter(None, heard)]), end)
    texts += heard
    return end


def holding(text: bytes) -> bytes:
    """An event with this in the place of its quoted text."""
    return said("x").replace(b'"x"', text)


def learns(text: str, payload: bytes) -> bool:
    """Whether others can be like this event, which says that text."""
    return Repeats().learn(payload, text, read_answer, probed(read_answer(payload)))


def test_a_chunk_that_differs_in_its_text_alone_is_known() -> None:
    repeats = learned()

    assert repeats.text(said("two")[6:-2]) == "two"
    assert repeats.text(said("")[6:-2]) == ""


ODD = [
    pytest.param(holding(b'"x","y"'), id="more than a text"),
    pytest.param(holding(b'"x""y"'), id="two texts"),
    pytest.param(holding(b'"x" "y"'), id="two texts apart"),
    pytest.param(holding(b'"x\ndata: y"'), id="two lines"),
    pytest.param(said("x").replace(b"\n\n", b"\n:\n\n"), id="a comment in it"),
    pytest.param(said("x").replace(b"\n", b"\r\n"), id="other ends of lines"),
    pytest.param(holding(b'"\xff"'), id="not UTF-8"),
    pytest.param(holding(b'"\x01"'), id="control character"),
]


@pytest.mark.parametrize(
    "other",
    [
        *ODD,
        pytest.param(
            event(chunk({"content": "two"}, heading=HEADING | {"created": 8})), id="other heading"
        ),
        pytest.param(event(chunk({"content": "two"}, "stop")), id="end"),
        pytest.param(holding(b'"'), id="less than a text"),
        pytest.param(holding(b'"\\x"'), id="no escape"),
        pytest.param(holding(b'"\xff\\n"'), id="not UTF-8, with an escape"),
    ],
)
def test_any_other_is_not(other: bytes) -> None:
    texts: list[str] = []

    assert learned().text(other[6:-2]) is None
    assert run(said("a") + other, 0, texts) == len(said("a"))
    assert texts == ["a"]


@pytest.mark.parametrize("text", ["\n", "\\", "\u00e9", "\x7f", "\U0001f600 \t"])
def test_escapes_are_part_of_a_text(text: str) -> None:
    texts: list[str] = []
    data = said("a") + said(text) + said("") + said("b")

    assert learned().text(said(text)[6:-2]) == text
    assert run(data, 0, texts) == len(data)
    assert texts == ["a", text, "", "b"]


def test_quotes_are_part_of_a_text_where_they_are_escaped() -> None:
    texts: list[str] = []
    data = said("a") + said('"') + said("") + said('\\"b')

    assert learned().text(said('"')[6:-2]) == '"'
    assert run(data, 0, texts) == len(data)
    assert texts == ["a", '"', "", '\\"b']


@pytest.mark.parametrize(
    "odd",
    [
        *ODD,
        pytest.param(holding(b'"x\\"'), id="a backslash at the end"),
        pytest.param(holding(b'"x\\"') + holding(b'"y""z"'), id="as many texts as events"),
        pytest.param(holding(b'"\\ud83d"'), id="half a character"),
        pytest.param(said("x").partition(b'"x')[2], id="no beginning"),
        pytest.param(b"data: [DONE]\n\n", id="the end"),
    ],
)
def test_many_are_known_up_to_one_that_is_odd(odd: bytes) -> None:
    texts: list[str] = []
    before = said("a") + said("") + said("b")

    assert run(before + odd + said("c") + said("d"), 0, texts) == len(before)
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

    assert run(b"held" + data, 4, texts) == 4 + len(data) * (heard is not None)
    assert texts == (heard or [])


HELD = st.one_of(
    st.sampled_from(
        [b"a", b"", b"\\", b"\\n", b'"', b'\\"', b"\\ud83d", b"\\ude00", b"\n", b"\x01"]
    ),
    st.sampled_from([b"\xc3", b"\xa9", b"\xc3\xa9", b"\x7f", b'","', b"\\u00", b"e9", b"\r\n"]),
    st.text(max_size=6).map(lambda text: msgspec.json.encode(text)[1:-1]),
)


@forall(st.lists(HELD, max_size=12), st.integers(0, 60))
def test_events_mean_the_same_one_by_one_and_together(held: list[bytes], cut: int) -> None:
    texts: list[str] = []
    data = b"".join(holding(b'"%b"' % text) for text in held)
    data = data[: len(data) - cut]
    repeats, end = learned(), 0
    while (found := plain_at(data, end)) and (text := repeats.text(found[1])) is not None:
        texts.append(text)
        end = found.end()

    heard: list[str] = []
    assert run(data, 0, heard) == end
    assert heard == texts


def test_nothing_is_known_before_one_was_learned() -> None:
    assert Repeats().together(said("a"), 0) == ("", 0, 0)
    assert Repeats().run(said("a"), 0, []) == 0


def test_any_number_are_known_at_once() -> None:
    texts: list[str] = []
    data = said("a") * 128

    assert run(data + data + data[:-1], 0, texts) == 2 * len(data) + 127 * len(said("a"))
    assert texts == ["a"] * 383
    assert run(data, 0, texts) == len(data)


def test_those_are_known_that_come_before_what_is_no_event() -> None:
    texts: list[str] = []
    data = said("a") + said("b")

    assert run(data + b"\n" + data + data[:-2], 0, texts) == len(data)
    assert texts == ["a", "b"]


def test_one_is_known_before_the_next_is_whole() -> None:
    texts: list[str] = []

    assert run(said("a") + said("b")[:-1], 0, texts) == len(said("a"))
    assert run(said("a")[:-1], 0, texts) == 0
    assert texts == ["a"]


@pytest.mark.parametrize(
    ("text", "payload"),
    [
        ("a\nb", msgspec.json.encode(chunk({"content": "a\nb"}))),
        ("a", msgspec.json.encode(chunk({"content": "a"})).replace(b'"a"', b'"\\u0061"')),
        ("id", msgspec.json.encode(chunk({"content": "id"}))),
        ("7", msgspec.json.encode(chunk({"content": "7"}) | {"choices": None})),
    ],
    ids=["an escape", "its text is not found", "found elsewhere", "found nowhere"],
)
def test_what_is_not_sure_is_not_learned(text: str, payload: bytes) -> None:
    assert not learns(text, payload)


def test_a_text_whose_place_holds_something_else_is_not_learned() -> None:
    payload = b'{"choices":[{"index":0,"delta":{"content":"a"}}],"n":1}'.replace(b'"n"', b'"a"')
    swapped = b'{"a":1,"choices":[{"index":0,"delta":{"content":"a"}}]}'

    assert learns("a", payload)
    assert not learns("a", swapped)
    assert not learns("index", swapped.replace(b'"content":"a"', b'"content":"index"'))


def test_a_text_that_stands_for_a_type_is_not_learned() -> None:
    payload = b'{"choices":[{"index":0,"finish_reason":"a","delta":{"content":"a"}}]}'

    assert not learns("a", payload.replace(b'"finish_reason":"a"', b'"text":"a"'))


def test_completions_are_learned_by_their_text() -> None:
    payload = b'{"choices":[{"index":0,"text":"a"}]}'

    assert learned("a", payload).text(payload.replace(b'"a"', b'"b"')) == "b"


def test_a_probe_that_can_not_be_read_teaches_nothing() -> None:
    payload = b'{"choices":[{"index":0,"a":0,"delta":{"content":"a"}}],"created":1}'
    repeats = Repeats()
    wire = probed(read_answer(payload))

    assert not repeats.learn(payload.replace(b'"created":1', b'"created":'), "a", read_answer, wire)
