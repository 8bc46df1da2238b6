"""No character of a stop string is sent, and the text before it keeps its tokens."""

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


def make_emulator(*strings: str, include: bool = False, choices: int = 1) -> StopStringEmulator:
    return StopStringEmulator(StopConditions(stop=strings, include_stop=include), choices)


def make_token(text: str, id_: int, index: int = 0) -> TextDelta:
    """A token with logprobs, as a worker sends it."""
    return TextDelta(text, index, 1, (id_,), (TokenLogprob(text, -0.5, id=id_),))


def join_text(events: Sequence[Event], index: int = 0) -> str:
    return "".join(one.text for one in events if isinstance(one, TextDelta) and one.index == index)


# --- property -------------------------------------------------------------------------------------


def find_first_stop(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """The stop string that is complete first, and its position; of several the longest."""
    for end in range(1, len(text) + 1):
        complete = [one for one in strings if one and text[:end].endswith(one)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@given(pieces=st.lists(FEW, max_size=8), strings=STOPS, include=st.booleans())
def test_text_ends_at_the_first_stop_string_for_any_chunking(
    pieces: list[str], strings: list[str], *, include: bool
) -> None:
    text = "".join(pieces)
    stop_at = find_first_stop(text, strings)
    allowed, end = text, ChoiceEnd("eos")
    if stop_at is not None:
        at, matched = stop_at
        allowed, end = text[: at + (len(matched) if include else 0)], ChoiceEnd("stop", 0, matched)
    running = make_emulator(*strings, include=include)
    out: list[Event] = []

    for piece in pieces:
        out += running.apply([TextDelta(piece)])
        assert allowed.startswith(join_text(out)), "sent text can't be withdrawn"
    out += running.apply([ChoiceEnd("eos")])

    assert join_text(out) == allowed
    assert [one for one in out if isinstance(one, ChoiceEnd)] == [end]
    assert out[-1] == end


@given(pieces=st.lists(FEW, max_size=8), strings=STOPS)
def test_token_ids_and_logprobs_stay_with_their_text(pieces: list[str], strings: list[str]) -> None:
    sent = [make_token(piece, i) for i, piece in enumerate(pieces)]

    out = make_emulator(*strings).apply([*sent, ChoiceEnd("eos")])

    texts = [one for one in out if isinstance(one, TextDelta)]
    for received, original in zip(texts, sent, strict=False):
        assert (received.token_ids, received.logprobs) == (original.token_ids, original.logprobs)
        assert original.text.startswith(received.text)
    assert all(received == original for received, original in zip(texts[:-1], sent, strict=False))


@given(strings=STOPS, text=st.text("abc", max_size=30))
def test_ineffective_stop_strings_can_be_removed(strings: list[str], text: str) -> None:
    assert find_first_stop(text, select_effective_stops(strings)) == find_first_stop(text, strings)


# --- one choice -----------------------------------------------------------------------------------


def test_text_is_held_back_while_a_stop_string_may_match() -> None:
    running = make_emulator("lo wor")

    assert running.apply([make_token("Hello", 1)]) == []
    assert running.apply([make_token(" there", 2)]) == [
        make_token("Hello", 1),
        make_token(" there", 2),
    ]


def test_text_is_truncated_at_the_stop_string() -> None:
    running = make_emulator("lo wor")

    out = running.apply(
        [make_token("Hello", 1), make_token(" w", 2), make_token("orld", 3), make_token("!", 4)]
    )

    assert out == [
        TextDelta("Hel", 0, 1, (1,), (TokenLogprob("Hello", -0.5, id=1),)),
        ChoiceEnd("stop", 0, "lo wor"),
    ]


def test_delta_that_starts_with_the_stop_string_is_dropped() -> None:
    assert make_emulator("b").apply([make_token("a", 1), make_token("b", 2)]) == [
        make_token("a", 1),
        ChoiceEnd("stop", 0, "b"),
    ]


def test_included_stop_string_stays_in_the_text() -> None:
    assert make_emulator("b", include=True).apply([make_token("abc", 1)]) == [
        TextDelta("ab", 0, 1, (1,), (TokenLogprob("abc", -0.5, id=1),)),
        ChoiceEnd("stop", 0, "b"),
    ]


def test_held_text_is_flushed_before_the_end_of_the_choice() -> None:
    out = make_emulator("ab").apply([TextDelta("xa"), ChoiceEnd("length")])

    assert out == [TextDelta("xa"), ChoiceEnd("length")]


def test_tool_calls_and_reasoning_are_not_searched_and_keep_their_order() -> None:
    events: list[Event] = [
        PromptEcho(0, "ab"),
        ReasoningDelta("ab"),
        RefusalDelta("ab"),
        TextDelta("a"),
        ToolCallStart(0, 0, "id", "ab"),
        ToolCallDelta(0, 0, "ab"),
    ]
    running = make_emulator("ab")

    assert running.apply(events) == events[:3]
    assert running.apply([ChoiceEnd("tool_calls")]) == [*events[3:], ChoiceEnd("tool_calls")]


def test_held_events_before_the_stop_string_are_flushed() -> None:
    running = make_emulator("ab", "cd")
    running.apply([TextDelta("a"), ReasoningDelta("t")])

    assert running.apply([TextDelta("cd")]) == [
        TextDelta("a"),
        ReasoningDelta("t"),
        ChoiceEnd("stop", 0, "cd"),
    ]


def test_usage_event_is_not_held_back() -> None:
    assert make_emulator("ab").apply([TextDelta("a"), Usage(1, 2)]) == [Usage(1, 2)]


# --- several choices, and the end -----------------------------------------------------------------


def test_stop_strings_are_matched_per_choice() -> None:
    running = make_emulator("ab", choices=2)

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


def test_events_after_a_stop_string_are_dropped() -> None:
    running = make_emulator("b", choices=2)
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
def test_emulator_is_complete_if_all_choices_ended_before_the_worker(
    events: list[Event], *, over: bool
) -> None:
    running = make_emulator("b", choices=2)
    running.apply(events)

    assert running.is_complete is over


# --- truncated text -------------------------------------------------------------------------------

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
def test_shortened_delta_keeps_only_tokens_that_begin_in_its_text(
    event: TextDelta, length: int, cut: TextDelta
) -> None:
    assert shorten_delta(event, length) == cut


# --- requests -------------------------------------------------------------------------------------


def make_chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", kind="chat", stopping=StopConditions(**fields))


@pytest.mark.parametrize(
    ("request_", "inner"),
    [
        (make_chat(stop=("x",), include_stop=True, max_tokens=3), make_chat(max_tokens=3)),
        (make_chat(stop=("x",), include_stop=False), make_chat(stop=("x",), include_stop=False)),
        (EmbeddingRequest(model="m", inputs=("a",)), EmbeddingRequest(model="m", inputs=("a",))),
    ],
)
def test_included_stop_strings_are_removed_from_the_worker_request(
    request_: Request, inner: Request
) -> None:
    assert remove_stop_strings(request_) == inner
