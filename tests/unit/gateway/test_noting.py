"""What an answer comes to, by a clock that the test moves."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from gateway.core.ports import Take
from gateway.core.types import (
    CallArguments,
    CallStart,
    Done,
    End,
    Event,
    PromptEcho,
    Refusal,
    Start,
    Text,
    Thought,
    Usage,
    Vector,
)
from gateway.noting import Arm, Noted, Overheard
from tests.fakes import FakeClock


def noted(*events: Event) -> Noted:
    one = Noted(lambda: 0.0)
    one.add_events(events)
    return one


def arm(one: Noted) -> Arm:
    return one.build_side(("chat", "2"), ("ok", ""))


def test_an_answer_in_figures() -> None:
    clock = FakeClock()
    one = Noted(clock)
    clock.now += 1
    one.add_events([Start(3), PromptEcho(0, "before")])
    clock.now += 1
    one.add_events([Text("two ", 1), Text("one", 0)])
    clock.now += 1
    one.add_events([Text(" words", 1, tokens=2), End("length", 1), End("eos", 0), Done()])

    expected = Arm("chat", "2", "ok", "", ("eos", "length"), 4, 13, 2.0, 3.0)
    assert arm(one) == expected
    one.add_events([Usage(3, 9)])
    assert arm(one).tokens == 9
    assert one.build_side(("c", "1"), ("worker_error", "StreamBroken")).error == "StreamBroken"


def test_a_new_try_begins_anew() -> None:
    clock = FakeClock()
    one = Noted(clock)
    one.add_events([Text("half"), Usage(1, 1), End("eos")])
    clock.now += 5
    one.start()
    clock.now += 1

    assert arm(one) == Arm("chat", "2", duration=1.0)
    assert one.has_same_content(noted())


@pytest.mark.parametrize("event", [Text("a"), Thought("a"), Vector(0, (1.0,)), Refusal("a")])
def test_whatever_is_said_is_the_first_of_it(event: Event) -> None:
    assert arm(noted(event)).first_token == 0.0
    assert arm(noted(Start(1), Usage(1), Done())).first_token is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([Text("ab"), Text("c")], [Text("a"), Text("bc")], True),
        ([Text("abc")], [Text("abd")], False),
        ([Text("abc")], [Text("abc", 1)], False),
        ([Text("a"), Text("b", 1)], [Text("b", 1), Text("a")], True),
        ([Text("abc")], [Text("abc"), Thought("hm")], True),
        ([Text("abc")], [], False),
        ([CallStart(0, 0, "x", "f"), CallArguments(0, 0, "{}")],
         [CallStart(0, 0, "y", "f"), CallArguments(0, 0, "{"), CallArguments(0, 0, "}")], True),
        ([CallStart(0, 0, "x", "f")], [CallStart(0, 0, "x", "g")], False),
        ([CallStart(0, 0, "x", "f")], [Text("f")], False),
        ([Text("\ud800")], [Text("\ud800")], True),
    ],
)  # fmt: skip
def test_two_answers_are_the_same_by_their_words(
    one: list[Event], other: list[Event], *, same: bool
) -> None:
    assert noted(*one).has_same_content(noted(*other)) is same


@pytest.mark.parametrize(
    ("events", "complete"),
    [
        ([Text("a"), End("eos"), Done()], True),
        ([Text("a"), End("eos")], False),
        ([Text("a"), Done()], False),
        ([Thought("a"), Done()], False),
        ([CallStart(1, 0, "x", "f"), End("eos"), Done()], False),
        ([End("eos"), End("eos", 1), Done()], True),
        ([Vector(0, (1.0,)), Done()], True),
    ],
)
def test_an_answer_is_complete_when_each_choice_is(events: list[Event], *, complete: bool) -> None:
    assert noted(*events).is_complete is complete


class Answer:
    """An answer of two batches."""

    losses = ()
    request = None

    def __init__(self) -> None:
        self.closed = False

    def encoder(self) -> str:
        return "encoder"

    def opening(self) -> str:
        return "opening"

    def heard(self, events: Sequence[Event]) -> Sequence[Event]:
        return [*events, Usage(0, len(events))]

    def whole(self, *given: object) -> tuple[object, ...]:
        return given

    async def pieces(
        self, take: Take | None = None
    ) -> AsyncGenerator[tuple[bytes | None, Sequence[Event]], None]:
        try:
            yield b"a", [Text("a")]
            if take is not None:
                take(b"b", [Text("b")])
            yield None, [Done()]
        finally:
            self.closed = True


async def test_an_answer_passes_as_it_is() -> None:
    noted, answer = Noted(lambda: 0.0), Answer()
    made: Any = Overheard
    heard = made(answer, noted)
    pieces = heard.stream()

    assert await anext(pieces) == (b"a", [Text("a")])
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
    noted = Noted(lambda: 0.0)
    made: Any = Overheard
    overheard = made(Answer(), noted)

    overheard.stream()

    assert overheard.process_events([Text("a")]) == [Text("a"), Usage(0, 1)]
    assert arm(noted).length == 1
    assert arm(noted).tokens == 1


async def test_what_another_target_said_before_is_not() -> None:
    noted = Noted(lambda: 0.0)
    made: Any = Overheard
    overheard = made(Answer(), noted)
    overheard.process_events([Text("a")])

    overheard.stream()

    assert arm(noted).length == 0


async def test_what_is_taken_at_once_is_given_to_who_takes_it() -> None:
    made: Any = Overheard
    taken = list[tuple[bytes | None, Sequence[Event]]]()

    def take(data: bytes | None, events: Sequence[Event]) -> bool:
        taken.append((data, events))
        return True

    read = [piece async for piece in made(Answer(), Noted(lambda: 0.0)).stream(take)]

    assert read == [(b"a", [Text("a")]), (None, [Done()])]
    assert taken == [(b"b", [Text("b")])]
