"""Intervals of feedback hold their error rate however often one looks, and find a worse version."""

import math
import random

import pytest

from gateway.evidence.sequential import (
    Tally,
    count_superior,
    rate_difference_interval,
    rate_interval,
    required_per_side,
    superiority_interval,
)
from gateway.evidence.statistics import Mean, required_per_version, welch_interval

ERROR_RATE = 0.05
RUNS = 200
ALLOWED = 17
"""Of 200 runs with an error rate of 5 %, more than 17 are flagged with a probability of 1.3 %."""


def test_interval_for_one_look_is_flagged_far_too_often_under_peeking() -> None:
    rng, flagged = random.Random(3), 0
    for _ in range(60):
        sums, counts = [0.0, 0.0], [0, 0]
        for n in range(2000):
            version = n % 2
            counts[version] += 1
            sums[version] += rng.random() < 0.5
            if n % 100 == 99:
                a, b = (
                    Mean(count, hits / count, hits / count * (1 - hits / count))
                    for hits, count in zip(sums, counts, strict=True)
                )
                interval = welch_interval(a, b, 1 - ERROR_RATE)
                if interval is not None and interval.excludes_zero:
                    flagged += 1
                    break

    assert flagged > 60 * 0.2


@pytest.mark.parametrize("shares", [(0.6, 0.5), (0.02, 0.05), (0.99, 0.9)])
def test_interval_covers_the_true_difference_at_every_look(shares: tuple[float, float]) -> None:
    rng, misses = random.Random(5), 0
    for _ in range(25):
        hits, counts = [0, 0], [0, 0]
        for n in range(600):
            version = n % 2
            counts[version] += 1
            hits[version] += rng.random() < shares[version]
            if n % 50 == 49:
                a, b = (Tally(*pair) for pair in zip(hits, counts, strict=True))
                interval = rate_difference_interval(a, b, 1 - ERROR_RATE)
                if not interval.low <= shares[1] - shares[0] <= interval.high:
                    misses += 1
                    break

    assert misses <= 3


def test_ends_of_an_interval_are_the_claims_that_lose_just_enough() -> None:
    tally = Tally(30, 100)
    interval = rate_interval(tally, 0.95)
    assert interval.value == 0.3
    for end in (interval.low, interval.high):
        assert math.isclose(tally.log_wealth(end), math.log(20), rel_tol=1e-6)


def test_wealth_against_the_true_rate_is_fair() -> None:
    """Its mean over all outcomes of twelve values is 1: the bets are a martingale."""
    rate = 0.3
    mean = sum(
        math.comb(12, hits) * rate**hits * (1 - rate) ** (12 - hits)
        * math.exp(Tally(hits, 12).log_wealth(rate))
        for hits in range(13)
    )  # fmt: skip
    assert math.isclose(mean, 1.0)


@pytest.mark.parametrize("hits", [0, 10])
def test_rates_of_0_and_1_have_an_interval(hits: int) -> None:
    interval = rate_interval(Tally(hits, 10), 0.95)
    assert interval.low <= hits / 10 <= interval.high
    assert 0.2 < interval.high - interval.low < 0.6
    both = rate_difference_interval(Tally(hits, 10), Tally(hits, 10), 0.95)
    assert both.low < 0 < both.high


def test_numbers_are_compared_in_pairs_and_ties_count_half() -> None:
    assert count_superior([1.0, 2.0, 5.0], [1.0, 3.0, 4.0, 9.0]) == Tally(1.5, 3)
    assert superiority_interval([], [1.0], 0.95) is None
    interval = superiority_interval([1.0] * 40, [2.0] * 40, 0.95)
    assert interval is not None
    assert interval.low > 0.5


def test_sequential_plan_asks_for_more_values_than_one_for_one_look() -> None:
    for variance, difference in ((0.09, 0.03), (0.25, 0.01), (0.1, 0.2)):
        one = required_per_version(variance, difference, 0.95)
        sequential = required_per_side(variance, difference, 0.95)
        assert one < sequential < 8 * one
