"""What an answer comes to, by a clock that the test moves."""

import pytest

from gateway.pipeline.shadow import ResponseSummary, ShadowSide
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from tests.fakes import FakeClock


def noted(*events: Event) -> ResponseSummary:
    one = ResponseSummary(lambda: 0.0)
    one.add_events(events)
    return one


def arm(one: ResponseSummary) -> ShadowSide:
    return one.build_side(("chat", "2"), ("ok", ""))


def test_an_answer_in_figures() -> None:
    clock = FakeClock()
    one = ResponseSummary(clock)
    clock.now += 1
    one.add_events([StreamStart(3), PromptEcho(0, "before")])
    clock.now += 1
    one.add_events([TextDelta("two ", 1), TextDelta("one", 0)])
    clock.now += 1
    one.add_events(
        [TextDelta(" words", 1, tokens=2), ChoiceEnd("length", 1), ChoiceEnd("eos", 0), StreamEnd()]
    )

    expected = ShadowSide("chat", "2", "ok", "", ("eos", "length"), 4, 13, 2.0, 3.0)
    assert arm(one) == expected
    one.add_events([Usage(3, 9)])
    assert arm(one).tokens == 9
    assert one.build_side(("c", "1"), ("worker_error", "StreamBroken")).error == "StreamBroken"


def test_a_new_try_begins_anew() -> None:
    clock = FakeClock()
    one = ResponseSummary(clock)
    one.add_events([TextDelta("half"), Usage(1, 1), ChoiceEnd("eos")])
    clock.now += 5
    one.start()
    clock.now += 1

    assert arm(one) == ShadowSide("chat", "2", duration=1.0)
    assert one.has_same_content(noted())


@pytest.mark.parametrize(
    "event", [TextDelta("a"), ReasoningDelta("a"), Embedding(0, (1.0,)), RefusalDelta("a")]
)
def test_whatever_is_said_is_the_first_of_it(event: Event) -> None:
    assert arm(noted(event)).first_token == 0.0
    assert arm(noted(StreamStart(1), Usage(1), StreamEnd())).first_token is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([TextDelta("ab"), TextDelta("c")], [TextDelta("a"), TextDelta("bc")], True),
        ([TextDelta("abc")], [TextDelta("abd")], False),
        ([TextDelta("abc")], [TextDelta("abc", 1)], False),
        ([TextDelta("a"), TextDelta("b", 1)], [TextDelta("b", 1), TextDelta("a")], True),
        ([TextDelta("abc")], [TextDelta("abc"), ReasoningDelta("hm")], True),
        ([TextDelta("abc")], [], False),
        ([ToolCallStart(0, 0, "x", "f"), ToolCallDelta(0, 0, "{}")],
         [ToolCallStart(0, 0, "y", "f"), ToolCallDelta(0, 0, "{"), ToolCallDelta(0, 0, "}")], True),
        ([ToolCallStart(0, 0, "x", "f")], [ToolCallStart(0, 0, "x", "g")], False),
        ([ToolCallStart(0, 0, "x", "f")], [TextDelta("f")], False),
        ([TextDelta("\ud800")], [TextDelta("\ud800")], True),
    ],
)  # fmt: skip
def test_two_answers_are_the_same_by_their_words(
    one: list[Event], other: list[Event], *, same: bool
) -> None:
    assert noted(*one).has_same_content(noted(*other)) is same


@pytest.mark.parametrize(
    ("events", "complete"),
    [
        ([TextDelta("a"), ChoiceEnd("eos"), StreamEnd()], True),
        ([TextDelta("a"), ChoiceEnd("eos")], False),
        ([TextDelta("a"), StreamEnd()], False),
        ([ReasoningDelta("a"), StreamEnd()], False),
        ([ToolCallStart(1, 0, "x", "f"), ChoiceEnd("eos"), StreamEnd()], False),
        ([ChoiceEnd("eos"), ChoiceEnd("eos", 1), StreamEnd()], True),
        ([Embedding(0, (1.0,)), StreamEnd()], True),
    ],
)
def test_an_answer_is_complete_when_each_choice_is(events: list[Event], *, complete: bool) -> None:
    assert noted(*events).is_complete is complete
