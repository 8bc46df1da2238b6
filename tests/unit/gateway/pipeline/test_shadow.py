"""The summary of a response for a shadow comparison, with a clock that a test sets."""

import pytest

from gateway.pipeline.shadow_comparison import ResponseSummary, ShadowSide
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
from tests.support.fakes import FakeClock


def summarize(*events: Event) -> ResponseSummary:
    one = ResponseSummary(lambda: 0.0)
    one.add_events(events)
    return one


def build_side(one: ResponseSummary) -> ShadowSide:
    return one.build_side(("chat", "2"), ("ok", ""))


def test_response_summary_contains_tokens_lengths_and_times() -> None:
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
    assert build_side(one) == expected

    one.add_events([Usage(3, 9)])
    assert build_side(one).tokens == 9
    assert one.build_side(("c", "1"), ("worker_error", "StreamBroken")).error == "StreamBroken"


def test_new_attempt_resets_the_summary() -> None:
    clock = FakeClock()
    one = ResponseSummary(clock)
    one.add_events([TextDelta("half"), Usage(1, 1), ChoiceEnd("eos")])
    clock.now += 5
    one.start()
    clock.now += 1

    assert build_side(one) == ShadowSide("chat", "2", duration=1.0)
    assert one.has_same_content(summarize())


@pytest.mark.parametrize(
    "event", [TextDelta("a"), ReasoningDelta("a"), Embedding(0, (1.0,)), RefusalDelta("a")]
)
def test_first_content_event_of_any_kind_sets_the_first_token_time(event: Event) -> None:
    assert build_side(summarize(event)).first_token == 0.0
    assert build_side(summarize(StreamStart(1), Usage(1), StreamEnd())).first_token is None


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
def test_responses_are_equal_if_their_content_is_equal(
    one: list[Event], other: list[Event], *, same: bool
) -> None:
    assert summarize(*one).has_same_content(summarize(*other)) is same


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
def test_summary_is_complete_if_every_choice_ended(events: list[Event], *, complete: bool) -> None:
    assert summarize(*events).is_complete is complete
