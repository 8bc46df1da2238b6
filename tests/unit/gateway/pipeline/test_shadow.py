"""What an answer comes to, by a clock that the test moves."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from backends.interfaces import EventSink
from gateway.pipeline.shadow import ObservedStrategy, ResponseSummary, ShadowSide
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


class Answer:
    """An answer of two batches."""

    unsupported_parameters = ()
    request = None

    def __init__(self) -> None:
        self.closed = False

    def get_encoder(self) -> str:
        return "encoder"

    def get_stream_headers(self) -> str:
        return "opening"

    def process_events(self, events: Sequence[Event]) -> Sequence[Event]:
        return [*events, Usage(0, len(events))]

    def build_response(self, *given: object) -> tuple[object, ...]:
        return given

    async def stream(
        self, take: EventSink | None = None
    ) -> AsyncGenerator[tuple[bytes | None, Sequence[Event]], None]:
        try:
            yield b"a", [TextDelta("a")]
            if take is not None:
                take(b"b", [TextDelta("b")])
            yield None, [StreamEnd()]
        finally:
            self.closed = True


async def test_an_answer_passes_as_it_is() -> None:
    noted, answer = ResponseSummary(lambda: 0.0), Answer()
    made: Any = ObservedStrategy
    heard = made(answer, noted)
    pieces = heard.stream()

    assert await anext(pieces) == (b"a", [TextDelta("a")])
    await pieces.aclose()
    assert answer.closed
    assert heard.request is answer.request
    assert (heard.get_encoder(), heard.get_stream_headers(), heard.unsupported_parameters) == (
        "encoder",
        "opening",
        (),
    )
    assert heard.build_response(1, 2) == (1, 2)


async def test_what_is_heard_of_it_is_noted() -> None:
    noted = ResponseSummary(lambda: 0.0)
    made: Any = ObservedStrategy
    overheard = made(Answer(), noted)

    overheard.stream()

    assert overheard.process_events([TextDelta("a")]) == [TextDelta("a"), Usage(0, 1)]
    assert arm(noted).length == 1
    assert arm(noted).tokens == 1


async def test_what_another_target_said_before_is_not() -> None:
    noted = ResponseSummary(lambda: 0.0)
    made: Any = ObservedStrategy
    overheard = made(Answer(), noted)
    overheard.process_events([TextDelta("a")])

    overheard.stream()

    assert arm(noted).length == 0


async def test_what_is_taken_at_once_is_given_to_who_takes_it() -> None:
    made: Any = ObservedStrategy
    taken = list[tuple[bytes | None, Sequence[Event]]]()

    def take(data: bytes | None, events: Sequence[Event]) -> bool:
        taken.append((data, events))
        return True

    read = [piece async for piece in made(Answer(), ResponseSummary(lambda: 0.0)).stream(take)]

    assert read == [(b"a", [TextDelta("a")]), (None, [StreamEnd()])]
    assert taken == [(b"b", [TextDelta("b")])]
