"""The test of feedback holds its error rate however often one looks, and finds a worse version."""

import math
import random

import pytest

from gateway.tools.ab.statistics import (
    Mean,
    required_for_sequential,
    required_per_version,
    sequential_interval,
    share_mean,
    welch_interval,
)

ERROR_RATE = 0.05
RUNS = 200
ALLOWED = 17
"""Of 200 runs with an error rate of 5 %, more than 17 are flagged with a probability of 1.3 %."""


def is_flagged(rng: random.Random, a: float, b: float, size: int, weight: float = 0.5) -> bool:
    """Whether a test of two shares excludes 0 at any of the looks, one after every value."""
    hits, counts, shares = [0, 0], [0, 0], (a, b)
    for _ in range(size):
        version = int(rng.random() < weight)
        counts[version] += 1
        hits[version] += rng.random() < shares[version]
        if min(counts) > 1:
            first, second = map(share_mean, hits, counts)
            if sequential_interval(first, second, 1 - ERROR_RATE).excludes_zero:
                return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "weight"), [(0.5, 0.5), (0.03, 0.5), (0.97, 0.5), (0.9, 0.1), (0.3, 0.9)]
)
def test_equal_versions_are_flagged_rarely_under_continuous_peeking(
    share: float, weight: float
) -> None:
    rng = random.Random(20261123)
    flagged = sum(is_flagged(rng, share, share, 2000, weight) for _ in range(RUNS))
    assert flagged <= ALLOWED


@pytest.mark.slow
def test_equal_versions_are_flagged_rarely_with_skewed_numbers() -> None:
    rng = random.Random(7)
    flagged = 0
    for _ in range(RUNS):
        sums, squares, counts = [0.0, 0.0], [0.0, 0.0], [0, 0]
        for _ in range(1500):
            version, value = int(rng.random() < 0.5), rng.expovariate(1.0)
            counts[version] += 1
            sums[version] += value
            squares[version] += value * value
            if min(counts) > 1:
                a, b = (
                    Mean(n, total / n, (square - total * total / n) / (n - 1))
                    for n, total, square in zip(counts, sums, squares, strict=True)
                )
                if sequential_interval(a, b, 1 - ERROR_RATE).excludes_zero:
                    flagged += 1
                    break
    assert flagged <= ALLOWED


def test_interval_for_one_look_is_flagged_far_too_often_under_peeking() -> None:
    rng, flagged = random.Random(3), 0
    for _ in range(60):
        sums, counts = [0.0, 0.0], [0, 0]
        for n in range(2000):
            version = n % 2
            counts[version] += 1
            sums[version] += rng.random() < 0.5
            if n % 100 == 99:
                a, b = (share_mean(hits, count) for hits, count in zip(sums, counts, strict=True))
                interval = welch_interval(a, b, 1 - ERROR_RATE)
                if interval is not None and interval.excludes_zero:
                    flagged += 1
                    break
    assert flagged > 60 * 0.2


def test_version_with_3_percent_worse_feedback_is_found() -> None:
    rng = random.Random(11)
    flagged = sum(is_flagged(rng, 0.92, 0.89, 14000) for _ in range(20))
    assert flagged >= 16


def test_interval_covers_the_true_difference_at_every_look() -> None:
    rng, misses = random.Random(5), 0
    for _ in range(100):
        hits, counts, shares = [0, 0], [0, 0], (0.6, 0.5)
        for n in range(1500):
            version = n % 2
            counts[version] += 1
            hits[version] += rng.random() < shares[version]
            if n > 2:
                first, second = map(share_mean, hits, counts)
                interval = sequential_interval(first, second, 1 - ERROR_RATE)
                if not interval.low <= -0.1 <= interval.high:
                    misses += 1
                    break
    assert misses <= 10


def test_width_is_that_of_the_normal_mixture() -> None:
    # sigma * sqrt(2 (t rho^2 + 1) / (t^2 rho^2) * log(sqrt(t rho^2 + 1) / alpha)), with the
    # effective size t = 1 / (1 / n_a + 1 / n_b) and rho^2 tuned for 1,000 values per version
    a, b, alpha = Mean(400, 0.0, 2.0), Mean(1200, 1.0, 2.0), 0.05
    t = 300.0
    rho2 = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha) + 1)) / 500
    width = math.sqrt(
        2.0 * 2 * (t * rho2 + 1) / (t * t * rho2) * math.log(math.sqrt(t * rho2 + 1) / alpha)
    )
    interval = sequential_interval(a, b, 1 - alpha)
    assert interval.value == 1.0
    assert math.isclose(interval.high - 1.0, width)
    assert math.isclose(1.0 - interval.low, width)


def test_sequential_plan_asks_for_more_values_than_one_for_one_look() -> None:
    for variance, difference in ((0.09, 0.03), (0.25, 0.01), (4.0, 1.0)):
        one = required_per_version(variance, difference, 0.95)
        sequential = required_for_sequential(variance, difference, 0.95)
        assert one < sequential < 8 * one


def test_planned_size_finds_the_difference_with_the_stated_probability() -> None:
    size = required_for_sequential(0.5 * (0.8 * 0.2 + 0.7 * 0.3), 0.1, 0.95)
    rng = random.Random(2)
    flagged = sum(is_flagged(rng, 0.8, 0.7, 2 * size) for _ in range(60))
    assert flagged >= 48
