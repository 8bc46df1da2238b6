"""Intervals: what others print for the same numbers, and how often they hold the truth."""

import math
import random

import pytest

from gateway.tools.ab.intervals import Interval, apart, by_order, unlikely, welch, wilson
from gateway.tools.ab.samples import Mean, Values

TRIALS = 2000


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_is_the_one_that_newcombe_prints(
    hits: int, of: int, low: float, high: float
) -> None:
    found = wilson(hits, of, 0.95)
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)
    assert found.value == hits / of


@pytest.mark.parametrize(
    ("b", "a", "low", "high"),
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((10, 10), (0, 10), 0.6075, 1.0000),
    ],
)
def test_the_difference_of_shares_is_newcombes(
    b: tuple[int, int], a: tuple[int, int], low: float, high: float
) -> None:
    found = apart(wilson(*a, 0.95), wilson(*b, 0.95))
    assert found.value == pytest.approx(b[0] / b[1] - a[0] / a[1])
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)


def test_welchs_is_students_where_both_are_alike() -> None:
    found = welch(Mean(10, 5.0, 1.0), Mean(10, 6.0, 1.0), 0.95)
    half = 2.10092204024096 * math.sqrt(0.2)
    assert found is not None
    assert found.value == 1.0
    assert found.low == pytest.approx(1 - half, abs=1e-6)
    assert found.high == pytest.approx(1 + half, abs=1e-6)


def test_welchs_freedom_is_that_of_the_one_that_varies() -> None:
    found = welch(Mean(5, 0.0, 4.0), Mean(10**6, 0.0, 1e-9), 0.95)
    assert found is not None
    assert found.high == pytest.approx(2.7764451051978 * math.sqrt(4 / 5), abs=1e-6)


def test_what_does_not_vary_leaves_no_doubt() -> None:
    assert welch(Mean(3, 1.0, 0.0), Mean(3, 2.5, 0.0), 0.95) == Interval(1.5, 1.5, 1.5)


@pytest.mark.parametrize("few", [None, Mean(1, 2.0, 0.0)])
def test_of_one_value_no_spread_is_known(few: Mean | None) -> None:
    enough = Mean(9, 2.0, 1.0)
    assert welch(few, enough, 0.95) is None
    assert welch(enough, few, 0.95) is None


def values(found: list[float]) -> Values:
    sample = Values()
    sample.extend(found)
    return sample


def test_a_median_lies_between_its_neighbours() -> None:
    found = by_order(values([float(n) for n in range(100, 0, -1)]), 0.5, 0.95)
    assert found is not None
    assert found.value == 50.5
    assert found.low == pytest.approx(40.7, abs=1e-3)
    assert found.high == pytest.approx(60.3, abs=1e-3)


@pytest.mark.parametrize(
    ("n", "p", "known"),
    [(0, 0.5, False), (3, 0.5, False), (4, 0.5, True), (72, 0.95, False), (74, 0.95, True)],
)
def test_of_few_values_no_quantile_is_sure(n: int, p: float, *, known: bool) -> None:
    found = by_order(values([float(k) for k in range(n)]), p, 0.95)
    assert (found is not None) == known


def test_an_interval_is_clear_when_it_leaves_out_0() -> None:
    assert Interval(1.0, 0.1, 2.0).clear
    assert Interval(-1.0, -2.0, -0.1).clear
    assert not Interval(1.0, 0.0, 2.0).clear


def test_counts_are_held_against_their_weights() -> None:
    assert unlikely([90, 10], [90, 10]) == 1.0
    assert unlikely([80, 20], [90, 10]) == pytest.approx(math.erfc(math.sqrt(100 / 9 / 2)))
    assert unlikely([30, 30, 60], [1, 1, 1]) == pytest.approx(math.exp(-15 / 2))


# --- how often they hold the truth ----------------------------------------------------------------


def band(trials: int) -> float:
    """Four standard deviations of how often 95 % of so many trials succeed."""
    return 4 * math.sqrt(0.95 * 0.05 / trials)


def covered(found: list[Interval], truth: float) -> float:
    return sum(one.low <= truth <= one.high for one in found) / len(found)


def test_newcombes_holds_the_truth_as_often_as_it_says() -> None:
    luck = random.Random(1)

    def hits(of: int, share: float) -> int:
        return sum(luck.random() < share for _ in range(of))

    found = [
        apart(wilson(hits(120, 0.1), 120, 0.95), wilson(hits(40, 0.25), 40, 0.95))
        for _ in range(TRIALS)
    ]
    assert covered(found, 0.15) == pytest.approx(0.95, abs=band(TRIALS))


def test_welchs_does() -> None:
    luck = random.Random(2)

    def drawn(n: int, mean: float, spread: float) -> Mean | None:
        return values([luck.gauss(mean, spread) for _ in range(n)]).mean()

    found = [welch(drawn(8, 0.0, 1.0), drawn(25, 2.0, 4.0), 0.95) for _ in range(500)]
    known = [one for one in found if one is not None]
    assert len(known) == 500
    assert covered(known, 2.0) == pytest.approx(0.95, abs=band(500))


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_that_of_quantiles_does(p: float) -> None:
    luck = random.Random(3)
    truth = -math.log(1 - p)

    def drawn(n: int, scale: float) -> Interval:
        found = by_order(values([scale * luck.expovariate(1.0) for _ in range(n)]), p, 0.95)
        assert found is not None
        return found

    found = [apart(drawn(150, 1.0), drawn(60, 2.0)) for _ in range(TRIALS)]
    assert covered(found, truth) == pytest.approx(0.955, abs=band(TRIALS) + 0.005)


def test_an_even_split_is_called_unlikely_as_seldom_as_it_is() -> None:
    luck = random.Random(4)
    found = []
    for _ in range(TRIALS):
        b = sum(luck.random() < 0.1 for _ in range(200))
        found.append(unlikely([200 - b, b], [90, 10]) < 0.05)
    assert sum(found) / TRIALS == pytest.approx(0.05, abs=band(TRIALS))
