"""No character of a stop string is passed on, and what was passed on keeps its tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.emulation.stop_strings import (
    StopStringEmulator,
    remove_stop_strings,
    select_effective_stops,
    shorten_delta,
)
from protocols.core.events import (
    ChoiceEnd,
    Event,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.request import EmbeddingRequest, GenerationRequest, Request, StopConditions

FEW = st.text("abc", max_size=10)
STOPS = st.lists(st.text("abc", max_size=4), max_size=4)


def stops(*strings: str, include: bool = False, choices: int = 1) -> StopStringEmulator:
    return StopStringEmulator(StopConditions(stop=strings, include_stop=include), choices)


def token(text: str, id_: int, index: int = 0) -> TextDelta:
    """A token as a worker with logprobs tells it."""
    return TextDelta(text, index, 1, (id_,), (TokenLogprob(text, -0.5, id=id_),))


def spoken(events: Sequence[Event], index: int = 0) -> str:
    return "".join(one.text for one in events if isinstance(one, TextDelta) and one.index == index)


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
    allowed, end = text, ChoiceEnd("eos")
    if found is not None:
        at, matched = found
        allowed, end = text[: at + (len(matched) if include else 0)], ChoiceEnd("stop", 0, matched)
    running = stops(*strings, include=include)
    out: list[Event] = []

    for piece in pieces:
        out += running.apply([TextDelta(piece)])
        assert allowed.startswith(spoken(out)), "what is sent can't be taken back"
    out += running.apply([ChoiceEnd("eos")])

    assert spoken(out) == allowed
    assert [one for one in out if isinstance(one, ChoiceEnd)] == [end]
    assert out[-1] == end


@given(pieces=st.lists(FEW, max_size=8), strings=STOPS)
def test_tokens_stay_with_their_text(pieces: list[str], strings: list[str]) -> None:
    sent = [token(piece, i) for i, piece in enumerate(pieces)]

    out = stops(*strings).apply([*sent, ChoiceEnd("eos")])

    texts = [one for one in out if isinstance(one, TextDelta)]
    for got, given_ in zip(texts, sent, strict=False):
        assert (got.token_ids, got.logprobs) == (given_.token_ids, given_.logprobs)
        assert given_.text.startswith(got.text)
    assert all(got == given_ for got, given_ in zip(texts[:-1], sent, strict=False))


@given(strings=STOPS, text=st.text("abc", max_size=30))
def test_a_stop_string_that_can_never_be_the_first_makes_no_difference(
    strings: list[str], text: str
) -> None:
    assert first(text, select_effective_stops(strings)) == first(text, strings)


# --- one choice -----------------------------------------------------------------------------------


def test_a_text_is_held_back_whole_while_it_is_undecided() -> None:
    running = stops("lo wor")

    assert running.apply([token("Hello", 1)]) == []
    assert running.apply([token(" there", 2)]) == [token("Hello", 1), token(" there", 2)]


def test_the_text_in_which_the_stop_begins_is_cut_and_later_ones_are_dropped() -> None:
    running = stops("lo wor")

    out = running.apply([token("Hello", 1), token(" w", 2), token("orld", 3), token("!", 4)])

    assert out == [
        TextDelta("Hel", 0, 1, (1,), (TokenLogprob("Hello", -0.5, id=1),)),
        ChoiceEnd("stop", 0, "lo wor"),
    ]


def test_a_stop_at_the_beginning_of_a_text_leaves_nothing_of_it() -> None:
    assert stops("b").apply([token("a", 1), token("b", 2)]) == [
        token("a", 1),
        ChoiceEnd("stop", 0, "b"),
    ]


def test_a_stop_that_was_asked_to_stay_stays() -> None:
    assert stops("b", include=True).apply([token("abc", 1)]) == [
        TextDelta("ab", 0, 1, (1,), (TokenLogprob("abc", -0.5, id=1),)),
        ChoiceEnd("stop", 0, "b"),
    ]


def test_what_is_held_is_passed_on_before_the_natural_end() -> None:
    out = stops("ab").apply([TextDelta("xa"), ChoiceEnd("length")])

    assert out == [TextDelta("xa"), ChoiceEnd("length")]


def test_calls_and_thoughts_are_not_searched_and_keep_their_order() -> None:
    said: list[Event] = [
        PromptEcho(0, "ab"),
        ReasoningDelta("ab"),
        RefusalDelta("ab"),
        TextDelta("a"),
        ToolCallStart(0, 0, "id", "ab"),
        ToolCallDelta(0, 0, "ab"),
    ]
    running = stops("ab")

    assert running.apply(said) == said[:3]
    assert running.apply([ChoiceEnd("tool_calls")]) == [*said[3:], ChoiceEnd("tool_calls")]


def test_what_was_said_before_the_stop_is_passed_on_with_the_text_before_it() -> None:
    running = stops("ab", "cd")
    running.apply([TextDelta("a"), ReasoningDelta("t")])

    assert running.apply([TextDelta("cd")]) == [
        TextDelta("a"),
        ReasoningDelta("t"),
        ChoiceEnd("stop", 0, "cd"),
    ]


def test_what_concerns_no_choice_passes_at_once() -> None:
    assert stops("ab").apply([TextDelta("a"), Usage(1, 2)]) == [Usage(1, 2)]


# --- several choices, and the end -----------------------------------------------------------------


def test_each_choice_has_its_own_text() -> None:
    running = stops("ab", choices=2)

    out = running.apply(
        [
            TextDelta("a", 0),
            TextDelta("b", 1),
            TextDelta("b", 0),
            TextDelta("a", 1),
            ChoiceEnd("eos", 1),
        ]
    )

    assert out == [
        TextDelta("b", 1),
        ChoiceEnd("stop", 0, "ab"),
        TextDelta("a", 1),
        ChoiceEnd("eos", 1),
    ]


def test_a_choice_says_nothing_after_its_end_here() -> None:
    running = stops("b", choices=2)
    running.apply([TextDelta("b", 0)])

    assert (
        running.apply([TextDelta("more", 0), ToolCallStart(0, 0, "i", "x"), ChoiceEnd("length", 0)])
        == []
    )


@pytest.mark.parametrize(
    ("events", "over"),
    [
        ([TextDelta("b", 0)], False),
        ([TextDelta("b", 0), ChoiceEnd("eos", 1)], True),
        ([ChoiceEnd("eos", 0), ChoiceEnd("eos", 1)], False),
        ([TextDelta("b", 0), TextDelta("b", 1)], True),
        ([TextDelta("b", 0), ChoiceEnd("eos", 0), TextDelta("b", 1)], True),
        ([TextDelta("b", 0), ChoiceEnd("eos", 0), ChoiceEnd("eos", 1)], False),
        ([TextDelta("b", 0), TextDelta("b", 1), StreamEnd()], False),
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
        (TextDelta("abcde", 0, 3, (1, 2, 3), SPELT), 1, TextDelta("a", 0, 1, (1,), SPELT[:1])),
        (TextDelta("abcde", 0, 3, (1, 2, 3), SPELT), 2, TextDelta("ab", 0, 1, (1,), SPELT[:1])),
        (TextDelta("abcde", 0, 3, (1, 2, 3), SPELT), 3, TextDelta("abc", 0, 2, (1, 2), SPELT[:2])),
        (TextDelta("abcde", 0, 9, (), SPELT), 4, TextDelta("abcd", 0, 3, (), SPELT)),
        (TextDelta("abcde", 0, 3, (1, 2), SPELT), 4, TextDelta("abcd", 0, 3, (), SPELT)),
        (TextDelta("?bcde", 0, 3, (1, 2, 3), SPELT), 4, TextDelta("?bcd", 0, 3)),
        (TextDelta("abcde", 0, 3, (1, 2, 3)), 2, TextDelta("ab", 0, 2)),
        (TextDelta("abcde", 0, 5), 2, TextDelta("ab", 0, 2)),
        (TextDelta("abcde", 0, 1, (1,)), 2, TextDelta("ab", 0, 1, (1,))),
        (TextDelta("?bcde", 0, 1, (), SPELT[:1]), 2, TextDelta("?b", 0, 1, (), SPELT[:1])),
        (TextDelta("abcde", 0, 0), 2, TextDelta("ab", 0, 0)),
    ],
)
def test_a_shorter_text_has_only_the_tokens_that_begin_in_it(
    event: TextDelta, length: int, cut: TextDelta
) -> None:
    assert shorten_delta(event, length) == cut


# --- the request ----------------------------------------------------------------------------------


def chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", kind="chat", stopping=StopConditions(**fields))


@pytest.mark.parametrize(
    ("request_", "inner"),
    [
        (chat(stop=("x",), include_stop=True, max_tokens=3), chat(max_tokens=3)),
        (chat(stop=("x",), include_stop=False), chat(stop=("x",), include_stop=False)),
        (EmbeddingRequest(model="m", inputs=("a",)), EmbeddingRequest(model="m", inputs=("a",))),
    ],
)
def test_a_worker_that_takes_stops_off_is_not_told_of_those_that_stay(
    request_: Request, inner: Request
) -> None:
    assert remove_stop_strings(request_) == inner
