"""The requests of a step are summed up whatever the rows hold."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from gateway.config.schema import (
    CompareGuardrailsConfig,
    DecreaseConfig,
    GuardrailsConfig,
    IncreaseConfig,
    RolloutConfig,
    RolloutStepConfig,
)
from gateway.evidence.quantiles import count_times
from gateway.evidence.rollout import RolloutState, StepSamples, check_guardrails, decide
from gateway.evidence.rollout_sqlite import SqliteRolloutStore
from gateway.evidence.sequential import Tally
from gateway.observability.record import Feedback, FeedbackKind, RequestRecord
from gateway.observability.usage import SqliteUsageRecorder

NOW: Final = 1_700_000_000.0
LIMIT: Final = IncreaseConfig(max_increase=0.01)
SHARE: Final = DecreaseConfig(max_decrease=0.01)
PLAN: Final = RolloutConfig(
    to="2",
    steps=(50, 100),
    step_at_least=RolloutStepConfig(requests=100, time=600),
    guardrails=GuardrailsConfig(
        errors=LIMIT,
        first_token_p50=LIMIT,
        duration_p95=LIMIT,
        feedback={"up": SHARE},
        compare=CompareGuardrailsConfig(json_valid=SHARE),
    ),
)
STEP: Final = RolloutState(step_at=NOW)


def build_record(number: int, version: str, **fields: Any) -> RequestRecord:
    record = RequestRecord(f"r{number}", NOW + number, "openai", model="chat", version=version)
    return replace(record, **{"split": "chat", "outcome": "ok", **fields})


def build_feedback(request: str, value: float | None, at: float = NOW) -> Feedback:
    kind: FeedbackKind = "category" if value is None else "boolean"
    return Feedback(at, "", False, "id", request, "up", kind, value)


def write(file: Path, items: Sequence[RequestRecord | Feedback]) -> SqliteUsageRecorder:
    recorder = SqliteUsageRecorder(str(file), 1e12, lambda: NOW, feedback=True)
    for one in items:
        if isinstance(one, Feedback):
            recorder.record_feedback(one)
        else:
            recorder.record_usage(one)
    recorder.start()
    recorder.close(30)
    return recorder


def read(file: Path, state: RolloutState = STEP) -> StepSamples:
    return SqliteRolloutStore(str(file)).read_samples(PLAN, "chat", "chat", state)


def test_version_without_requests_breaches_and_proves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "u.sqlite"
    write(file, [build_record(n, "1", first_token=0.1) for n in range(50)])
    samples = read(file)
    assert (samples.errors, samples.requests) == ((Tally(0, 50), Tally(0, 0)), 0)
    results = check_guardrails(PLAN, samples)
    assert [one.verdict for one in results] == ["holds"] * 5
    assert decide(PLAN, STEP, samples, NOW + 9999) == STEP


@pytest.mark.parametrize(
    ("fields", "is_failed"),
    [
        ({"outcome": "client_error", "error": "InvalidParameter"}, True),
        ({"outcome": "client_error", "error": "RateLimitExceeded"}, True),
        ({"outcome": "cancelled"}, True),
        ({"outcome": "cancelled", "first_token": 0.1}, False),
        ({"outcome": "ok"}, False),
    ],
    ids=["refused", "refused by a busy worker", "hung", "cancelled in the text", "answered"],
)
@pytest.mark.parametrize("is_copy", [False, True])
def test_version_that_refuses_or_hangs_breaches_the_guardrail_of_errors(
    tmp_path: Path, fields: dict[str, Any], *, is_failed: bool, is_copy: bool
) -> None:
    file = tmp_path / "u.sqlite"
    copy = {"shadow_of": "r0", "split": ""} if is_copy else {}
    new = [build_record(n, "2", **fields, **copy) for n in range(100)]
    write(file, [*new, *(build_record(n, "1") for n in range(100, 200))])
    state = replace(STEP, step=-is_copy)
    samples = read(file, state)
    assert samples.errors == (Tally(0, 100), Tally(100 * is_failed, 100))
    assert check_guardrails(PLAN, samples)[0].is_breached is is_failed


def test_requests_that_a_limit_refuses_count_for_no_version(tmp_path: Path) -> None:
    """Their rows have no split; while copies decide, requests without a split count else."""
    file = tmp_path / "u.sqlite"
    limited = {"split": "", "outcome": "client_error", "error": "RateLimitExceeded"}
    write(file, [build_record(n, "12"[n % 2], **limited) for n in range(40)])
    for step in (0, -1):
        assert read(file, replace(STEP, step=step)).errors == (Tally(0, 0), Tally(0, 0))


def test_user_with_most_of_the_traffic_judges_once(tmp_path: Path) -> None:
    """Of 100 requests 90 are of one user, who dislikes version 2 each time; ten others like it."""
    file = tmp_path / "u.sqlite"
    items: list[RequestRecord | Feedback] = []
    for n in range(100):
        items.append(build_record(n, "2", user_hash="one" if n < 90 else f"u{n}"))
        items.append(build_feedback(f"r{n}", float(n >= 90), NOW + n))
    write(file, items)
    assert read(file).feedback == {"up": (Tally(0, 0), Tally(10, 11))}


def test_requests_from_before_the_step_do_not_count_when_the_clock_goes_back(
    tmp_path: Path,
) -> None:
    """The clock is an hour back: new requests are before the step, until the hour is over."""
    file = tmp_path / "u.sqlite"
    write(file, [build_record(n - 3600, "2", outcome="worker_error") for n in range(300)])
    samples = read(file)
    assert samples.requests == 0
    assert decide(PLAN, STEP, samples, NOW - 3000) == STEP


def test_feedback_without_its_request_and_without_a_number_does_not_count(tmp_path: Path) -> None:
    """A judgement of an unknown request is dropped; one that outlives its request is not joined."""
    file = tmp_path / "u.sqlite"
    items: list[RequestRecord | Feedback] = [
        build_record(0, "2"),
        build_record(1, "1"),
        build_record(2, "2"),
        build_feedback("unknown", 0.0),
        build_feedback("r0", None),
        build_feedback("r1", 1.0),
        build_feedback("r2", 0.0),
    ]

    assert write(file, items).count_dropped() == 1

    with closing(sqlite3.connect(file)) as database, database:
        database.execute("DELETE FROM usage WHERE id = 'r2'")

    assert read(file).feedback == {"up": (Tally(1, 1), Tally(0, 0))}


@pytest.mark.parametrize("first_token", [None, -1.0, 0.0, 1e-9, 1e9])
def test_odd_times_are_left_out_or_counted_in_a_bin(
    tmp_path: Path, first_token: float | None
) -> None:
    """Those of failed requests and of fallbacks are no times of the version."""
    file = tmp_path / "u.sqlite"
    fallen = build_record(3, "1", fallback_from="chat@2", failed_attempts=["chat@2 WorkerError"])
    write(
        file,
        [
            build_record(0, "2", first_token=first_token, duration=2.0),
            build_record(1, "2", duration=3.0, outcome="worker_error"),
            replace(fallen, first_token=0.5, duration=4.0),
        ],
    )
    times = [first_token] if first_token is not None and first_token >= 0 else []
    samples = read(file)
    assert samples.numbers == {
        "first_token": ({}, count_times(times)),
        "duration": ({}, count_times([2.0])),
    }
    assert samples.errors == (Tally(0, 0), Tally(2, 3))


def test_copies_count_for_the_version_only_before_the_first_step(tmp_path: Path) -> None:
    file = tmp_path / "u.sqlite"
    copies = [build_record(n, "2", shadow_of=f"r{n + 50}", split="") for n in range(50)]
    write(file, [*copies, *(build_record(n, "1") for n in range(50, 90))])
    assert read(file).errors == (Tally(0, 40), Tally(0, 0))
    shadow = read(file, RolloutState(step=-1, step_at=NOW))
    assert shadow.errors == (Tally(0, 40), Tally(0, 50))


def test_measures_are_counted_of_the_responses_to_which_they_apply(tmp_path: Path) -> None:
    file = tmp_path / "u.sqlite"
    write(
        file,
        [
            build_record(0, "2", measures={"json_valid": True}),
            build_record(1, "2", measures={"json_valid": False, "not_empty": True}),
            build_record(2, "2", measures={"not_empty": False}),
            build_record(3, "1"),
        ],
    )
    assert read(file).compare == {"json_valid": (Tally(0, 0), Tally(1, 2))}
