"""Load balancing policies: which worker is picked, and properties of the choice."""

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
from tests.support.examples import share_examples

WEIGHTS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
STATES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=6)
NAMES: tuple[PolicyName, ...] = get_args(PolicyName)


class FakeWorker(Struct):
    key: int
    weight: float = 1
    in_flight: int = 0
    latency: float | None = None
    url: str | None = None

    @property
    def name(self) -> str:
        return self.url or f"http://w{self.key}:8000"


def make_workers(weights: list[int]) -> list[FakeWorker]:
    return [FakeWorker(key, weight) for key, weight in enumerate(weights)]


def make_two_choices(*numbers: float) -> PowerOfTwoChoices:
    return PowerOfTwoChoices(iter(numbers).__next__)


def make_hash_policy(name: PolicyName = "prefix") -> LoadBalancingPolicy:
    return make_policy(name, lambda: 0.0)


# ── round robin ───────────────────────────────────────────────────────────────────────────────────


def test_round_robin_interleaves_a_heavier_worker() -> None:
    policy, workers = RoundRobin(), make_workers([5, 1, 1])

    assert [policy.pick_worker(workers).key for _ in range(7)] == [0, 0, 1, 0, 2, 0, 0]


@given(WEIGHTS, st.integers(1, 4))
def test_round_robin_gives_each_worker_its_weight(weights: list[int], rounds: int) -> None:
    policy, workers = RoundRobin(), make_workers(weights)

    picks = Counter(policy.pick_worker(workers).key for _ in range(rounds * sum(weights)))

    assert picks == {key: rounds * weight for key, weight in enumerate(weights)}


@given(WEIGHTS, st.integers(0, 1000))
def test_round_robin_credits_stay_balanced_as_workers_change(weights: list[int], seed: int) -> None:
    """Credits stay bounded when workers come and go: no worker starves or is flooded."""
    policy, workers, draw = RoundRobin(), make_workers(weights), random.Random(seed)
    for _ in range(200):
        policy.pick_worker(draw.sample(workers, draw.randint(1, len(workers))))

    assert sum(policy._credit.values()) == 0


def test_round_robin_forgets_removed_workers() -> None:
    policy = RoundRobin()
    for key in range(1000):
        policy.pick_worker([FakeWorker(key), FakeWorker(key + 1)])

    assert len(policy._credit) < 100


# ── least load ────────────────────────────────────────────────────────────────────────────────────


@given(STATES)
def test_least_load_picks_the_lowest_weighted_load(state: list[tuple[int, int]]) -> None:
    workers = [FakeWorker(key, weight, busy) for key, (weight, busy) in enumerate(state)]

    picked = LeastLoad().pick_worker(workers)

    after = (picked.in_flight + 1) / picked.weight
    assert all(after <= (one.in_flight + 1) / one.weight for one in workers)


def test_least_load_alternates_between_idle_workers() -> None:
    policy, workers = LeastLoad(), make_workers([1, 1, 1])

    assert Counter(policy.pick_worker(workers).key for _ in range(9)) == {0: 3, 1: 3, 2: 3}


@given(WEIGHTS)
def test_least_load_fills_workers_by_their_weights(weights: list[int]) -> None:
    policy, workers = LeastLoad(), make_workers(weights)

    for _ in range(3 * sum(weights)):
        policy.pick_worker(workers).in_flight += 1

    assert [one.in_flight for one in workers] == [3 * weight for weight in weights]


# ── two choices ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("first", "second", "picked"),
    [
        (FakeWorker(0, in_flight=4), FakeWorker(1, in_flight=3), 1),
        (FakeWorker(0, in_flight=3), FakeWorker(1, in_flight=4), 0),
        (FakeWorker(0, in_flight=3), FakeWorker(1, in_flight=3), 0),
        (FakeWorker(0, in_flight=1, weight=1), FakeWorker(1, in_flight=2, weight=2), 1),
        (FakeWorker(0, latency=0.5), FakeWorker(1, latency=0.1), 1),
        (FakeWorker(0, in_flight=1, latency=0.1), FakeWorker(1, in_flight=0, latency=0.3), 0),
        (FakeWorker(0, in_flight=3, latency=0.1), FakeWorker(1, in_flight=0, latency=0.3), 1),
        (FakeWorker(0, in_flight=0, latency=9.0), FakeWorker(1, in_flight=1), 0),
        (FakeWorker(0, in_flight=0), FakeWorker(1, in_flight=1, latency=0.1), 0),
    ],
)
def test_two_choices_picks_the_lower_expected_latency(
    first: FakeWorker, second: FakeWorker, picked: int
) -> None:
    assert make_two_choices(0.0, 0.0).pick_worker([first, second]).key == picked


def test_two_choices_draws_two_distinct_workers_by_weight() -> None:
    workers = [FakeWorker(0, 8.0, 1000), FakeWorker(1, 1.0, 2), FakeWorker(2, 1.0, 1)]

    assert make_two_choices(0.75, 0.49).pick_worker(workers).key == 1
    assert make_two_choices(0.75, 0.51).pick_worker(workers).key == 2
    assert make_two_choices(0.85, 0.0).pick_worker(workers).key == 1
    assert make_two_choices(math.nextafter(1, 0), 0.9).pick_worker(workers).key == 2


def test_two_choices_handles_a_draw_at_the_upper_bound() -> None:
    """The sum of the weights may be rounded: a draw at the sum is the last worker's."""
    workers = [FakeWorker(0, 0.1, 9), FakeWorker(1, 0.2, 9), FakeWorker(2, 0.3)]

    assert make_two_choices(1.0, 0.0).pick_worker(workers).key == 2


def test_two_choices_distributes_load_by_weight() -> None:
    policy, workers = make_policy("two_choices", random.Random(3).random), make_workers([1, 1, 8])

    for _ in range(400):
        policy.pick_worker(workers).in_flight += 1

    assert [one.in_flight for one in workers] == [
        pytest.approx(40, abs=5),
        pytest.approx(40, abs=5),
        pytest.approx(320, abs=10),
    ]


# ── consistent hashing ────────────────────────────────────────────────────────────────────────────


def assign_workers(workers: list[FakeWorker], keys: int = 500) -> list[str]:
    policy = make_hash_policy()
    return [policy.pick_worker(workers, RoutingKey(prefix=key)).name for key in range(keys)]


def test_hash_policy_assigns_keys_deterministically() -> None:
    """Replicas and later runs must agree on these assignments."""
    workers = make_workers([1, 1, 1, 1])
    placed = [2, 1, 3, 0, 1, 1, 2, 1, 2, 1, 2, 1]
    seated = [0, 0, 1, 1, 1, 2, 2, 1]

    assert [
        make_hash_policy().pick_worker(workers, RoutingKey(prefix=n)).key for n in range(12)
    ] == placed
    assert [
        make_hash_policy("session").pick_worker(workers, RoutingKey(session=f"s{n}")).key
        for n in range(8)
    ] == seated


def test_hash_policy_is_independent_of_worker_order() -> None:
    workers = make_workers([1, 2, 3, 4])

    assert assign_workers(workers) == assign_workers(workers[::-1])


def test_removed_worker_moves_only_its_own_keys() -> None:
    workers = make_workers([1, 2, 1, 3, 1])
    before, gone = assign_workers(workers), workers[3].name

    after = assign_workers(workers[:3] + workers[4:])

    assert all(was in {now, gone} for was, now in zip(before, after, strict=True))
    assert len(set(after)) == 4


def test_raised_weight_moves_keys_only_to_that_worker() -> None:
    workers = make_workers([1, 1, 1])
    before = assign_workers(workers)

    workers[1].weight = 3
    after = assign_workers(workers)

    moved = {now for was, now in zip(before, after, strict=True) if now != was}
    assert moved == {workers[1].name}


def test_hash_policy_distributes_keys_by_weight() -> None:
    count = Counter(assign_workers(make_workers([1, 2, 5]), keys=4000))

    assert [count[f"http://w{n}:8000"] for n in range(3)] == [
        pytest.approx(500, rel=0.15),
        pytest.approx(1000, rel=0.15),
        pytest.approx(2500, rel=0.15),
    ]


@given(STATES, st.integers(0, 2**64 - 1), st.sampled_from([("prefix", 1.25), ("session", 1.5)]))
def test_hash_policy_bounds_the_load_of_each_worker(
    state: list[tuple[int, int]], key: int, policy: tuple[PolicyName, float]
) -> None:
    name, bound = policy
    workers = [FakeWorker(n, weight, busy) for n, (weight, busy) in enumerate(state)]

    one = make_hash_policy(name).pick_worker(workers, RoutingKey(prefix=key, session=str(key)))

    all_of_them = 1 + sum(load.in_flight for load in workers)
    part = all_of_them * one.weight / sum(load.weight for load in workers)

    assert one.in_flight + 1 <= max(2, math.ceil(bound * part))


def test_overloaded_worker_is_skipped_for_the_next_in_hash_order() -> None:
    workers = make_workers([1, 1, 1])
    ask = RoutingKey(prefix=5)
    first = make_hash_policy().pick_worker(workers, ask)
    next_one = make_hash_policy().pick_worker([one for one in workers if one is not first], ask)

    taken = list[str]()
    for _ in range(7):
        picked = make_hash_policy().pick_worker(workers, ask)
        picked.in_flight += 1
        taken.append(picked.name)

    assert taken[:2] == [first.name] * 2
    assert taken[2] == next_one.name
    assert Counter(taken)[first.name] == 3

    first.in_flight = 0
    assert make_hash_policy().pick_worker(workers, ask) is first


@pytest.mark.parametrize(("name", "most"), [("prefix", 19), ("session", 33)])
def test_session_policy_tolerates_more_load_than_prefix_policy(name: PolicyName, most: int) -> None:
    """Beside a worker with ten requests: 1.25 and 1.5 times the mean."""
    workers, ask = make_workers([1, 1]), RoutingKey(prefix=1, session="x")
    own = make_hash_policy(name).pick_worker(workers, ask)
    for one in workers:
        one.in_flight = 10

    for _ in range(50):
        own.in_flight += make_hash_policy(name).pick_worker(workers, ask) is own

    assert own.in_flight == most


@pytest.mark.parametrize("name", ["prefix", "session"])
def test_hash_policy_without_a_key_picks_the_least_loaded_worker(name: PolicyName) -> None:
    workers = [FakeWorker(0, in_flight=1), FakeWorker(1), FakeWorker(2)]
    policy = make_hash_policy(name)

    assert {policy.pick_worker(workers).key for _ in range(4)} == {1, 2}


def test_session_key_may_be_any_string() -> None:
    assert (
        make_hash_policy("session").pick_worker(make_workers([1, 1]), RoutingKey(session="\ud800"))
        is not None
    )


# ── all policies ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
def test_single_worker_is_always_picked(name: PolicyName) -> None:
    policy = make_policy(name, random.Random(1).random)
    only = FakeWorker(7, 0.1, 100)

    assert all(policy.pick_worker([only], RoutingKey(1, "a")) is only for _ in range(5))


# ── scores ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name in NAMES if name != "two_choices"])
@share_examples(len(NAMES) - 1)
@given(
    state=STATES, prefix=st.integers(0, 2**64 - 1), keyed=st.booleans(), rounds=st.integers(0, 9)
)
def test_picked_worker_has_the_best_score(
    name: PolicyName, state: list[tuple[int, int]], prefix: int, rounds: int, *, keyed: bool
) -> None:
    policy = make_hash_policy(name)
    workers = [FakeWorker(key, weight, busy) for key, (weight, busy) in enumerate(state)]
    ask = RoutingKey(prefix, str(prefix)) if keyed else RoutingKey()
    for _ in range(rounds):
        policy.pick_worker(workers, ask)

    scores = policy.score_workers(workers, ask)

    assert scores == policy.score_workers(workers, ask)

    best = {"least": min, "most": max}[scores.winner](scores.by_worker.values())
    assert scores.by_worker[policy.pick_worker(workers, ask).key] == best


@given(STATES)
def test_two_choices_picks_the_lower_score_of_the_drawn_workers(
    state: list[tuple[int, int]],
) -> None:
    workers = [FakeWorker(key, weight, busy) for key, (weight, busy) in enumerate(state)]
    policy = make_two_choices(0.0, 0.0)
    drawn = policy.score_workers(workers)

    picked = policy.pick_worker(workers)

    assert drawn.winner == "drawn"
    assert drawn.by_worker[picked.key] == min(drawn.by_worker[one.key] for one in workers[:2])


def test_two_choices_score_uses_latency_only_if_all_are_known() -> None:
    workers = [FakeWorker(0, 2.0, 1, 0.5), FakeWorker(1, 1.0, 2, 0.25)]

    assert make_two_choices().score_workers(workers).by_worker == {0: 0.5, 1: 0.75}
    assert make_two_choices().score_workers([*workers, FakeWorker(2)]).by_worker == {
        0: 1.0,
        1: 3.0,
        2: 1.0,
    }


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_an_empty_pool_are_empty(name: PolicyName) -> None:
    assert make_hash_policy(name).score_workers([], RoutingKey(5, "s")).by_worker == {}
