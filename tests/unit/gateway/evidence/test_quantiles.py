"""Quantiles of times are compared at every moment, from counts in bins of 1 %."""

import math
import random
from collections.abc import Callable
from typing import Final

import pytest

from gateway.evidence.quantiles import TimeCounts, compare_quantiles, count_times, find_quantile

BUSY: Final = [0.1 + 0.001 * k for k in range(400)]


def scale(factor: float) -> TimeCounts:
    return count_times([factor * one for one in BUSY])


def test_bins_are_about_1_percent_wide_and_rise_with_the_time() -> None:
    bins = [next(iter(count_times([10 ** (n / 50)]))) for n in range(-400, 200)]
    assert bins == sorted(bins)
    assert min(bins) > 0
    assert find_quantile(count_times([0.2] * 10 + [3.0]), 0.5) == pytest.approx(0.2, rel=0.01)
    assert find_quantile(count_times([0.2] * 90 + [3.0] * 10), 0.95) == pytest.approx(3, rel=0.01)
    assert find_quantile(count_times([0.0]), 0.95) < 1e-5


@pytest.mark.parametrize("p", [0.5, 0.95])
@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_interval_holds_the_true_ratio_and_excludes_another(p: float, factor: float) -> None:
    low, high = compare_quantiles(scale(1), scale(factor), p, 0.95)
    assert low < factor - 1 < high
    assert (low > 0) == (factor >= 2)
    assert (high < 0) == (factor <= 0.5)


def test_interval_is_open_where_there_are_too_few_times() -> None:
    low, high = compare_quantiles(count_times([0.1] * 3), count_times([9.0] * 3), 0.95, 0.95)
    assert (low, high) == (-1.0, math.inf)
    assert compare_quantiles({}, scale(1), 0.5, 0.95) == (-1.0, math.inf)


def test_times_that_are_all_the_same_are_compared_too() -> None:
    same = count_times([0.5] * 2000)
    low, high = compare_quantiles(same, same, 0.5, 0.95)
    assert low <= 0 <= high
    assert high - low < 0.05
    low, high = compare_quantiles(same, count_times([1.0] * 2000), 0.5, 0.95)
    assert low == pytest.approx(1, abs=0.05)
    assert high == pytest.approx(1, abs=0.05)


DISTRIBUTIONS: Final[dict[str, Callable[[random.Random], float]]] = {
    "constant and exponential": lambda rng: 0.05 + rng.expovariate(10),
    "lognormal, sigma 1": lambda rng: 0.1 * math.exp(rng.gauss(0, 1)),
    "two values": lambda rng: rng.choice([0.1, 0.1, 0.1, 0.5]),
}


@pytest.mark.parametrize("p", [0.5, 0.95])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_equal_versions_rarely_differ_at_any_look(name: str, p: float) -> None:
    """20 runs of 300 times, in a machine that gets slower and faster; docs/evidence.md has more."""
    rng, alarms = random.Random(1), 0
    for _ in range(20):
        sides: tuple[list[float], list[float]] = ([], [])
        for n in range(300):
            drift = 2 - math.cos(n / 20)
            sides[rng.random() < 0.3].append(drift * DISTRIBUTIONS[name](rng))
            if n % 60 == 59:
                a, b = map(count_times, sides)
                low, high = compare_quantiles(a, b, p, 0.975)
                if low > 0 or high < 0:
                    alarms += 1
                    break
    assert alarms <= 1


def test_version_twice_as_slow_is_found_within_400_requests_by_the_median() -> None:
    rng, draw = random.Random(2), DISTRIBUTIONS["constant and exponential"]
    for _ in range(10):
        a, b = ([factor * draw(rng) for _ in range(200)] for factor in (1, 2))
        low, _ = compare_quantiles(count_times(a), count_times(b), 0.5, 0.99)
        assert low > 0.2
