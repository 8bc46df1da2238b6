"""Properties of a pool in thousands of simulated runs with seeded faults."""

import math
import random
from bisect import bisect
from collections import Counter
from collections.abc import Callable
from typing import get_args

import pytest

from backends.pool.load_balancing import PolicyName, RoutingKey
from backends.pool.settings import CircuitBreakerSettings
from tests.simulation.fleet import FaultPeriod, Kind, PoolSimulation, SimulatedWorker

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
KINDS: tuple[Kind, ...] = get_args(Kind)
KEYS = 40
SEEDS = 200

every_policy = pytest.mark.parametrize("policy", POLICIES)


def create_random_key(rng: random.Random) -> RoutingKey:
    return RoutingKey(prefix=rng.randrange(KEYS) << 40, session=f"user-{rng.randrange(KEYS)}")


def create_constant_key(rng: random.Random) -> RoutingKey:
    return RoutingKey(prefix=7, session="one")


def create_fault_periods(rng: random.Random, until: float) -> tuple[FaultPeriod, ...]:
    """Create up to three faults, one after the other, that end before ``until``."""
    moments = sorted(rng.uniform(0.0, until) for _ in range(2 * rng.randrange(4)))
    pairs = zip(moments[::2], moments[1::2], strict=True)
    return tuple(
        FaultPeriod(rng.choice(KINDS), start, end, rng.choice([0.3, 1.0, 5.0]))
        for start, end in pairs
    )


def create_workers(seed: int) -> tuple[list[SimulatedWorker], random.Random]:
    """Create random workers whose faults end at 20 s."""
    rng = random.Random(seed)
    sites = [
        SimulatedWorker(
            first=rng.choice([0.02, 0.1, 0.5]),
            rest=rng.choice([0.0, 1.0, 5.0]),
            weight=rng.choice([1.0, 1.0, 3.0]),
            places=rng.choice([None, None, 2, 8]),
            max_concurrency=rng.choice([None, None, 3]),
            spells=create_fault_periods(rng, 20.0),
        )
        for _ in range(rng.randint(1, 6))
    ]
    return sites, rng


def count_between(moments: list[float], start: float, end: float) -> int:
    """Return how many times lie after ``start``, up to ``end``."""
    return bisect(moments, end) - bisect(moments, start)


# ── any faults ────────────────────────────────────────────────────────────────────────────────────


@every_policy
def test_every_request_ends_and_leaves_no_request_in_flight(policy: PolicyName) -> None:
    for seed in range(SEEDS):
        sites, rng = create_workers(seed)
        fleet = PoolSimulation(sites, policy, seed, probing=rng.choice([None, 2.0]))

        fleet.run(rate=4.0, until=30.0, ask=create_random_key)

        assert all(call.outcome is not None for call in fleet.calls), seed
        assert not any(one.in_flight for one in fleet.members), seed
        assert sum(not one.again for one in fleet.picks) >= sum(
            call.outcome != "queue" for call in fleet.calls
        ), seed
        for call in fleet.calls:
            assert len(call.tried) <= 3, seed


@every_policy
def test_retries_stay_within_the_retry_budget(policy: PolicyName) -> None:
    """The budget is a fifth of the requests of ten seconds, plus three, within a tenth."""
    for seed in range(SEEDS // 2):
        rng = random.Random(seed)
        broken = FaultPeriod(rng.choice(["dead", "error"]), rng.uniform(0.0, 9.0), 99.0)
        sites = [SimulatedWorker(spells=(broken,)) for _ in range(rng.randint(2, 5))]
        fleet = PoolSimulation(sites, policy, seed)

        fleet.run(rate=rng.uniform(1.0, 12.0), until=20.0, ask=create_random_key)

        firsts = [one.at for one in fleet.picks if not one.again]
        tries = [one.at for one in fleet.picks if one.again]
        assert tries, seed
        for moment in tries:
            request_count = count_between(firsts, moment - 10.1, moment)
            assert count_between(tries, moment - 8.9, moment) <= 3 + 0.2 * request_count, (
                seed,
                moment,
            )


@every_policy
@pytest.mark.parametrize("kind", ["dead", "hang", "error"])
@pytest.mark.parametrize("probing", [None, 3.0], ids=["unprobed", "probed"])
def test_all_workers_return_to_rotation_after_an_outage(
    policy: PolicyName, kind: Kind, probing: float | None
) -> None:
    """Every request succeeds from half a minute after the outage, the longest ejection.

    A worker that failed its trials may be ejected for longer, at most for twice the outage.
    """
    for seed in range(6):
        rng = random.Random(seed)
        death = rng.uniform(1.0, 10.0)
        life = death + rng.choice([1.0, 20.0, 60.0])
        ends = [life + rng.uniform(0.0, 2.0) for _ in range(rng.randint(1, 5))]
        sites = [SimulatedWorker(spells=(FaultPeriod(kind, death, end),)) for end in ends]
        fleet = PoolSimulation(sites, policy, seed, probing=probing)

        fleet.run(rate=4.0, until=life + 160.0, ask=create_random_key)

        assert fleet.outcomes(life + 35.0).keys() == {"done"}, seed
        assert all(one.health.get_state(fleet.now) == "up" for one in fleet.members), seed
        assert len(fleet.shares(life + 130.0)) == len(sites), seed


@every_policy
@pytest.mark.parametrize("kind", ["dead", "hang", "error"])
def test_single_failing_worker_is_removed_from_rotation(policy: PolicyName, kind: Kind) -> None:
    """Failed requests are retried elsewhere, and the worker soon gets hardly any."""
    for seed in range(10):
        bad = SimulatedWorker(spells=(FaultPeriod(kind, 0.0, 999.0),))
        fleet = PoolSimulation([bad, SimulatedWorker(), SimulatedWorker()], policy, seed)

        fleet.run(rate=20.0, until=30.0, ask=create_random_key)

        outcomes = fleet.outcomes()
        assert outcomes["done"] >= 0.97 * outcomes.total(), (seed, outcomes)
        late = fleet.shares(start=10.0)
        assert late[0] <= 0.02 * late.total(), (seed, late)


@every_policy
def test_intermittently_failing_worker_is_ejected_by_failure_rate(policy: PolicyName) -> None:
    """Three of ten requests fail, so two hundred consecutive successes are improbable."""
    breaker = CircuitBreakerSettings(consecutive_failures=200, failure_rate=0.2)
    for seed in range(10):
        sites = [
            SimulatedWorker(),
            SimulatedWorker(),
            SimulatedWorker(spells=(FaultPeriod("error", 0.0, 999.0, 0.3),)),
        ]
        fleet = PoolSimulation(sites, policy, seed, breaker=breaker)

        fleet.run(rate=30.0, until=60.0, ask=create_random_key)

        shares, outcomes = fleet.shares(), fleet.outcomes()
        assert shares[2] <= 0.15 * shares.total(), (seed, shares)
        assert outcomes["done"] >= 0.995 * outcomes.total(), (seed, outcomes)


# ── load balancing ────────────────────────────────────────────────────────────────────────────────


@every_policy
def test_every_healthy_worker_receives_requests_regularly(policy: PolicyName) -> None:
    """No healthy worker waits long for its next request."""
    for seed in range(SEEDS // 2):
        rng = random.Random(seed)
        size = rng.randint(1, 6)
        fleet = PoolSimulation([SimulatedWorker() for _ in range(size)], policy, seed)

        fleet.run(rate=5.0 * size, until=10.0, ask=create_random_key)

        assert len(fleet.shares()) == size, seed
        last = Counter[int]()
        for n, one in enumerate(fleet.picks):
            assert n - last[one.key] <= 30 * size, (seed, n)
            last[one.key] = n


@pytest.mark.parametrize(
    ("policy", "most"), [("round_robin", 0), ("least_load", 0), ("two_choices", 6)]
)
def test_load_is_proportional_to_the_weights(policy: PolicyName, most: float) -> None:
    """While no request ends, the load is the number of requests sent."""
    for seed in range(SEEDS // 4):
        rng = random.Random(seed)
        weights = [rng.randint(1, 4) for _ in range(rng.randint(2, 6))]
        fleet = PoolSimulation(
            [SimulatedWorker(first=1e6, weight=one) for one in weights], policy, seed
        )

        fleet.run(rate=30.0, until=10.0, ask=create_random_key)

        rounds = len(fleet.picks) / sum(weights)
        for key, count in fleet.shares().items():
            assert abs(count - rounds * weights[key]) <= weights[key] + 1 + most, (seed, key)


@pytest.mark.parametrize(("policy", "bound"), [("prefix", 1.25), ("session", 1.5)])
@pytest.mark.parametrize("ask", [create_random_key, create_constant_key])
def test_hot_key_keeps_every_worker_within_the_load_bound(
    policy: PolicyName, bound: float, ask: Callable[[random.Random], RoutingKey]
) -> None:
    for seed in range(SEEDS // 4):
        size = random.Random(seed).randint(2, 6)
        fleet = PoolSimulation([SimulatedWorker(rest=1.0) for _ in range(size)], policy, seed)

        fleet.run(rate=8.0 * size, until=8.0, ask=ask)

        for pick in fleet.picks:
            part = (1 + sum(pick.in_flight)) / size
            assert pick.in_flight[pick.key] + 1 <= max(2, math.ceil(bound * part)), seed


@pytest.mark.parametrize("policy", ["prefix", "session"])
def test_key_stays_on_its_worker_while_capacity_is_free(policy: PolicyName) -> None:
    for seed in range(SEEDS // 8):
        fleet = PoolSimulation([SimulatedWorker(rest=0.2) for _ in range(4)], policy, seed)

        fleet.run(rate=8.0, until=30.0, ask=create_random_key)

        homes: dict[int | str | None, Counter[int]] = {}
        for pick in fleet.picks:
            ask = pick.call.ask
            key = ask.prefix if policy == "prefix" else ask.session
            homes.setdefault(key, Counter())[pick.key] += 1
        at_home = sum(count.most_common(1)[0][1] for count in homes.values())
        assert at_home >= 0.8 * len(fleet.picks), seed
        assert len({count.most_common(1)[0][0] for count in homes.values()}) == 4, seed


def test_two_choices_prefers_the_faster_worker() -> None:
    for seed in range(SEEDS // 8):
        fleet = PoolSimulation(
            [SimulatedWorker(first=0.05), SimulatedWorker(first=0.5)], "two_choices", seed
        )

        fleet.run(rate=10.0, until=60.0, ask=create_random_key)

        shares = fleet.shares()
        assert shares[0] >= 0.85 * shares.total(), (seed, shares)
        assert shares[1] >= 3, (
            "the slower worker gets some requests, since it may have become faster"
        )


def test_slow_worker_loses_traffic_and_regains_load_after_recovery() -> None:
    for seed in range(SEEDS // 20):
        slow = SimulatedWorker(spells=(FaultPeriod("slow", 20.0, 50.0, 10.0),))
        fleet = PoolSimulation([slow, SimulatedWorker()], "two_choices", seed)

        fleet.run(rate=20.0, until=110.0, ask=create_random_key)

        before, during, after = fleet.shares(0, 20), fleet.shares(22, 50), fleet.shares(80, 110)
        assert 0.35 <= before[0] / before.total() <= 0.65, (seed, before)
        assert during[0] / during.total() <= 0.15, (seed, during)
        assert 0.35 <= after[0] / after.total() <= 0.65, (seed, after)


# ── limits ──────────────────────────────────────────────────────────────────────────────────────


@every_policy
def test_worker_that_returns_429_gets_less_load_and_stays_in_rotation(policy: PolicyName) -> None:
    for seed in range(SEEDS // 40):
        fleet = PoolSimulation(
            [SimulatedWorker(max_concurrency=4, rest=1.0), SimulatedWorker(rest=1.0)], policy, seed
        )

        fleet.run(rate=30.0, until=60.0, ask=create_random_key)

        shares, outcomes = fleet.shares(), fleet.outcomes()
        assert fleet.members[0].health.get_state(fleet.now) == "up"
        assert shares[0] >= 60, (seed, shares)
        assert fleet.attempts_by_worker[0] <= 0.2 * shares[0], (
            seed,
            fleet.attempts_by_worker,
            shares,
        )
        assert outcomes["done"] >= 0.99 * outcomes.total(), (seed, outcomes)


# ── slow start ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["round_robin", "least_load", "prefix", "session"])
def test_recovered_worker_gets_slow_start(policy: PolicyName) -> None:
    """Its share grows from a tenth to all in half a minute."""
    early, late, full = Counter[int](), Counter[int](), Counter[int]()
    for seed in range(10):
        sites = [
            SimulatedWorker(spells=(FaultPeriod("error", 0.0, 14.0),)),
            SimulatedWorker(),
            SimulatedWorker(),
        ]
        fleet = PoolSimulation(sites, policy, seed).run(
            rate=40.0, until=60.0, ask=create_random_key
        )
        [back] = [one.at for one in fleet.picks if one.key == 0 and one.at > 14.0][:1]
        early += fleet.shares(back + 1.0, back + 7.0)
        late += fleet.shares(back + 20.0, back + 26.0)
        full += fleet.shares(back + 32.0)

    parts = [count[0] / count.total() for count in (early, late, full)]
    assert parts[0] < 0.6 * parts[1] < 0.6 * parts[2], parts
    assert parts[2] == pytest.approx(1 / 3, abs=0.12), parts
