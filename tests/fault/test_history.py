"""The history checker finds each kind of violation, and none in a correct history."""

import pytest

from gateway.observability.record import RequestOutcome, RequestRecord
from protocols.core.events import Usage
from tests.fault.history import ClientObservation, History, ObservedEnd, WorkerLogLine


def build_observation(
    id_: str = "a",
    end: ObservedEnd = "complete",
    status: int = 200,
    tokens: int = 2,
    *,
    stream: bool = True,
) -> ClientObservation:
    return ClientObservation(id_, "openai", stream, end, status, 10, tuple(range(tokens)))


def build_record(
    id_: str = "a", outcome: RequestOutcome = "ok", status: int = 200, tokens: int = 2
) -> RequestRecord:
    return RequestRecord(id_, outcome=outcome, status=status, tokens=tokens)


def build_log_lines(id_: str = "a", end: str = "completed", tokens: int = 2) -> list[WorkerLogLine]:
    return [WorkerLogLine(id_, "received"), WorkerLogLine(id_, end, tokens)]  # type: ignore[arg-type]


WELL: dict[str, History] = {
    "nothing": History([], [], []),
    "complete": History([build_observation()], [build_record()], build_log_lines()),
    "complete after another worker failed": History(
        [build_observation()],
        [build_record()],
        [*build_log_lines(end="cancelled", tokens=0), *build_log_lines()],
    ),
    "refused": History(
        [build_observation("a", "error", 429, 0)], [build_record("a", "client_error", 429, 0)], []
    ),
    "too busy": History(
        [build_observation("a", "error", 503, 0)], [build_record("a", "gateway_error", 503, 0)], []
    ),
    "failed": History(
        [build_observation("a", "error", 502, 0)],
        [build_record("a", "worker_error", 502, 0)],
        build_log_lines(end="cancelled", tokens=0),
    ),
    "truncated": History(
        [build_observation("a", "error event", 200, 1)],
        [build_record("a", "truncated", 200, 1)],
        build_log_lines(end="cancelled"),
    ),
    "left": History(
        [build_observation("a", "left", 200, 1)],
        [build_record("a", "cancelled", 200, 2)],
        build_log_lines(end="cancelled", tokens=3),
    ),
    "left before anything came": History(
        [build_observation("a", "left", 0, 0)], [build_record("a", "cancelled", 0, 0)], []
    ),
    "left at the end": History(
        [build_observation("a", "left", 200, 1)], [build_record()], build_log_lines()
    ),
    "whole": History(
        [build_observation(stream=False)],
        [RequestRecord("a", status=200, usage=Usage(prompt_tokens=1, completion_tokens=2))],
        build_log_lines(),
    ),
}


@pytest.mark.parametrize("history", WELL.values(), ids=WELL)
def test_consistent_history_has_no_violations(history: History) -> None:
    assert history.violations() == []
    assert sum(history.ends().values()) == len(history.observations)


GARBLED = ClientObservation("a", "openai", True, "complete", 200, 10, (0, 2))
ODD: dict[str, History] = {
    "sent twice": History(
        [build_observation(), build_observation()], [build_record()], build_log_lines()
    ),
    "recorded twice": History(
        [build_observation()], [build_record(), build_record()], build_log_lines()
    ),
    "not recorded": History([build_observation()], [], build_log_lines()),
    "not asked": History([], [build_record(tokens=0)], []),
    "cut": History(
        [build_observation("a", "cut")],
        [build_record("a", "truncated")],
        build_log_lines(end="cancelled"),
    ),
    "ends differ": History(
        [build_observation("a", "complete")], [build_record("a", "truncated")], build_log_lines()
    ),
    "statuses differ": History(
        [build_observation("a", "error", 400, 0)], [build_record("a", "client_error", 429, 0)], []
    ),
    "a call for nobody": History([], [], build_log_lines()),
    "a call without an end": History(
        [build_observation()],
        [build_record()],
        [*build_log_lines(), WorkerLogLine("a", "received")],
    ),
    "a call that ended twice": History(
        [build_observation()],
        [build_record()],
        [*build_log_lines(), WorkerLogLine("a", "cancelled", 1)],
    ),
    "answered twice": History(
        [build_observation()], [build_record()], build_log_lines() + build_log_lines()
    ),
    "made up": History([build_observation()], [build_record()], build_log_lines(end="cancelled")),
    "garbled": History([GARBLED], [build_record()], build_log_lines()),
    "tokens differ": History(
        [build_observation()], [build_record(tokens=1)], build_log_lines(tokens=1)
    ),
    "tokens made up": History(
        [build_observation(tokens=3)], [build_record(tokens=3)], build_log_lines()
    ),
    "tokens lost": History(
        [build_observation(tokens=1)], [build_record(tokens=1)], build_log_lines()
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_each_kind_of_violation_is_found(kind: str) -> None:
    assert [one.kind for one in ODD[kind].violations()] == [kind]


LIES: list[tuple[ObservedEnd, RequestOutcome]] = [
    ("complete", "cancelled"),
    ("complete", "worker_error"),
    ("error", "ok"),
    ("error", "truncated"),
    ("error event", "ok"),
    ("error event", "worker_error"),
    ("left", "client_error"),
]


@pytest.mark.parametrize(("end", "outcome"), LIES)
def test_different_outcomes_of_client_and_gateway_are_a_violation(
    end: ObservedEnd, outcome: RequestOutcome
) -> None:
    history = History(
        [build_observation("a", end)], [build_record("a", outcome)], build_log_lines()
    )

    assert "ends differ" in [one.kind for one in history.violations()]
    assert history.ends() == {}


def test_tokens_after_client_disconnect_must_not_exceed_recorded_tokens() -> None:
    left = build_observation("a", "left", 200, 3)

    history = History(
        [left], [build_record("a", "cancelled", 200, 2)], build_log_lines(end="cancelled")
    )

    assert [one.kind for one in history.violations()] == ["tokens differ"]
