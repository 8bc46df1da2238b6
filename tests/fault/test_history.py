"""The history checker finds each thing that may not be, and nothing where all is well."""

import pytest

from gateway.observability.record import RequestOutcome, RequestRecord
from protocols.core.events import Usage
from tests.fault.history import Heard, History, Line, Seen


def heard(
    id_: str = "a",
    seen: Seen = "complete",
    status: int = 200,
    tokens: int = 2,
    *,
    stream: bool = True,
) -> Heard:
    return Heard(id_, "openai", stream, seen, status, 10, tuple(range(tokens)))


def record(
    id_: str = "a", outcome: RequestOutcome = "ok", status: int = 200, tokens: int = 2
) -> RequestRecord:
    return RequestRecord(id_, outcome=outcome, status=status, tokens=tokens)


def call(id_: str = "a", end: str = "completed", tokens: int = 2) -> list[Line]:
    return [Line(id_, "asked"), Line(id_, end, tokens)]  # type: ignore[arg-type]


WELL: dict[str, History] = {
    "nothing": History([], [], []),
    "complete": History([heard()], [record()], call()),
    "complete after another worker failed": History(
        [heard()], [record()], [*call(end="cancelled", tokens=0), *call()]
    ),
    "refused": History([heard("a", "error", 429, 0)], [record("a", "client_error", 429, 0)], []),
    "too busy": History([heard("a", "error", 503, 0)], [record("a", "gateway_error", 503, 0)], []),
    "failed": History(
        [heard("a", "error", 502, 0)],
        [record("a", "worker_error", 502, 0)],
        call(end="cancelled", tokens=0),
    ),
    "truncated": History(
        [heard("a", "told", 200, 1)], [record("a", "truncated", 200, 1)], call(end="cancelled")
    ),
    "left": History(
        [heard("a", "left", 200, 1)],
        [record("a", "cancelled", 200, 2)],
        call(end="cancelled", tokens=3),
    ),
    "left before anything came": History(
        [heard("a", "left", 0, 0)], [record("a", "cancelled", 0, 0)], []
    ),
    "left at the end": History([heard("a", "left", 200, 1)], [record()], call()),
    "whole": History(
        [heard(stream=False)],
        [RequestRecord("a", status=200, usage=Usage(prompt_tokens=1, completion_tokens=2))],
        call(),
    ),
}


@pytest.mark.parametrize("history", WELL.values(), ids=WELL)
def test_what_fits_is_no_violation(history: History) -> None:
    assert history.violations() == []
    assert sum(history.ends().values()) == len(history.heard)


GARBLED = Heard("a", "openai", True, "complete", 200, 10, (0, 2))
ODD: dict[str, History] = {
    "sent twice": History([heard(), heard()], [record()], call()),
    "recorded twice": History([heard()], [record(), record()], call()),
    "not recorded": History([heard()], [], call()),
    "not asked": History([], [record(tokens=0)], []),
    "cut": History([heard("a", "cut")], [record("a", "truncated")], call(end="cancelled")),
    "ends differ": History([heard("a", "complete")], [record("a", "truncated")], call()),
    "statuses differ": History(
        [heard("a", "error", 400, 0)], [record("a", "client_error", 429, 0)], []
    ),
    "a call for nobody": History([], [], call()),
    "a call without an end": History([heard()], [record()], [*call(), Line("a", "asked")]),
    "a call that ended twice": History([heard()], [record()], [*call(), Line("a", "cancelled", 1)]),
    "answered twice": History([heard()], [record()], call() + call()),
    "made up": History([heard()], [record()], call(end="cancelled")),
    "garbled": History([GARBLED], [record()], call()),
    "tokens differ": History([heard()], [record(tokens=1)], call(tokens=1)),
    "tokens made up": History([heard(tokens=3)], [record(tokens=3)], call()),
    "tokens lost": History([heard(tokens=1)], [record(tokens=1)], call()),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_does_not_fit_is_found_by_its_name(kind: str) -> None:
    assert [one.kind for one in ODD[kind].violations()] == [kind]


LIES: list[tuple[Seen, RequestOutcome]] = [
    ("complete", "cancelled"),
    ("complete", "worker_error"),
    ("error", "ok"),
    ("error", "truncated"),
    ("told", "ok"),
    ("told", "worker_error"),
    ("left", "client_error"),
]


@pytest.mark.parametrize(("seen", "outcome"), LIES)
def test_ends_of_which_the_two_sides_differ_are_found(seen: Seen, outcome: RequestOutcome) -> None:
    history = History([heard("a", seen)], [record("a", outcome)], call())

    assert "ends differ" in [one.kind for one in history.violations()]
    assert history.ends() == {}


def test_a_client_that_left_was_given_no_more_than_was_recorded() -> None:
    left = heard("a", "left", 200, 3)

    history = History([left], [record("a", "cancelled", 200, 2)], call(end="cancelled"))

    assert [one.kind for one in history.violations()] == ["tokens differ"]
