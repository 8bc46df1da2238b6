"""A guarded rollout ends a step when it is long enough, and goes back at a breach."""

import random
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from gateway.config.schema import (
    DecreaseConfig,
    GuardrailsConfig,
    IncreaseConfig,
    RolloutConfig,
    RolloutStepConfig,
)
from gateway.evidence.quantiles import count_times
from gateway.evidence.rollout import (
    RolloutState,
    StepSamples,
    apply_command,
    check_guardrails,
    compute_share,
    compute_weights,
    decide,
    hash_plan,
)
from gateway.evidence.rollout_sqlite import SqliteRolloutStore
from gateway.evidence.sequential import Tally

PLAN = RolloutConfig(
    to="2",
    steps=(1, 25, 100),
    step_at_least=RolloutStepConfig(requests=200, time=600),
    step_at_most=3600,
    guardrails=GuardrailsConfig(
        errors=IncreaseConfig(max_increase=0.01),
        first_token_p95=IncreaseConfig(max_increase=0.2),
        feedback={"thumbs_up": DecreaseConfig(max_decrease=0.02)},
    ),
)
START = RolloutState(step_at=1000.0)
NO_TALLY = Tally(0, 0)
OLD_HASH = "35ec1b41d6a32dca"
"""The hash of ``PLAN`` before plans could start with shadow traffic."""


def make_samples(
    *, count: int = 300, failed: int = 0, first_token: float = 0.1, likes: float = 0.9
) -> StepSamples:
    """Build samples of version 2, and 10,000 of version 1 with 0.1 s and 90 % thumbs up."""
    times = [0.1 + 0.00001 * k for k in range(10_000)]
    return StepSamples(
        (Tally(10, 10_000), Tally(failed, count)),
        {
            "first_token": (
                count_times(times),
                count_times([first_token + 0.0001 * k for k in range(count)]),
            )
        },
        {"thumbs_up": (Tally(9000, 10_000), Tally(round(likes * count), count))},
    )


@pytest.mark.parametrize(
    ("samples", "after", "phase", "step"),
    [
        (make_samples(), 601, "running", 1),
        (make_samples(), 599, "running", 0),
        (make_samples(count=199), 601, "running", 0),
        (make_samples(count=199), 3601, "holding", 0),
        (make_samples(failed=40), 1, "rolled back", 0),
        (make_samples(first_token=0.4), 1, "rolled back", 0),
        (make_samples(likes=0.7), 1, "rolled back", 0),
    ],
)
def test_step_ends_when_it_is_long_enough_and_a_breach_goes_back_at_once(
    samples: StepSamples, after: float, phase: str, step: int
) -> None:
    state = decide(PLAN, START, samples, START.step_at + after)
    assert (state.phase, state.step) == (phase, step)
    assert bool(state.reason) == (phase != "running")


@pytest.mark.parametrize("seed", range(5))
def test_version_twice_as_slow_goes_back_by_the_median_within_400_requests(seed: int) -> None:
    """Half of the requests go to it; three guardrails in three steps share the risk."""
    rng = random.Random(seed)
    a, b = ([factor * rng.lognormvariate(-2, 0.5) for _ in range(200)] for factor in (1, 2))
    guardrails = msgspec.structs.replace(
        PLAN.guardrails, first_token_p95=None, first_token_p50=IncreaseConfig(max_increase=0.2)
    )
    samples = make_samples(count=200)
    samples.numbers = {"first_token": (count_times(a), count_times(b))}
    state = decide(msgspec.structs.replace(PLAN, guardrails=guardrails), START, samples, 1001)
    assert state.phase == "rolled back"
    assert state.reason.startswith("first_token_p50: 1")
    assert state.reason.endswith("20% more is allowed, after 200 requests")


def test_breach_names_the_guardrail_and_the_requests_that_it_took() -> None:
    state = decide(PLAN, START, make_samples(failed=40), 1001)
    assert state.reason.startswith("errors: 0.1% → 13.3%: at least ")
    assert state.reason.endswith("higher, 1.0% allowed, after 300 requests")


def test_step_that_goes_on_without_values_of_a_guardrail_says_so() -> None:
    samples = msgspec.structs.replace(make_samples(), feedback={"thumbs_up": (NO_TALLY, NO_TALLY)})
    text = "the step before had no values of feedback thumbs_up"
    second = decide(PLAN, START, samples, 1601)
    assert second == RolloutState("running", 1, 1601.0, text)
    completed = decide(PLAN, second, samples, 2202)
    assert completed == RolloutState("completed", 2, 2202.0, f"all steps are done; {text}")


def test_proof_is_waited_for_if_it_is_required() -> None:
    plan = msgspec.structs.replace(PLAN, require="proof")
    assert decide(plan, START, make_samples(), 1601).step == 0
    assert decide(plan, START, make_samples(), 4601).reason == "no proof within step_at_most"
    results = check_guardrails(plan, make_samples(count=20_000, first_token=0.01, likes=0.92))
    assert [result.is_proven for result in results] == [True, False, True]


def test_breach_may_hold_instead_until_an_operator_lets_it_go_on() -> None:
    plan = msgspec.structs.replace(PLAN, on_breach="hold")
    held = decide(plan, START, make_samples(failed=40), 1001)
    assert held.phase == "holding"
    assert decide(plan, held, make_samples(), 1601) == held
    resumed = apply_command(plan, held, "resume", 1601)
    assert decide(plan, resumed, make_samples(), 2202).step == 1
    assert apply_command(plan, held, "promote", 1601) == RolloutState("running", 1, 1601.0)


def test_step_that_lasts_too_long_holds_with_its_first_reason_until_it_may_go_on() -> None:
    held = decide(PLAN, START, make_samples(count=100), 4601)
    assert (held.phase, held.reason) == ("holding", "100 requests within step_at_most")
    assert decide(PLAN, held, make_samples(count=101), 4611) == held
    assert decide(PLAN, held, make_samples(failed=40), 4611).phase == "rolled back"
    assert decide(PLAN, held, make_samples(count=200), 4621) == RolloutState("running", 1, 4621.0)


def test_guardrail_without_requests_is_neither_breached_nor_proven() -> None:
    samples = StepSamples(
        (NO_TALLY, NO_TALLY), {"first_token": ({}, {})}, {"thumbs_up": (NO_TALLY, NO_TALLY)}
    )
    results = check_guardrails(PLAN, samples)
    assert not any(result.is_breached or result.is_proven for result in results)
    assert {result.text for result in results} == {"no values yet"}


def test_step_waits_for_values_of_the_version_that_the_others_have() -> None:
    """A version of which no response begins has no times that could be compared."""
    silent = make_samples()
    silent.numbers = {"first_token": (silent.numbers["first_token"][0], {})}
    assert decide(PLAN, START, silent, 1601) == START
    rail = check_guardrails(PLAN, silent)[1]
    assert rail.text == "no values of the version yet, the step waits"
    held = decide(PLAN, START, silent, 1000 + 3601)
    assert (held.phase, held.reason) == (
        "holding", "no values of first_token_p95 within step_at_most",
    )  # fmt: skip
    assert decide(PLAN, held, make_samples(), 1000 + 3602).step == 1


@pytest.mark.parametrize(
    ("state", "weights"),
    [
        (START, {"1": 198, "3": 99, "2": 3}),
        (RolloutState(step=1), {"1": 150, "3": 75, "2": 75}),
        (RolloutState("rolled back", 1), {"1": 200, "3": 100, "2": 0}),
        (RolloutState("completed", 2), {"1": 0, "3": 0, "2": 300}),
        (RolloutState("paused", 1), {"1": 150, "3": 75, "2": 75}),
    ],
)
def test_weights_of_the_others_keep_their_ratio(
    state: RolloutState, weights: dict[str, int]
) -> None:
    assert compute_weights(PLAN, {"1": 2, "2": 0, "3": 1}, state) == weights


def test_operator_commands_change_the_phase() -> None:
    assert apply_command(PLAN, START, "pause", 5).phase == "paused"
    assert decide(PLAN, apply_command(PLAN, START, "pause", 5), make_samples(), 9999).step == 0
    assert apply_command(PLAN, START, "resume", 5) == RolloutState("running", 0, 5.0)
    assert apply_command(PLAN, START, "abort", 5).phase == "rolled back"
    assert apply_command(PLAN, START, "promote", 5) == RolloutState("running", 1, 5.0)
    assert apply_command(PLAN, RolloutState(step=1), "promote", 5).phase == "completed"


@pytest.mark.parametrize(
    ("steps", "starts_with", "step"),
    [((1, 25, 100), "split", 1), ((100,), "shadow", -1), ((100,), "split", None)],
)
def test_rollout_aborted_at_100_percent_resumes_at_the_step_before(
    steps: tuple[int, ...], starts_with: Literal["split", "shadow"], step: int | None
) -> None:
    """At 100 % no version is left to compare with; without a step before, nothing changes."""
    plan = msgspec.structs.replace(PLAN, steps=steps, start_with=starts_with)
    aborted = apply_command(plan, RolloutState("completed", len(steps) - 1, 9.0), "abort", 10)
    resumed = apply_command(plan, aborted, "resume", 20)
    assert resumed == (aborted if step is None else RolloutState("running", step, 20.0))


def test_breach_goes_back_also_in_a_pause() -> None:
    paused = apply_command(PLAN, START, "pause", 1100)
    assert decide(PLAN, paused, make_samples(), 99_999) == paused
    breached = decide(PLAN, paused, make_samples(failed=40), 1200)
    assert (breached.phase, breached.step) == ("rolled back", 0)


def test_last_step_below_100_percent_is_held_and_still_guarded() -> None:
    plan = msgspec.structs.replace(PLAN, steps=(10, 25))
    last = RolloutState("running", 1, 1000.0)
    held = decide(plan, last, make_samples(), 1601)
    assert held == RolloutState("holding", 1, 1000.0, "held at the last step")
    assert compute_weights(plan, {"1": 1, "2": 1}, held) == {"1": 75, "2": 25}
    assert decide(plan, held, make_samples(), 99_999) == held
    assert apply_command(plan, held, "promote", 2000) == held
    assert decide(plan, held, make_samples(failed=40), 2000).phase == "rolled back"


@pytest.mark.parametrize("steps", [(1,), (10, 25), (1, 5, 25, 100), (100,), (50, 99)])
def test_share_never_exceeds_the_last_step(steps: tuple[int, ...]) -> None:
    plan = msgspec.structs.replace(PLAN, steps=steps)
    state, shares = START, list[int]()
    for n in range(len(steps) + 2):
        shares.append(compute_share(plan, state))
        state = apply_command(plan, state, "promote", n)
    assert sorted({*shares}) == [*steps]


def test_version_gets_nothing_while_the_state_is_unknown() -> None:
    assert compute_weights(PLAN, {"1": 1, "2": 1}, None) == {"1": 100, "2": 0}


def test_proof_from_copies_of_requests_does_not_wait_for_feedback() -> None:
    """No user judges a copy; in the first step of the split, feedback must be proven, too."""
    plan = msgspec.structs.replace(
        PLAN,
        start_with="shadow",
        require="proof",
        guardrails=GuardrailsConfig(
            errors=IncreaseConfig(max_increase=0.01),
            feedback={"thumbs_up": DecreaseConfig(max_decrease=0.02)},
        ),
    )
    samples = make_samples(count=20_000)
    samples.feedback = {"thumbs_up": (NO_TALLY, NO_TALLY)}
    shadow = RolloutState(step=-1, step_at=1000.0)
    assert decide(plan, shadow, samples, 1601) == RolloutState("running", 0, 1601.0)
    assert decide(plan, START, samples, 1601) == START
    assert [one.name for one in check_guardrails(plan, samples, is_shadow=True)] == ["errors"]


def test_plan_that_starts_with_the_split_has_the_hash_that_older_versions_stored() -> None:
    """An upgrade goes on with a rollout; one that starts with copies is another plan."""
    assert hash_plan(PLAN) == OLD_HASH
    assert hash_plan(msgspec.structs.replace(PLAN, start_with="shadow")) != OLD_HASH


def test_lease_from_before_a_clock_went_back_does_not_last_longer_than_twice_its_length(
    tmp_path: Path,
) -> None:
    store = SqliteRolloutStore(str(tmp_path / "u.sqlite"))
    store.load("chat", "plan", 5000)
    assert store.take_lease("chat", "plan", "a", 5000, 30)
    assert not store.take_lease("chat", "plan", "b", 4970, 30)
    assert store.take_lease("chat", "plan", "b", 1400, 30)


def test_state_that_a_store_has_lost_is_written_as_it_was_read_before(tmp_path: Path) -> None:
    store = SqliteRolloutStore(str(tmp_path / "u.sqlite"))
    old = RolloutState("rolled back", 1, 50.0, "errors")
    assert store.load("chat", "plan", 100, last_read=old) == old
    assert store.load("chat", "plan", 200, last_read=START) == old


def test_one_process_decides_and_another_follows_when_its_lease_has_run_out(
    tmp_path: Path,
) -> None:
    store, other = (SqliteRolloutStore(str(tmp_path / "u.sqlite")) for _ in range(2))
    plan = hash_plan(PLAN)
    assert not store.take_lease("chat", plan, "a", 0, 30)
    state = store.load("chat", plan, 100)
    assert other.load("chat", plan, 200) == state == RolloutState(step_at=100)
    assert store.take_lease("chat", plan, "a", 1000, 30)
    assert not other.take_lease("chat", plan, "b", 1020, 30)
    assert store.take_lease("chat", plan, "a", 1020, 30)
    assert not other.take_lease("chat", plan, "b", 1040, 30)
    assert other.take_lease("chat", plan, "b", 1051, 30)


def test_decision_on_an_old_state_is_dropped(tmp_path: Path) -> None:
    store = SqliteRolloutStore(str(tmp_path / "u.sqlite"))
    state = store.load("chat", "plan", 100)
    paused = apply_command(PLAN, state, "pause", 101)
    assert store.save("chat", "plan", state, paused)
    assert not store.save("chat", "plan", state, decide(PLAN, state, make_samples(), 9999))
    assert store.load("chat", "plan", 102) == paused


def test_another_plan_begins_anew_and_changes_nothing_of_the_first(tmp_path: Path) -> None:
    store = SqliteRolloutStore(str(tmp_path / "u.sqlite"))
    state = store.load("chat", "plan", 100)
    aborted = apply_command(PLAN, state, "abort", 101)
    assert store.save("chat", "plan", state, aborted)
    assert store.load("chat", "other", 103) == RolloutState(step_at=103)
    assert store.take_lease("chat", "other", "b", 104, 30)
    assert store.load("chat", "plan", 105) == aborted
    assert store.take_lease("chat", "plan", "a", 105, 30)


def test_reading_a_rollout_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "u.sqlite"
    store = SqliteRolloutStore(str(file))
    assert store.read("chat", "plan") is None
    assert not file.exists()
    state = store.load("chat", "plan", 100)
    before = file.read_bytes()
    assert store.read("chat", "plan") == state
    assert store.read("chat", "other") is None
    assert file.read_bytes() == before
