"""Which worker is asked: pure decisions, and laws that they keep."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from backends.pool.policy import POLICIES, LeastLoad, PolicyName, RoundRobin

WEIGHTS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


class Load(Struct):
    key: int
    weight: int = 1
    in_flight: int = 0


def loads(weights: list[int]) -> list[Load]:
    return [Load(key, weight) for key, weight in enumerate(weights)]


def test_a_heavier_worker_is_spread_among_the_others() -> None:
    policy, workers = RoundRobin(), loads([5, 1, 1])

    assert [policy.pick(workers).key for _ in range(7)] == [0, 0, 1, 0, 2, 0, 0]


@given(WEIGHTS, st.integers(1, 4))
def test_a_round_gives_each_its_weight(weights: list[int], rounds: int) -> None:
    policy, workers = RoundRobin(), loads(weights)

    picks = Counter(policy.pick(workers).key for _ in range(rounds * sum(weights)))

    assert picks == {key: rounds * weight for key, weight in enumerate(weights)}


@given(WEIGHTS, st.integers(0, 1000))
def test_workers_that_come_and_go_leave_no_debt_behind(weights: list[int], seed: int) -> None:
    """However the others came and went, credits stay bounded: nobody starves, nobody is flooded."""
    policy, workers, draw = RoundRobin(), loads(weights), random.Random(seed)
    for _ in range(200):
        policy.pick(draw.sample(workers, draw.randint(1, len(workers))))

    assert sum(policy._credit.values()) == 0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=6))
def test_least_load_picks_no_worker_that_another_undercuts(state: list[tuple[int, int]]) -> None:
    workers = [Load(key, weight, busy) for key, (weight, busy) in enumerate(state)]

    picked = LeastLoad().pick(workers)

    after = (picked.in_flight + 1) / picked.weight
    assert all(after <= (one.in_flight + 1) / one.weight for one in workers)


def test_idle_workers_take_turns() -> None:
    policy, workers = LeastLoad(), loads([1, 1, 1])

    assert Counter(policy.pick(workers).key for _ in range(9)) == {0: 3, 1: 3, 2: 3}


@given(WEIGHTS)
def test_least_load_fills_workers_by_their_weights(weights: list[int]) -> None:
    policy, workers = LeastLoad(), loads(weights)

    for _ in range(3 * sum(weights)):
        policy.pick(workers).in_flight += 1

    assert [one.in_flight for one in workers] == [3 * weight for weight in weights]


@pytest.mark.parametrize("name", POLICIES)
def test_a_worker_alone_is_always_picked(name: PolicyName) -> None:
    policy = POLICIES[name]()
    only = Load(7, 3, 100)

    assert all(policy.pick([only]) is only for _ in range(5))
