"""Simulated series: equal versions are flagged rarely, and a worse one is found."""

import numpy as np
import pytest

from gateway.evidence.sequential import (
    Tally,
    rate_difference_interval,
    required_per_side,
)
from tests.evidence.simulations import (
    PAIRS_CELLS,
    RATE_CELLS,
    count_alarms_of_numbers,
    count_alarms_of_quantiles,
    count_alarms_of_rates,
    find_rate_alarms,
)

ERROR_RATE = 0.05
RUNS = 200
ALLOWED = 17
"""Of 200 runs with an error rate of 5 %, more than 17 are flagged with a probability of 1.3 %."""


@pytest.mark.parametrize("cell", [RATE_CELLS[2], RATE_CELLS[-2]], ids=str)
def test_equal_versions_are_flagged_rarely_under_continuous_peeking(
    cell: tuple[float, float],
) -> None:
    """Given a canary with a rare and with a common outcome, decided after each of 20,000 values."""
    assert count_alarms_of_rates(*cell, runs=RUNS) <= ALLOWED


def test_equal_versions_are_flagged_rarely_with_skewed_numbers() -> None:
    assert count_alarms_of_numbers(*PAIRS_CELLS[-1], runs=RUNS) <= ALLOWED


@pytest.mark.parametrize("p", [0.5, 0.95])
def test_equal_versions_are_flagged_rarely_by_their_quantiles(p: float) -> None:
    assert count_alarms_of_quantiles(0.1, p, runs=RUNS) <= ALLOWED


def test_simulations_decide_as_the_interval_does() -> None:
    """The vectorised form flags a run at the first value at which the interval excludes 0."""
    rng = np.random.default_rng(3)
    versions = rng.random((4, 500)) < 0.5
    values = rng.random((4, 500)) < np.where(versions, 0.85, 0.5)
    for row, alarm in enumerate(find_rate_alarms(versions, values)):
        hits, counts, first = [0, 0], [0, 0], -1
        for n in range(int(alarm) + 1):
            version = int(versions[row, n])
            counts[version] += 1
            hits[version] += int(values[row, n])
            if first < 0 and min(counts):
                a, b = (Tally(*pair) for pair in zip(hits, counts, strict=True))
                if rate_difference_interval(a, b, 1 - ERROR_RATE).excludes_zero:
                    first = n
        assert alarm == first
        assert first > 0


def test_version_with_3_percent_worse_feedback_is_found() -> None:
    rng = np.random.default_rng(11)
    versions = rng.random((20, 14000)) < 0.5
    values = rng.random((20, 14000)) < np.where(versions, 0.89, 0.92)
    assert (find_rate_alarms(versions, values) >= 0).sum() >= 16


def test_planned_size_finds_the_difference_with_the_stated_probability() -> None:
    size = required_per_side(0.5 * (0.8 * 0.2 + 0.7 * 0.3), 0.1, 0.95)
    rng = np.random.default_rng(2)
    versions = rng.random((60, 2 * size)) < 0.5
    values = rng.random((60, 2 * size)) < np.where(versions, 0.7, 0.8)

    assert (find_rate_alarms(versions, values) >= 0).sum() >= 48
