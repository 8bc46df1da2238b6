"""Whether a worker may be asked, by a clock that is a number."""

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


def fail(health: WorkerHealth, now: float, times: int = 5) -> None:
    for _ in range(times):
        health.record_failure(now)


def states(health: WorkerHealth, *moments: float) -> list[HealthState]:
    return [health.get_state(now) for now in moments]


def test_of_a_new_worker_nothing_is_known_and_it_may_be_asked() -> None:
    health = WorkerHealth()

    assert (health.get_state(0.0), health.is_available(0.0), health.get_weight_factor(0.0)) == (
        "up",
        True,
        1.0,
    )
    assert (
        health.get_unavailable_until(0.0),
        health.get_limit(None, 9),
        health.get_limit(4, 9),
    ) == (None, None, 4)


# ── probes ──────────────────────────────────────────────────────────────────────────────────────


def test_three_failed_probes_take_it_out_and_two_good_ones_bring_it_back() -> None:
    health, seen = WorkerHealth(), list[bool]()
    for now, ok in enumerate([False, False, True, False, False, False, False, True, False, True]):
        health.record_health_check(now, ok)
        seen.append(health.is_available(now))
    health.record_health_check(10, ok=True)

    assert seen == [True] * 5 + [False] * 5
    assert states(health, 10, 10_000) == ["up", "up"]


def test_a_worker_that_probes_bring_back_starts_slowly() -> None:
    health = WorkerHealth()
    for now in range(3):
        health.record_health_check(now, ok=False)
    for now in (3, 4):
        health.record_health_check(now, ok=True)

    shares = [health.get_weight_factor(now) for now in (4, 5, 7, 19, 34, 99)]
    assert shares == pytest.approx([0.1, 0.1, 0.1, 0.5, 1, 1])


def test_good_probes_of_a_worker_that_is_up_change_nothing() -> None:
    health = WorkerHealth()
    for now in range(5):
        health.record_health_check(now, ok=True)
        assert health.get_weight_factor(now) == 1.0


def test_only_probes_undo_what_probes_said() -> None:
    health = WorkerHealth()
    for now in range(3):
        health.record_health_check(now, ok=False)

    for now in range(3, 30):
        health.record_success(now)

    assert health.get_state(30) == "out"


def test_a_worker_that_went_down_and_came_back_has_a_clean_slate() -> None:
    health = WorkerHealth()
    fail(health, 0.0)
    fail(health, 0.0, times=4)
    for now in (1, 2, 3):
        health.record_health_check(now, ok=False)
    for now in (4, 5):
        health.record_health_check(now, ok=True)
    health.record_failure(5)

    assert states(health, 5, 20) == ["up", "up"]


def test_failures_from_before_it_went_down_are_not_added_up() -> None:
    health = WorkerHealth()
    fail(health, 0.0, times=4)
    for now in (1, 2, 3):
        health.record_health_check(now, ok=False)
    for now in (4, 5):
        health.record_health_check(now, ok=True)
    health.record_failure(6)

    assert health.get_state(6) == "up"


# ── requests that fail ──────────────────────────────────────────────────────────────────────────


def test_five_failures_in_a_row_take_it_out_for_a_while() -> None:
    health = WorkerHealth()
    fail(health, 0.0, times=4)
    health.record_success(0.0)
    fail(health, 0.0, times=4)
    assert health.get_state(0.0) == "up"

    health.record_failure(1.0)

    assert states(health, 1.0, 15.9, 16.0, 1e6) == ["out", "out", "trial", "trial"]
    assert (health.get_unavailable_until(2.0), health.get_unavailable_until(16.0)) == (16.0, None)


def test_one_good_answer_ends_the_trial_and_the_share_grows() -> None:
    health = WorkerHealth()
    fail(health, 0.0)
    assert health.get_weight_factor(15.0) == 1.0

    health.record_success(15.0)

    assert health.get_state(15.0) == "up"
    assert [health.get_weight_factor(now) for now in (15, 30, 45)] == pytest.approx([0.1, 0.5, 1.0])


def test_a_failure_ends_the_trial_the_other_way_and_for_twice_as_long() -> None:
    health, now, waits = WorkerHealth(), 0.0, list[float]()
    fail(health, now)
    for _ in range(7):
        until = health.get_unavailable_until(now)
        assert until is not None
        waits.append(until - now)
        now = until
        health.record_failure(now)

    assert waits == [15, 30, 60, 120, 240, 300, 300]


@pytest.mark.parametrize(("pause", "wait"), [(299.0, 30.0), (300.0, 15.0)])
def test_a_worker_that_was_good_for_long_is_forgiven(pause: float, wait: float) -> None:
    health = WorkerHealth()
    fail(health, 0.0)
    health.record_success(15.0)
    now = 15.0 + pause

    fail(health, now)

    assert health.get_unavailable_until(now) == now + wait


def test_an_ejection_longer_than_the_longest_is_as_configured() -> None:
    health = WorkerHealth(breaker=CircuitBreakerSettings(open_for=600.0))
    fail(health, 0.0)
    health.record_failure(600.0)

    assert health.get_unavailable_until(600.0) == 1200.0


def test_half_of_at_least_twenty_take_it_out() -> None:
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


def test_after_an_ejection_the_count_begins_anew() -> None:
    health = WorkerHealth(breaker=CircuitBreakerSettings(consecutive_failures=1000))
    for _ in range(20):
        health.record_failure(0.0)
    health.record_success(15.0)

    health.record_failure(15.0)

    assert health.get_state(15.0) == "up"


def test_requests_that_were_under_way_make_an_ejection_no_longer() -> None:
    health = WorkerHealth()
    fail(health, 0.0, times=50)

    assert health.get_unavailable_until(0.0) == 15.0
    for _ in range(50):
        health.record_success(9.0)
    assert health.get_state(9.0) == "out"


def test_good_answers_all_the_while_end_an_ejection() -> None:
    """They come where every worker is out, and all are asked."""
    health = WorkerHealth()
    fail(health, 0.0)
    health.record_failure(15.0)
    assert health.get_unavailable_until(15.0) == 45.0

    for answer in "ggggbggggg":
        (health.record_success if answer == "g" else health.record_failure)(25.0)
        if answer == "b":
            assert health.get_state(25.0) == "out"

    assert (health.get_state(25.0), health.get_weight_factor(25.0)) == ("up", 0.1)


def happens(health: WorkerHealth, what: str, now: float) -> None:
    match what:
        case "ok":
            health.record_success(now)
        case "bad":
            health.record_failure(now)
        case "none":
            health.record_connect_failure(now)
        case "429":
            health.record_rate_limit(now, 5.0)
        case "429 of one":
            health.get_limit(None, 1)
            health.record_rate_limit(now, 60.0)
        case _:
            health.record_health_check(now, what == "probe")


@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.floats(0, 40), st.sampled_from(["ok", "bad", "none", "429"]))),
)
def test_nobody_is_out_for_ever(seed: int, steps: list[tuple[float, str]]) -> None:
    health, now = WorkerHealth(), float(seed)
    for pause, what in steps:
        now += pause
        happens(health, what, now)
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
def test_a_worker_that_is_well_stays_so_until_something_happens(
    seed: int, steps: list[tuple[float, str]]
) -> None:
    health, now = WorkerHealth(), float(seed)
    for pause, what in steps:
        now += pause
        happens(health, what, now)
        for later in (now, now + 1.0, now + 400.0) if health.healthy else ():
            assert health.get_state(later) == "up"
            assert not health.is_rate_limited(later)
            assert health.get_limit(8, 3) == 8
    now += 400.0
    for _ in range(2):
        health.record_health_check(now, ok=True)
    health.record_success(now)
    assert health.healthy


# ── connections that it does not take ───────────────────────────────────────────────────────────


def test_absences_grow_to_half_a_minute() -> None:
    health, now, waits = WorkerHealth(), 0.0, list[float]()
    for _ in range(9):
        health.record_connect_failure(now)
        until = health.get_unavailable_until(now)
        assert until is not None
        assert states(health, now, until) == ["out", "trial"]
        waits.append(until - now)
        now = until

    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_many_requests_missed_together_are_one_absence() -> None:
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
def test_an_absence_ends_with_any_answer(met: Callable[[WorkerHealth, float], None]) -> None:
    health = WorkerHealth()
    health.record_connect_failure(0.0)

    met(health, 0.1)

    assert (health.get_state(0.1), health.get_weight_factor(0.1)) == ("up", 1.0)
    health.record_connect_failure(1.0)
    assert health.get_unavailable_until(1.0) == 1.5


def test_an_absence_ends_with_a_good_probe_and_not_with_a_bad_one() -> None:
    health = WorkerHealth()
    health.record_connect_failure(0.0)

    health.record_health_check(0.1, ok=False)
    assert health.get_state(0.1) == "out"
    health.record_health_check(0.2, ok=True)
    assert health.get_state(0.2) == "up"


def test_after_a_longer_absence_its_share_grows() -> None:
    health = WorkerHealth()
    health.record_connect_failure(0.0)
    health.record_connect_failure(0.5)

    health.record_success(1.5)

    assert health.get_weight_factor(1.5) == 0.1


def test_connections_that_fail_now_and_then_count_among_all_requests() -> None:
    health, now = WorkerHealth(breaker=CircuitBreakerSettings(min_requests=6)), 0.0
    for _ in range(3):
        health.record_success(now)
        assert health.get_state(now) == "up"
        health.record_connect_failure(now)
        now += 0.5

    assert health.get_unavailable_until(now) == 16.0


def test_connections_refused_in_a_row_are_an_absence_and_no_ejection() -> None:
    health = WorkerHealth()
    for now in (0.0, 0.5, 1.5, 3.5, 7.5, 15.5):
        health.record_connect_failure(now)
    health.record_success(31.5)

    assert health.get_state(31.5) == "up"


def test_a_trial_that_finds_nobody_makes_no_ejection_longer() -> None:
    health = WorkerHealth(breaker=CircuitBreakerSettings(min_requests=1))
    fail(health, 0.0)

    health.record_connect_failure(15.0)

    assert (health.get_unavailable_until(15.0), health.get_state(15.5)) == (15.5, "trial")


# ── too many requests ───────────────────────────────────────────────────────────────────────────


def test_a_refusal_shrinks_the_limit_and_takes_nobody_out() -> None:
    health = WorkerHealth()
    health.get_limit(None, 20)

    for now in range(100):
        health.record_rate_limit(now)
        assert health.get_state(now) == "up"

    assert health.get_limit(None, 20) == 1


def test_refusals_that_come_together_are_one() -> None:
    health = WorkerHealth()
    health.get_limit(None, 20)

    for _ in range(15):
        health.record_rate_limit(3.0)
    assert health.get_limit(None, 12) == 14
    health.record_rate_limit(4.0)
    assert health.get_limit(None, 12) == 8


@pytest.mark.parametrize(("configured", "limit"), [(None, 7), (5, 5), (9, 7)])
def test_a_limit_stays_below_the_configured_one(configured: int | None, limit: int) -> None:
    health = WorkerHealth()
    health.get_limit(configured, 10)

    health.record_rate_limit(0.0)

    assert health.get_limit(configured, 10) == limit


def test_answers_give_the_limit_back_by_and_by() -> None:
    health = WorkerHealth()
    health.get_limit(None, 10)
    health.record_rate_limit(0.0)

    limits = list[int | None]()
    for _ in range(3):
        for _ in range(8):
            health.record_success(5.0)
        limits.append(health.get_limit(None, 10))

    assert limits == [8, 9, 9]


def test_the_limit_does_not_grow_before_the_worker_said_so() -> None:
    health = WorkerHealth()
    health.get_limit(None, 2)
    health.record_rate_limit(0.0, 20.0)

    for now in (5.0, 19.9):
        health.record_success(now)
    assert health.get_limit(None, 1) == 1
    health.record_success(20.0)
    assert health.get_limit(None, 1) == 2


def test_a_worker_that_asks_for_a_day_gets_a_minute() -> None:
    health = WorkerHealth()
    health.get_limit(None, 2)
    health.record_rate_limit(0.0, 86400.0)

    health.record_success(60.0)

    assert health.get_limit(None, 1) is None


def test_a_worker_that_refused_its_only_request_rests() -> None:
    busy, well = Member("busy"), Member("well")
    busy.health.get_limit(None, 1)
    busy.health.record_rate_limit(0.0, 9.0)

    assert select_available([busy, well], 8.9, 0.5) == [well]
    assert select_available([busy, well], 9.0, 0.5) == [busy, well]
    assert select_available([busy], 5.0, 0.5) == [busy], "there is nobody else"
    assert busy.health.get_state(5.0) == "up"


def test_a_worker_that_refused_one_of_many_does_not_rest() -> None:
    busy, well = Member("busy"), Member("well")
    busy.health.get_limit(None, 2)
    busy.health.record_rate_limit(0.0, 9.0)

    assert select_available([busy, well], 5.0, 0.5) == [busy, well]


def test_a_limit_is_gone_a_minute_after_the_last_refusal() -> None:
    health = WorkerHealth()
    health.get_limit(8, 8)
    health.record_rate_limit(0.0)
    health.get_limit(8, 5)
    health.record_rate_limit(30.0)

    health.record_success(89.0)
    assert health.get_limit(8, 3) == 3
    health.record_success(90.0)
    assert health.get_limit(8, 3) == 8


# ── who of all may be asked ─────────────────────────────────────────────────────────────────────


class Member(Struct, eq=False):
    name: str
    health: WorkerHealth = field(default_factory=WorkerHealth)
    in_flight: int = 0


def pool(*kinds: str, busy: int = 0) -> list[Member]:
    """At the moment 100: up, out, trial, away (took no connection)."""
    members = [Member(f"{kind}{n}", in_flight=busy) for n, kind in enumerate(kinds)]
    for one in members:
        match one.name[:-1]:
            case "out":
                fail(one.health, 100.0)
            case "trial":
                fail(one.health, 0.0)
            case "away":
                one.health.record_connect_failure(100.0)
            case _:
                one.health.record_success(100.0)
    return members


def names(members: list[Member], panic: float = 0.5) -> list[str]:
    return [one.name for one in select_available(members, 100.0, panic)]


def test_whoever_is_in_may_be_asked() -> None:
    assert names(pool("up", "out", "up", "away", "up")) == ["up0", "up2", "up4"]
    assert names(pool("up", "out")) == ["up0"]
    assert names([]) == []


def test_a_trial_is_one_request_at_a_time() -> None:
    assert names(pool("up", "trial")) == ["up0", "trial1"]
    assert names(pool("up", "trial", busy=1)) == ["up0"]


def test_where_all_are_on_trial_nobody_waits_for_another() -> None:
    members = pool("trial", "trial", "out")
    members[0].in_flight = 1

    assert names(members) == ["trial1"]
    members[1].in_flight = 1
    assert names(members) == ["trial0", "trial1"]


def test_when_most_are_out_it_is_rather_the_health_that_is_wrong() -> None:
    members = pool("up", "out", "out")

    assert names(members) == ["up0", "out1", "out2"]
    assert names(members, panic=0.3) == ["up0"]
    assert names(members, panic=0.0) == ["up0"]


def test_without_anybody_in_all_are_asked_whatever_the_threshold() -> None:
    assert names(pool("out", "out"), panic=0.0) == ["out0", "out1"]


def test_a_worker_that_took_no_connection_is_asked_when_there_is_nobody_else() -> None:
    assert names(pool("up", "away", "out")) == ["up0", "out2"]
    assert names(pool("away", "out")) == ["out1"]
    assert names(pool("away", "away")) == ["away0", "away1"]
