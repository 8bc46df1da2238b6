"""The circuit breaker ejects and readmits a worker, with a clock that a test sets."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, field

from backends.pool.circuit_breaker import (
    HealthState,
    WorkerHealth,
    select_available,
)
from backends.pool.settings import CircuitBreakerSettings


def record_failures(health: WorkerHealth, now: float, times: int = 5) -> None:
    for _ in range(times):
        health.record_failure(now)


def get_states(health: WorkerHealth, *moments: float) -> list[HealthState]:
    return [health.get_state(now) for now in moments]


def test_new_worker_is_available_without_limits() -> None:
    health = WorkerHealth()

    assert (health.get_state(0.0), health.is_available(0.0), health.get_weight_factor(0.0)) == (
        "up",
        True,
        1.0,
    )
    assert (
        health.get_unavailable_until(0.0),
        health.get_limit("a"),
        health.get_limits(),
    ) == (None, None, {})


# ── health probes ─────────────────────────────────────────────────────────────────────────────────


def test_three_failed_health_checks_eject_and_two_successes_readmit() -> None:
    health, states = WorkerHealth(), list[bool]()
    for now, ok in enumerate([False, False, True, False, False, False, False, True, False, True]):
        health.record_health_check(now, ok)
        states.append(health.is_available(now))
    health.record_health_check(10, ok=True)

    assert states == [True] * 5 + [False] * 5
    assert get_states(health, 10, 10_000) == ["up", "up"]


def test_readmitted_worker_gets_a_slow_start() -> None:
    health = WorkerHealth()
    for now in range(3):
        health.record_health_check(now, ok=False)
    for now in (3, 4):
        health.record_health_check(now, ok=True)

    shares = [health.get_weight_factor(now) for now in (4, 5, 7, 19, 34, 99)]
    assert shares == pytest.approx([0.1, 0.1, 0.1, 0.5, 1, 1])


def test_successful_health_checks_do_not_change_a_healthy_worker() -> None:
    health = WorkerHealth()
    for now in range(5):
        health.record_health_check(now, ok=True)
        assert health.get_weight_factor(now) == 1.0


def test_only_health_checks_readmit_a_worker_ejected_by_health_checks() -> None:
    health = WorkerHealth()
    for now in range(3):
        health.record_health_check(now, ok=False)

    for now in range(3, 30):
        health.record_success(now)

    assert health.get_state(30) == "out"


def test_readmission_by_health_checks_resets_the_failure_count() -> None:
    health = WorkerHealth()
    record_failures(health, 0.0)
    record_failures(health, 0.0, times=4)
    for now in (1, 2, 3):
        health.record_health_check(now, ok=False)
    for now in (4, 5):
        health.record_health_check(now, ok=True)
    health.record_failure(5)

    assert get_states(health, 5, 20) == ["up", "up"]


def test_failures_before_an_ejection_are_not_counted_afterwards() -> None:
    health = WorkerHealth()
    record_failures(health, 0.0, times=4)
    for now in (1, 2, 3):
        health.record_health_check(now, ok=False)
    for now in (4, 5):
        health.record_health_check(now, ok=True)
    health.record_failure(6)

    assert health.get_state(6) == "up"


# ── failed requests ───────────────────────────────────────────────────────────────────────────────


def test_five_consecutive_failures_eject_the_worker_temporarily() -> None:
    health = WorkerHealth()
    record_failures(health, 0.0, times=4)
    health.record_success(0.0)
    record_failures(health, 0.0, times=4)
    assert health.get_state(0.0) == "up"

    health.record_failure(1.0)

    assert get_states(health, 1.0, 15.9, 16.0, 1e6) == ["out", "out", "trial", "trial"]
    assert (health.get_unavailable_until(2.0), health.get_unavailable_until(16.0)) == (16.0, None)


def test_success_in_half_open_state_readmits_with_slow_start() -> None:
    health = WorkerHealth()
    record_failures(health, 0.0)
    assert health.get_weight_factor(15.0) == 1.0

    health.record_success(15.0)

    assert health.get_state(15.0) == "up"
    assert [health.get_weight_factor(now) for now in (15, 30, 45)] == pytest.approx([0.1, 0.5, 1.0])


def test_failure_in_half_open_state_doubles_the_ejection_time() -> None:
    health, now, waits = WorkerHealth(), 0.0, list[float]()
    record_failures(health, now)
    for _ in range(7):
        until = health.get_unavailable_until(now)
        assert until is not None
        waits.append(until - now)
        now = until
        health.record_failure(now)

    assert waits == [15, 30, 60, 120, 240, 300, 300]


@pytest.mark.parametrize(("pause", "wait"), [(299.0, 30.0), (300.0, 15.0)])
def test_ejection_time_resets_after_a_long_healthy_period(pause: float, wait: float) -> None:
    health = WorkerHealth()
    record_failures(health, 0.0)
    health.record_success(15.0)
    now = 15.0 + pause

    record_failures(health, now)

    assert health.get_unavailable_until(now) == now + wait


def test_configured_ejection_time_may_exceed_the_maximum() -> None:
    health = WorkerHealth(breaker=CircuitBreakerSettings(open_for=600.0))
    record_failures(health, 0.0)
    health.record_failure(600.0)

    assert health.get_unavailable_until(600.0) == 1200.0


def test_failure_rate_of_half_of_at_least_twenty_requests_ejects() -> None:
    def after(good: int, bad: int, spread: float = 0.1) -> HealthState:
        health, now = WorkerHealth(), 0.0
        for n in range(good + bad):
            now = n * spread
            if (n % 2 and bad) or not good:
                bad -= 1
                health.record_failure(now)
            else:
                good -= 1
                health.record_success(now)
        return health.get_state(now)

    assert after(10, 10) == "out"
    assert after(11, 9) == "up"
    assert after(10, 9) == "up"
    assert after(10, 10, spread=0.6) == "up"


def test_failure_rate_is_reset_after_an_ejection() -> None:
    health = WorkerHealth(breaker=CircuitBreakerSettings(consecutive_failures=1000))
    for _ in range(20):
        health.record_failure(0.0)
    health.record_success(15.0)

    health.record_failure(15.0)

    assert health.get_state(15.0) == "up"


def test_in_flight_requests_do_not_extend_an_ejection() -> None:
    health = WorkerHealth()
    record_failures(health, 0.0, times=50)

    assert health.get_unavailable_until(0.0) == 15.0
    for _ in range(50):
        health.record_success(9.0)
    assert health.get_state(9.0) == "out"


def test_successes_during_an_ejection_readmit_the_worker() -> None:
    """Ejected workers get requests when every worker is ejected."""
    health = WorkerHealth()
    record_failures(health, 0.0)
    health.record_failure(15.0)
    assert health.get_unavailable_until(15.0) == 45.0

    for response in "ggggbggggg":
        (health.record_success if response == "g" else health.record_failure)(25.0)
        if response == "b":
            assert health.get_state(25.0) == "out"

    assert (health.get_state(25.0), health.get_weight_factor(25.0)) == ("up", 0.1)


def record_event(health: WorkerHealth, what: str, now: float) -> None:
    match what:
        case "ok":
            health.record_success(now)
        case "bad":
            health.record_failure(now)
        case "none":
            health.record_connect_failure(now)
        case "429":
            health.record_rate_limit(now, 5.0, in_flight=3)
        case "429 of one":
            health.record_rate_limit(now, 60.0)
        case _:
            health.record_health_check(now, what == "probe")


@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.floats(0, 40), st.sampled_from(["ok", "bad", "none", "429"]))),
)
def test_every_ejection_ends(seed: int, steps: list[tuple[float, str]]) -> None:
    health, now = WorkerHealth(), float(seed)
    for pause, what in steps:
        now += pause
        record_event(health, what, now)
        until = health.get_unavailable_until(now)
        assert (until is not None) == (health.get_state(now) == "out")
        assert until is None or now < until <= now + 300.0
        assert 0.0 < health.get_weight_factor(now) <= 1.0
    now += 300.0
    assert health.get_state(now) in {"up", "trial"}
    health.record_success(now)
    assert (health.get_state(now), health.get_weight_factor(now + 30.0)) == ("up", 1.0)


@given(
    st.integers(0, 100),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.1, 0.9, 1.0, 8.0, 40.0, 61.0]),
            st.sampled_from(["ok", "bad", "bad", "none", "429", "429 of one", "probe", "no probe"]),
        )
    ),
)
def test_healthy_worker_stays_healthy_without_events(
    seed: int, steps: list[tuple[float, str]]
) -> None:
    health, now = WorkerHealth(), float(seed)
    for pause, what in steps:
        now += pause
        record_event(health, what, now)
        for later in (now, now + 1.0, now + 400.0) if health.healthy else ():
            assert health.get_state(later) == "up"
            assert not health.is_rate_limited(later)
            assert health.get_limit() is None
    now += 400.0
    for _ in range(2):
        health.record_health_check(now, ok=True)
    health.record_success(now)
    assert health.healthy


# ── refused connections ───────────────────────────────────────────────────────────────────────────


def test_connect_failure_backoff_grows_to_30_seconds() -> None:
    health, now, waits = WorkerHealth(), 0.0, list[float]()
    for _ in range(9):
        health.record_connect_failure(now)
        until = health.get_unavailable_until(now)
        assert until is not None
        assert get_states(health, now, until) == ["out", "trial"]
        waits.append(until - now)
        now = until

    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_simultaneous_connect_failures_count_as_one() -> None:
    health = WorkerHealth()
    for _ in range(50):
        health.record_connect_failure(10.0)

    assert health.get_unavailable_until(10.0) == 10.5


@pytest.mark.parametrize(
    "met",
    [
        WorkerHealth.record_connected,
        WorkerHealth.record_success,
        WorkerHealth.record_failure,
        WorkerHealth.record_rate_limit,
    ],
)
def test_any_response_ends_the_connect_failure_backoff(
    met: Callable[[WorkerHealth, float], None],
) -> None:
    health = WorkerHealth()
    health.record_connect_failure(0.0)

    met(health, 0.1)

    assert (health.get_state(0.1), health.get_weight_factor(0.1)) == ("up", 1.0)
    health.record_connect_failure(1.0)
    assert health.get_unavailable_until(1.0) == 1.5


def test_only_a_successful_health_check_ends_the_connect_failure_backoff() -> None:
    health = WorkerHealth()
    health.record_connect_failure(0.0)

    health.record_health_check(0.1, ok=False)
    assert health.get_state(0.1) == "out"
    health.record_health_check(0.2, ok=True)
    assert health.get_state(0.2) == "up"


def test_worker_gets_a_slow_start_after_a_long_connect_failure() -> None:
    health = WorkerHealth()
    health.record_connect_failure(0.0)
    health.record_connect_failure(0.5)

    health.record_success(1.5)

    assert health.get_weight_factor(1.5) == 0.1


def test_connect_failures_count_in_the_failure_rate() -> None:
    health, now = WorkerHealth(breaker=CircuitBreakerSettings(min_requests=6)), 0.0
    for _ in range(3):
        health.record_success(now)
        assert health.get_state(now) == "up"
        health.record_connect_failure(now)
        now += 0.5

    assert health.get_unavailable_until(now) == 16.0


def test_consecutive_connect_failures_do_not_open_the_circuit_breaker() -> None:
    health = WorkerHealth()
    for now in (0.0, 0.5, 1.5, 3.5, 7.5, 15.5):
        health.record_connect_failure(now)
    health.record_success(31.5)

    assert health.get_state(31.5) == "up"


def test_connect_failure_in_half_open_state_does_not_extend_the_ejection() -> None:
    health = WorkerHealth(breaker=CircuitBreakerSettings(min_requests=1))
    record_failures(health, 0.0)

    health.record_connect_failure(15.0)

    assert (health.get_unavailable_until(15.0), health.get_state(15.5)) == (15.5, "trial")


# ── too many requests ─────────────────────────────────────────────────────────────────────────────


def test_rate_limit_response_lowers_the_limit_without_ejection() -> None:
    health = WorkerHealth()

    for now in range(100):
        health.record_rate_limit(now, in_flight=20)
        assert health.get_state(now) == "up"

    assert health.get_limit() == 1


def test_simultaneous_rate_limit_responses_count_as_one() -> None:
    health = WorkerHealth()

    for _ in range(15):
        health.record_rate_limit(3.0, in_flight=20)
    assert health.get_limit() == 14
    health.record_rate_limit(4.0, in_flight=12)
    assert health.get_limit() == 8


def test_limits_of_models_are_bounded_and_the_oldest_is_dropped() -> None:
    health = WorkerHealth()
    for number in range(256):
        health.record_rate_limit(3.0, model=f"m{number}", in_flight=20)
    health.record_rate_limit(3.0, model="m0", in_flight=20)
    health.record_rate_limit(3.0, model="new", in_flight=20)

    limits = health.get_limits()
    assert len(limits) == 256
    assert {"m0", "m2", "new"} <= limits.keys()
    assert "m1" not in limits


def test_rate_limit_response_limits_its_model_only() -> None:
    health = WorkerHealth()

    health.record_rate_limit(0.0, 30.0, model="a")
    health.record_success(31.0, "b")

    assert health.get_limits() == {"a": 1}
    assert health.get_limit("b") is None
    assert (health.is_rate_limited(5.0, "a"), health.is_rate_limited(5.0, "b")) == (True, False)


def test_successes_raise_the_adaptive_limit_gradually() -> None:
    health = WorkerHealth()
    health.record_rate_limit(0.0, in_flight=10)

    limits = list[int | None]()
    for _ in range(3):
        for _ in range(8):
            health.record_success(5.0)
        limits.append(health.get_limit())

    assert limits == [8, 9, 9]


def test_adaptive_limit_does_not_grow_before_retry_after() -> None:
    health = WorkerHealth()
    health.record_rate_limit(0.0, 20.0, in_flight=2)

    for now in (5.0, 19.9):
        health.record_success(now)
    assert health.get_limit() == 1
    health.record_success(20.0)
    assert health.get_limit() == 2


def test_retry_after_is_capped_at_one_minute() -> None:
    health = WorkerHealth()
    health.record_rate_limit(0.0, 86400.0, in_flight=2)

    health.record_success(60.0)

    assert health.get_limit() is None


def test_worker_that_rejected_its_only_request_pauses_until_retry_after() -> None:
    busy, well = FakeWorker("busy"), FakeWorker("well")
    busy.health.record_rate_limit(0.0, 9.0)

    assert select_available([busy, well], 8.9, 0.5) == [well]
    assert select_available([busy, well], 9.0, 0.5) == [busy, well]
    assert select_available([busy], 5.0, 0.5) == [busy], "no other worker is available"
    assert busy.health.get_state(5.0) == "up"


def test_worker_that_rejected_one_of_many_requests_stays_available() -> None:
    busy, well = FakeWorker("busy"), FakeWorker("well")
    busy.health.record_rate_limit(0.0, 9.0, in_flight=2)

    assert select_available([busy, well], 5.0, 0.5) == [busy, well]


def test_adaptive_limit_is_removed_one_minute_after_the_last_rejection() -> None:
    health = WorkerHealth()
    health.record_rate_limit(0.0, in_flight=8)
    health.record_rate_limit(30.0, in_flight=5)

    health.record_success(89.0)
    assert health.get_limit() == 3
    health.record_success(90.0)
    assert health.get_limit() is None


# ── selectable workers ────────────────────────────────────────────────────────────────────────────


class FakeWorker(Struct, eq=False):
    name: str
    health: WorkerHealth = field(default_factory=WorkerHealth)
    in_flight: int = 0


def make_workers(*kinds: str, busy: int = 0) -> list[FakeWorker]:
    """Make four workers at time 100: up, ejected, on trial, and unreachable."""
    members = [FakeWorker(f"{kind}{n}", in_flight=busy) for n, kind in enumerate(kinds)]
    for one in members:
        match one.name[:-1]:
            case "out":
                record_failures(one.health, 100.0)
            case "trial":
                record_failures(one.health, 0.0)
            case "away":
                one.health.record_connect_failure(100.0)
            case _:
                one.health.record_success(100.0)
    return members


def get_available_names(members: list[FakeWorker], panic: float = 0.5) -> list[str]:
    return [one.name for one in select_available(members, 100.0, panic)]


def test_only_healthy_workers_are_available() -> None:
    assert get_available_names(make_workers("up", "out", "up", "away", "up")) == [
        "up0",
        "up2",
        "up4",
    ]
    assert get_available_names(make_workers("up", "out")) == ["up0"]
    assert get_available_names([]) == []


def test_half_open_worker_gets_one_request_at_a_time() -> None:
    assert get_available_names(make_workers("up", "trial")) == ["up0", "trial1"]
    assert get_available_names(make_workers("up", "trial", busy=1)) == ["up0"]


def test_busy_half_open_workers_are_available_if_all_are_busy() -> None:
    members = make_workers("trial", "trial", "out")
    members[0].in_flight = 1

    assert get_available_names(members) == ["trial1"]
    members[1].in_flight = 1
    assert get_available_names(members) == ["trial0", "trial1"]


def test_panic_mode_makes_ejected_workers_available() -> None:
    members = make_workers("up", "out", "out")

    assert get_available_names(members) == ["up0", "out1", "out2"]
    assert get_available_names(members, panic=0.3) == ["up0"]
    assert get_available_names(members, panic=0.0) == ["up0"]


def test_all_workers_are_available_if_none_is_healthy() -> None:
    assert get_available_names(make_workers("out", "out"), panic=0.0) == ["out0", "out1"]


def test_unreachable_worker_is_available_only_if_no_other_is() -> None:
    assert get_available_names(make_workers("up", "away", "out")) == ["up0", "out2"]
    assert get_available_names(make_workers("away", "out")) == ["out1"]
    assert get_available_names(make_workers("away", "away")) == ["away0", "away1"]
