"""Which worker is asked: pure decisions, and laws that they keep."""

import math
import random
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from backends.pool.load_balancing import (
    LeastLoad,
    LoadBalancingPolicy,
    PolicyName,
    PowerOfTwoChoices,
    RoundRobin,
    RoutingKey,
    make_policy,
)

WEIGHTS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
STATES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=6)
NAMES: tuple[PolicyName, ...] = get_args(PolicyName)


class Load(Struct):
    key: int
    weight: float = 1
    in_flight: int = 0
    latency: float | None = None
    url: str | None = None

    @property
    def name(self) -> str:
        return self.url or f"http://w{self.key}:8000"


def loads(weights: list[int]) -> list[Load]:
    return [Load(key, weight) for key, weight in enumerate(weights)]


def luck(*numbers: float) -> PowerOfTwoChoices:
    return PowerOfTwoChoices(iter(numbers).__next__)


def hashed(name: PolicyName = "prefix") -> LoadBalancingPolicy:
    return make_policy(name, lambda: 0.0)


# ── in turn ─────────────────────────────────────────────────────────────────────────────────────


def test_a_heavier_worker_is_spread_among_the_others() -> None:
    policy, workers = RoundRobin(), loads([5, 1, 1])

    assert [policy.pick_worker(workers).key for _ in range(7)] == [0, 0, 1, 0, 2, 0, 0]


@given(WEIGHTS, st.integers(1, 4))
def test_a_round_gives_each_its_weight(weights: list[int], rounds: int) -> None:
    policy, workers = RoundRobin(), loads(weights)

    picks = Counter(policy.pick_worker(workers).key for _ in range(rounds * sum(weights)))

    assert picks == {key: rounds * weight for key, weight in enumerate(weights)}


@given(WEIGHTS, st.integers(0, 1000))
def test_workers_that_come_and_go_leave_no_debt_behind(weights: list[int], seed: int) -> None:
    """However the others came and went, credits stay bounded: nobody starves, nobody is flooded."""
    policy, workers, draw = RoundRobin(), loads(weights), random.Random(seed)
    for _ in range(200):
        policy.pick_worker(draw.sample(workers, draw.randint(1, len(workers))))

    assert sum(policy._credit.values()) == 0


def test_workers_that_are_gone_for_good_are_forgotten() -> None:
    policy = RoundRobin()
    for key in range(1000):
        policy.pick_worker([Load(key), Load(key + 1)])

    assert len(policy._credit) < 100


# ── by load ─────────────────────────────────────────────────────────────────────────────────────


@given(STATES)
def test_least_load_picks_no_worker_that_another_undercuts(state: list[tuple[int, int]]) -> None:
    workers = [Load(key, weight, busy) for key, (weight, busy) in enumerate(state)]

    picked = LeastLoad().pick_worker(workers)

    after = (picked.in_flight + 1) / picked.weight
    assert all(after <= (one.in_flight + 1) / one.weight for one in workers)


def test_idle_workers_take_turns() -> None:
    policy, workers = LeastLoad(), loads([1, 1, 1])

    assert Counter(policy.pick_worker(workers).key for _ in range(9)) == {0: 3, 1: 3, 2: 3}


@given(WEIGHTS)
def test_least_load_fills_workers_by_their_weights(weights: list[int]) -> None:
    policy, workers = LeastLoad(), loads(weights)

    for _ in range(3 * sum(weights)):
        policy.pick_worker(workers).in_flight += 1

    assert [one.in_flight for one in workers] == [3 * weight for weight in weights]


# ── two choices ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("first", "second", "picked"),
    [
        (Load(0, in_flight=4), Load(1, in_flight=3), 1),
        (Load(0, in_flight=3), Load(1, in_flight=4), 0),
        (Load(0, in_flight=3), Load(1, in_flight=3), 0),
        (Load(0, in_flight=1, weight=1), Load(1, in_flight=2, weight=2), 1),
        (Load(0, latency=0.5), Load(1, latency=0.1), 1),
        (Load(0, in_flight=1, latency=0.1), Load(1, in_flight=0, latency=0.3), 0),
        (Load(0, in_flight=3, latency=0.1), Load(1, in_flight=0, latency=0.3), 1),
        (Load(0, in_flight=0, latency=9.0), Load(1, in_flight=1), 0),
        (Load(0, in_flight=0), Load(1, in_flight=1, latency=0.1), 0),
    ],
)
def test_of_two_the_nearer_is_picked(first: Load, second: Load, picked: int) -> None:
    assert luck(0.0, 0.0).pick_worker([first, second]).key == picked


def test_the_two_are_drawn_by_weight_and_are_not_the_same() -> None:
    workers = [Load(0, 8.0, 1000), Load(1, 1.0, 2), Load(2, 1.0, 1)]

    assert luck(0.75, 0.49).pick_worker(workers).key == 1
    assert luck(0.75, 0.51).pick_worker(workers).key == 2
    assert luck(0.85, 0.0).pick_worker(workers).key == 1
    assert luck(math.nextafter(1, 0), 0.9).pick_worker(workers).key == 2


def test_a_draw_at_its_very_end_finds_a_worker() -> None:
    """The sum of the weights may be rounded: a mark at it is still the last worker's."""
    workers = [Load(0, 0.1, 9), Load(1, 0.2, 9), Load(2, 0.3)]

    assert luck(1.0, 0.0).pick_worker(workers).key == 2


def test_draws_favour_the_heavy() -> None:
    policy, workers = make_policy("two_choices", random.Random(3).random), loads([1, 1, 8])

    for _ in range(400):
        policy.pick_worker(workers).in_flight += 1

    assert [one.in_flight for one in workers] == [
        pytest.approx(40, abs=5),
        pytest.approx(40, abs=5),
        pytest.approx(320, abs=10),
    ]


# ── one place for one key ───────────────────────────────────────────────────────────────────────


def places(workers: list[Load], keys: int = 500) -> list[str]:
    policy = hashed()
    return [policy.pick_worker(workers, RoutingKey(prefix=key)).name for key in range(keys)]


def test_a_key_has_its_worker_on_every_machine() -> None:
    """Known answers: replicas and later runs must agree on them."""
    workers = loads([1, 1, 1, 1])
    placed = [2, 1, 3, 0, 1, 1, 2, 1, 2, 1, 2, 1]
    seated = [0, 0, 1, 1, 1, 2, 2, 1]

    assert [hashed().pick_worker(workers, RoutingKey(prefix=n)).key for n in range(12)] == placed
    assert [
        hashed("session").pick_worker(workers, RoutingKey(session=f"s{n}")).key for n in range(8)
    ] == seated


def test_the_order_of_the_workers_says_nothing() -> None:
    workers = loads([1, 2, 3, 4])

    assert places(workers) == places(workers[::-1])


def test_a_worker_that_goes_moves_only_its_own_keys() -> None:
    workers = loads([1, 2, 1, 3, 1])
    before, gone = places(workers), workers[3].name

    after = places(workers[:3] + workers[4:])

    assert all(was in {now, gone} for was, now in zip(before, after, strict=True))
    assert len(set(after)) == 4


def test_a_worker_that_grows_moves_keys_only_to_itself() -> None:
    workers = loads([1, 1, 1])
    before = places(workers)

    workers[1].weight = 3
    after = places(workers)

    moved = {now for was, now in zip(before, after, strict=True) if now != was}
    assert moved == {workers[1].name}


def test_keys_are_spread_by_weight() -> None:
    count = Counter(places(loads([1, 2, 5]), keys=4000))

    assert [count[f"http://w{n}:8000"] for n in range(3)] == [
        pytest.approx(500, rel=0.15),
        pytest.approx(1000, rel=0.15),
        pytest.approx(2500, rel=0.15),
    ]


@given(STATES, st.integers(0, 2**64 - 1), st.sampled_from([("prefix", 1.25), ("session", 1.5)]))
def test_nobody_gets_more_than_the_bound(
    state: list[tuple[int, int]], key: int, policy: tuple[PolicyName, float]
) -> None:
    name, bound = policy
    workers = [Load(n, weight, busy) for n, (weight, busy) in enumerate(state)]

    one = hashed(name).pick_worker(workers, RoutingKey(prefix=key, session=str(key)))

    all_of_them = 1 + sum(load.in_flight for load in workers)
    part = all_of_them * one.weight / sum(load.weight for load in workers)
    assert one.in_flight + 1 <= max(2, math.ceil(bound * part))


def test_an_overloaded_worker_is_passed_over_for_the_next_in_its_order() -> None:
    workers = loads([1, 1, 1])
    ask = RoutingKey(prefix=5)
    first = hashed().pick_worker(workers, ask)
    next_one = hashed().pick_worker([one for one in workers if one is not first], ask)

    taken = list[str]()
    for _ in range(7):
        picked = hashed().pick_worker(workers, ask)
        picked.in_flight += 1
        taken.append(picked.name)

    assert taken[:2] == [first.name] * 2
    assert taken[2] == next_one.name
    assert Counter(taken)[first.name] == 3
    first.in_flight = 0
    assert hashed().pick_worker(workers, ask) is first


@pytest.mark.parametrize(("name", "most"), [("prefix", 19), ("session", 33)])
def test_a_session_leaves_its_worker_later_than_a_prefix(name: PolicyName, most: int) -> None:
    """Beside a worker with ten requests: 1.25 and 1.5 times the mean."""
    workers, ask = loads([1, 1]), RoutingKey(prefix=1, session="x")
    own = hashed(name).pick_worker(workers, ask)
    for one in workers:
        one.in_flight = 10
    for _ in range(50):
        own.in_flight += hashed(name).pick_worker(workers, ask) is own

    assert own.in_flight == most


@pytest.mark.parametrize("name", ["prefix", "session"])
def test_without_a_key_the_least_loaded_is_picked(name: PolicyName) -> None:
    workers = [Load(0, in_flight=1), Load(1), Load(2)]
    policy = hashed(name)

    assert {policy.pick_worker(workers).key for _ in range(4)} == {1, 2}


def test_a_session_may_have_any_name() -> None:
    assert hashed("session").pick_worker(loads([1, 1]), RoutingKey(session="\ud800")) is not None


# ── all of them ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_alone_is_always_picked(name: PolicyName) -> None:
    policy = make_policy(name, random.Random(1).random)
    only = Load(7, 0.1, 100)

    assert all(policy.pick_worker([only], RoutingKey(1, "a")) is only for _ in range(5))


# ── what is compared ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name in NAMES if name != "two_choices"])
@given(
    state=STATES, prefix=st.integers(0, 2**64 - 1), keyed=st.booleans(), rounds=st.integers(0, 9)
)
def test_who_is_picked_has_the_score_that_wins(
    name: PolicyName, state: list[tuple[int, int]], prefix: int, rounds: int, *, keyed: bool
) -> None:
    policy = hashed(name)
    workers = [Load(key, weight, busy) for key, (weight, busy) in enumerate(state)]
    ask = RoutingKey(prefix, str(prefix)) if keyed else RoutingKey()
    for _ in range(rounds):
        policy.pick_worker(workers, ask)

    scores = policy.score_workers(workers, ask)

    assert scores == policy.score_workers(workers, ask)
    best = {"least": min, "most": max}[scores.winner](scores.by_worker.values())
    assert scores.by_worker[policy.pick_worker(workers, ask).key] == best


@given(STATES)
def test_of_two_that_are_drawn_the_one_with_the_lesser_score_is_picked(
    state: list[tuple[int, int]],
) -> None:
    workers = [Load(key, weight, busy) for key, (weight, busy) in enumerate(state)]
    policy = luck(0.0, 0.0)
    drawn = policy.score_workers(workers)

    picked = policy.pick_worker(workers)

    assert drawn.winner == "drawn"
    assert drawn.by_worker[picked.key] == min(drawn.by_worker[one.key] for one in workers[:2])


def test_a_score_is_in_seconds_where_all_are_known() -> None:
    workers = [Load(0, 2.0, 1, 0.5), Load(1, 1.0, 2, 0.25)]

    assert luck().score_workers(workers).by_worker == {0: 0.5, 1: 0.75}
    assert luck().score_workers([*workers, Load(2)]).by_worker == {0: 1.0, 1: 3.0, 2: 1.0}


@pytest.mark.parametrize("name", NAMES)
def test_of_nobody_nothing_is_compared(name: PolicyName) -> None:
    assert hashed(name).score_workers([], RoutingKey(5, "s")).by_worker == {}
