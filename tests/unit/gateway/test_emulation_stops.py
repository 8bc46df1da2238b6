"""No character of a stop string is passed on, and what was passed on keeps its tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.types import (
    CallArguments,
    CallStart,
    Done,
    EmbedRequest,
    End,
    Event,
    GenerateRequest,
    PromptEcho,
    Refusal,
    Request,
    Stopping,
    Text,
    Thought,
    TokenLogprob,
    Usage,
)
from gateway.emulation.stops import Stops, effective, shortened, without_stops

FEW = st.text("abc", max_size=10)
STOPS = st.lists(st.text("abc", max_size=4), max_size=4)


def stops(*strings: str, include: bool = False, choices: int = 1) -> Stops:
    return Stops(Stopping(stop=strings, include_stop=include), choices)


def token(text: str, id_: int, index: int = 0) -> Text:
    """A token as a worker with logprobs tells it."""
    return Text(text, index, 1, (id_,), (TokenLogprob(text, -0.5, id=id_),))


def spoken(events: Sequence[Event], index: int = 0) -> str:
    return "".join(one.text for one in events if isinstance(one, Text) and one.index == index)


# --- the law --------------------------------------------------------------------------------------


def first(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string begins that is complete first, and which: the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [one for one in strings if one and text[:end].endswith(one)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@given(pieces=st.lists(FEW, max_size=8), strings=STOPS, include=st.booleans())
def test_however_a_text_is_cut_it_ends_before_the_first_stop_string(
    pieces: list[str], strings: list[str], *, include: bool
) -> None:
    text = "".join(pieces)
    found = first(text, strings)
    allowed, end = text, End("eos")
    if found is not None:
        at, matched = found
        allowed, end = text[: at + (len(matched) if include else 0)], End("stop", 0, matched)
    running = stops(*strings, include=include)
    out: list[Event] = []

    for piece in pieces:
        out += running.apply([Text(piece)])
        assert allowed.startswith(spoken(out)), "what is sent can't be taken back"
    out += running.apply([End("eos")])

    assert spoken(out) == allowed
    assert [one for one in out if isinstance(one, End)] == [end]
    assert out[-1] == end


@given(pieces=st.lists(FEW, max_size=8), strings=STOPS)
def test_tokens_stay_with_their_text(pieces: list[str], strings: list[str]) -> None:
    sent = [token(piece, i) for i, piece in enumerate(pieces)]

    out = stops(*strings).apply([*sent, End("eos")])

    texts = [one for one in out if isinstance(one, Text)]
    for got, given_ in zip(texts, sent, strict=False):
        assert (got.token_ids, got.logprobs) == (given_.token_ids, given_.logprobs)
        assert given_.text.startswith(got.text)
    assert all(got == given_ for got, given_ in zip(texts[:-1], sent, strict=False))


@given(strings=STOPS, text=st.text("abc", max_size=30))
def test_a_stop_string_that_can_never_be_the_first_makes_no_difference(
    strings: list[str], text: str
) -> None:
    assert first(text, effective(strings)) == first(text, strings)


# --- one choice -----------------------------------------------------------------------------------


def test_a_text_is_held_back_whole_while_it_is_undecided() -> None:
    running = stops("lo wor")

    assert running.apply([token("Hello", 1)]) == []
    assert running.apply([token(" there", 2)]) == [token("Hello", 1), token(" there", 2)]


def test_the_text_in_which_the_stop_begins_is_cut_and_later_ones_are_dropped() -> None:
    running = stops("lo wor")

    out = running.apply([token("Hello", 1), token(" w", 2), token("orld", 3), token("!", 4)])

    assert out == [
        Text("Hel", 0, 1, (1,), (TokenLogprob("Hello", -0.5, id=1),)),
        End("stop", 0, "lo wor"),
    ]


def test_a_stop_at_the_beginning_of_a_text_leaves_nothing_of_it() -> None:
    assert stops("b").apply([token("a", 1), token("b", 2)]) == [token("a", 1), End("stop", 0, "b")]


def test_a_stop_that_was_asked_to_stay_stays() -> None:
    assert stops("b", include=True).apply([token("abc", 1)]) == [
        Text("ab", 0, 1, (1,), (TokenLogprob("abc", -0.5, id=1),)),
        End("stop", 0, "b"),
    ]


def test_what_is_held_is_passed_on_before_the_natural_end() -> None:
    out = stops("ab").apply([Text("xa"), End("length")])

    assert out == [Text("xa"), End("length")]


def test_calls_and_thoughts_are_not_searched_and_keep_their_order() -> None:
    said: list[Event] = [
        PromptEcho(0, "ab"),
        Thought("ab"),
        Refusal("ab"),
        Text("a"),
        CallStart(0, 0, "id", "ab"),
        CallArguments(0, 0, "ab"),
    ]
    running = stops("ab")

    assert running.apply(said) == said[:3]
    assert running.apply([End("tool_calls")]) == [*said[3:], End("tool_calls")]


def test_what_was_said_before_the_stop_is_passed_on_with_the_text_before_it() -> None:
    running = stops("ab", "cd")
    running.apply([Text("a"), Thought("t")])

    assert running.apply([Text("cd")]) == [Text("a"), Thought("t"), End("stop", 0, "cd")]


def test_what_concerns_no_choice_passes_at_once() -> None:
    assert stops("ab").apply([Text("a"), Usage(1, 2)]) == [Usage(1, 2)]


# --- several choices, and the end -----------------------------------------------------------------


def test_each_choice_has_its_own_text() -> None:
    running = stops("ab", choices=2)

    out = running.apply([Text("a", 0), Text("b", 1), Text("b", 0), Text("a", 1), End("eos", 1)])

    assert out == [Text("b", 1), End("stop", 0, "ab"), Text("a", 1), End("eos", 1)]


def test_a_choice_says_nothing_after_its_end_here() -> None:
    running = stops("b", choices=2)
    running.apply([Text("b", 0)])

    assert running.apply([Text("more", 0), CallStart(0, 0, "i", "x"), End("length", 0)]) == []


@pytest.mark.parametrize(
    ("events", "over"),
    [
        ([Text("b", 0)], False),
        ([Text("b", 0), End("eos", 1)], True),
        ([End("eos", 0), End("eos", 1)], False),
        ([Text("b", 0), Text("b", 1)], True),
        ([Text("b", 0), End("eos", 0), Text("b", 1)], True),
        ([Text("b", 0), End("eos", 0), End("eos", 1)], False),
        ([Text("b", 0), Text("b", 1), Done()], False),
    ],
)
def test_it_is_over_when_all_have_ended_and_the_worker_goes_on(
    events: list[Event], *, over: bool
) -> None:
    running = stops("b", choices=2)
    running.apply(events)

    assert running.is_complete is over


# --- the text that is cut -------------------------------------------------------------------------

SPELT = (TokenLogprob("ab", -1.0), TokenLogprob("c", -1.0), TokenLogprob("de", -1.0))


@pytest.mark.parametrize(
    ("event", "length", "cut"),
    [
        (Text("abcde", 0, 3, (1, 2, 3), SPELT), 1, Text("a", 0, 1, (1,), SPELT[:1])),
        (Text("abcde", 0, 3, (1, 2, 3), SPELT), 2, Text("ab", 0, 1, (1,), SPELT[:1])),
        (Text("abcde", 0, 3, (1, 2, 3), SPELT), 3, Text("abc", 0, 2, (1, 2), SPELT[:2])),
        (Text("abcde", 0, 9, (), SPELT), 4, Text("abcd", 0, 3, (), SPELT)),
        (Text("abcde", 0, 3, (1, 2), SPELT), 4, Text("abcd", 0, 3, (), SPELT)),
        (Text("?bcde", 0, 3, (1, 2, 3), SPELT), 4, Text("?bcd", 0, 3)),
        (Text("abcde", 0, 3, (1, 2, 3)), 2, Text("ab", 0, 2)),
        (Text("abcde", 0, 5), 2, Text("ab", 0, 2)),
        (Text("abcde", 0, 1, (1,)), 2, Text("ab", 0, 1, (1,))),
        (Text("?bcde", 0, 1, (), SPELT[:1]), 2, Text("?b", 0, 1, (), SPELT[:1])),
        (Text("abcde", 0, 0), 2, Text("ab", 0, 0)),
    ],
)
def test_a_shorter_text_has_only_the_tokens_that_begin_in_it(
    event: Text, length: int, cut: Text
) -> None:
    assert shortened(event, length) == cut


# --- the request ----------------------------------------------------------------------------------


def chat(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", kind="chat", stopping=Stopping(**fields))


@pytest.mark.parametrize(
    ("request_", "inner"),
    [
        (chat(stop=("x",), include_stop=True, max_tokens=3), chat(max_tokens=3)),
        (chat(stop=("x",), include_stop=False), chat(stop=("x",), include_stop=False)),
        (EmbedRequest(model="m", inputs=("a",)), EmbedRequest(model="m", inputs=("a",))),
    ],
)
def test_a_worker_that_takes_stops_off_is_not_told_of_those_that_stay(
    request_: Request, inner: Request
) -> None:
    assert without_stops(request_) == inner
