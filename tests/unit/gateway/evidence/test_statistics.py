"""Intervals equal published values, and cover the true value as often as stated."""

import math
import random

import pytest

from gateway.evidence.statistics import (
    BucketSample,
    ExactSample,
    Interval,
    Mean,
    chi_square_p_value,
    chi_square_tail,
    difference_interval,
    normal_quantile,
    quantile_interval,
    t_cdf,
    t_quantile,
    welch_interval,
    wilson_interval,
)
from gateway.observability.stats import DURATION_BUCKETS

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
def test_wilson_interval_matches_published_values(
    hits: int, of: int, low: float, high: float
) -> None:
    interval = wilson_interval(hits, of, 0.95)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)
    assert interval.value == hits / of


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
def test_difference_interval_matches_published_newcombe_values(
    b: tuple[int, int], a: tuple[int, int], low: float, high: float
) -> None:
    interval = difference_interval(wilson_interval(*a, 0.95), wilson_interval(*b, 0.95))
    assert interval.value == pytest.approx(b[0] / b[1] - a[0] / a[1])
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


def test_welch_interval_equals_student_for_equal_variances() -> None:
    interval = welch_interval(Mean(10, 5.0, 1.0), Mean(10, 6.0, 1.0), 0.95)
    half = 2.10092204024096 * math.sqrt(0.2)

    assert interval is not None
    assert interval.value == 1.0
    assert interval.low == pytest.approx(1 - half, abs=1e-6)
    assert interval.high == pytest.approx(1 + half, abs=1e-6)


def test_welch_degrees_of_freedom_follow_the_varying_sample() -> None:
    interval = welch_interval(Mean(5, 0.0, 4.0), Mean(10**6, 0.0, 1e-9), 0.95)
    assert interval is not None
    assert interval.high == pytest.approx(2.7764451051978 * math.sqrt(4 / 5), abs=1e-6)


def test_welch_interval_of_constant_samples_has_zero_width() -> None:
    assert welch_interval(Mean(3, 1.0, 0.0), Mean(3, 2.5, 0.0), 0.95) == Interval(1.5, 1.5, 1.5)


@pytest.mark.parametrize("few", [None, Mean(1, 2.0, 0.0)])
def test_welch_interval_needs_at_least_two_values(few: Mean | None) -> None:
    enough = Mean(9, 2.0, 1.0)
    assert welch_interval(few, enough, 0.95) is None
    assert welch_interval(enough, few, 0.95) is None


def make_exact_sample(values: list[float]) -> ExactSample:
    sample = ExactSample()
    sample.extend(values)
    return sample


def test_median_interval_matches_known_values() -> None:
    interval = quantile_interval(
        make_exact_sample([float(n) for n in range(100, 0, -1)]), 0.5, 0.95
    )
    assert interval is not None
    assert interval.value == 50.5
    assert interval.low == pytest.approx(40.7, abs=1e-3)
    assert interval.high == pytest.approx(60.3, abs=1e-3)


@pytest.mark.parametrize(
    ("n", "p", "has_interval"),
    [(0, 0.5, False), (3, 0.5, False), (4, 0.5, True), (72, 0.95, False), (74, 0.95, True)],
)
def test_quantile_interval_needs_enough_values(n: int, p: float, *, has_interval: bool) -> None:
    interval = quantile_interval(make_exact_sample([float(k) for k in range(n)]), p, 0.95)
    assert (interval is not None) == has_interval


def test_interval_excludes_zero() -> None:
    assert Interval(1.0, 0.1, 2.0).excludes_zero
    assert Interval(-1.0, -2.0, -0.1).excludes_zero
    assert not Interval(1.0, 0.0, 2.0).excludes_zero


def test_chi_square_p_value_matches_known_values() -> None:
    assert chi_square_p_value([90, 10], [90, 10]) == 1.0
    assert chi_square_p_value([80, 20], [90, 10]) == pytest.approx(
        math.erfc(math.sqrt(100 / 9 / 2))
    )
    assert chi_square_p_value([30, 30, 60], [1, 1, 1]) == pytest.approx(math.exp(-15 / 2))


# --- coverage -------------------------------------------------------------------------------------


def compute_tolerance(trials: int) -> float:
    """Return four standard deviations of the share of trials that cover the true value (95 %)."""
    return 4 * math.sqrt(0.95 * 0.05 / trials)


def compute_coverage(intervals: list[Interval], truth: float) -> float:
    return sum(one.low <= truth <= one.high for one in intervals) / len(intervals)


def test_newcombe_interval_has_its_nominal_coverage() -> None:
    rng = random.Random(1)

    def hits(of: int, share: float) -> int:
        return sum(rng.random() < share for _ in range(of))

    intervals = [
        difference_interval(
            wilson_interval(hits(120, 0.1), 120, 0.95), wilson_interval(hits(40, 0.25), 40, 0.95)
        )
        for _ in range(TRIALS)
    ]

    assert compute_coverage(intervals, 0.15) == pytest.approx(0.95, abs=compute_tolerance(TRIALS))


def test_welch_interval_has_its_nominal_coverage() -> None:
    rng = random.Random(2)

    def drawn(n: int, mean: float, spread: float) -> Mean | None:
        return make_exact_sample([rng.gauss(mean, spread) for _ in range(n)]).mean()

    intervals = [welch_interval(drawn(8, 0.0, 1.0), drawn(25, 2.0, 4.0), 0.95) for _ in range(500)]
    computed = [one for one in intervals if one is not None]

    assert len(computed) == 500
    assert compute_coverage(computed, 2.0) == pytest.approx(0.95, abs=compute_tolerance(500))


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_quantile_difference_interval_has_its_nominal_coverage(p: float) -> None:
    rng = random.Random(3)
    truth = -math.log(1 - p)

    def drawn(n: int, scale: float) -> Interval:
        interval = quantile_interval(
            make_exact_sample([scale * rng.expovariate(1.0) for _ in range(n)]), p, 0.95
        )
        assert interval is not None
        return interval

    intervals = [difference_interval(drawn(150, 1.0), drawn(60, 2.0)) for _ in range(TRIALS)]
    assert compute_coverage(intervals, truth) == pytest.approx(
        0.955, abs=compute_tolerance(TRIALS) + 0.005
    )


def test_chi_square_test_has_its_nominal_false_positive_rate() -> None:
    rng = random.Random(4)
    p_values = []

    for _ in range(TRIALS):
        b = sum(rng.random() < 0.1 for _ in range(200))
        p_values.append(chi_square_p_value([200 - b, b], [90, 10]) < 0.05)

    assert sum(p_values) / TRIALS == pytest.approx(0.05, abs=compute_tolerance(TRIALS))


# --- distributions, against tabulated values ------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "wanted"),
    [
        (0.5, 0.0),
        (0.9, 1.2815515655446004),
        (0.95, 1.6448536269514722),
        (0.975, 1.959963984540054),
        (0.995, 2.5758293035489004),
        (0.9995, 3.2905267314919255),
        (0.025, -1.959963984540054),
    ],
)
def test_normal_quantile_matches_tabulated_values(p: float, wanted: float) -> None:
    assert normal_quantile(p) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("p", "freedom", "wanted"),
    [
        (0.975, 1, 12.706204736432095),
        (0.975, 2, 4.302652729911275),
        (0.975, 5, 2.570581836614739),
        (0.975, 10, 2.2281388519649385),
        (0.975, 30, 2.0422724563012373),
        (0.975, 120, 1.9799304050824413),
        (0.95, 7, 1.894578605061305),
        (0.995, 15, 2.946712883338615),
        (0.9995, 4, 8.610301581379272),
        (0.025, 5, -2.570581836614739),
        (0.5, 3, 0.0),
    ],
)
def test_t_quantile_matches_tabulated_values(p: float, freedom: float, wanted: float) -> None:
    assert t_quantile(p, freedom) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("freedom", [1.0, 2.5, 40.0, 1e4])
@pytest.mark.parametrize("p", [0.5001, 0.6, 0.9, 0.999])
def test_t_cdf_inverts_t_quantile(p: float, freedom: float) -> None:
    assert t_cdf(t_quantile(p, freedom), freedom) == pytest.approx(p, abs=1e-9)


def test_t_quantile_approaches_the_normal_quantile() -> None:
    assert t_quantile(0.975, 1e6) == pytest.approx(1.959966, abs=1e-6)


@pytest.mark.parametrize(
    ("x", "freedom", "wanted"),
    [
        (0.0, 3, 1.0),
        (0.016, 1, 0.8993431885613662),
        (3.841458820694124, 1, 0.05),
        (10.827566170662733, 1, 0.001),
        (5.991464547107979, 2, 0.05),
        (18.307038053275146, 10, 0.05),
        (4.865182051925326, 10, 0.9),
        (30.0, 3, 1.380057031249e-06),
    ],
)
def test_chi_square_tail_matches_tabulated_values(x: float, freedom: int, wanted: float) -> None:
    assert chi_square_tail(x, freedom) == pytest.approx(wanted, rel=1e-9)


# --- samples --------------------------------------------------------------------------------------


def make_bucket_sample(*values: float, edges: tuple[float, ...] = (1.0, 2.0, 4.0)) -> BucketSample:
    sample = BucketSample(edges)
    sample.extend(values)
    return sample


def test_exact_sample_computes_quantiles_of_unsorted_values() -> None:
    sample = ExactSample()
    assert (sample.n, sample.mean()) == (0, None)

    sample.extend([3.0, 1.0, 2.0])
    assert [sample.quantile(p) for p in (0.0, 0.5, 1.0)] == [1.0, 2.0, 3.0]

    sample.extend([0.0])
    assert sample.quantile(0.5) == 1.5

    mean = sample.mean()
    assert mean is not None
    assert (mean.n, mean.value) == (4, 1.5)
    assert mean.variance == pytest.approx(5 / 3)


def test_single_value_has_zero_variance() -> None:
    sample = ExactSample()
    sample.extend([3.0])

    mean = sample.mean()

    assert mean is not None
    assert (mean.value, mean.variance) == (3.0, 0.0)


def test_bucket_sample_interpolates_linearly() -> None:
    sample = make_bucket_sample(0.5, 1.5, 1.5, 3.0)
    assert sample.quantile(0.25) == 1.0
    assert sample.quantile(0.5) == 1.5
    assert sample.quantile(1.0) == 4.0

    mean = sample.mean()
    assert mean is not None
    assert mean.value == 6.5 / 4
    assert make_bucket_sample().mean() is None


def test_bucket_sample_is_unbounded_above_the_last_bucket() -> None:
    sample = make_bucket_sample(0.5, 9.0)
    assert sample.quantile(0.9) == 4.0
    assert sample.quantile_bounds(0.1, 0.9) == (0.0, math.inf)
    assert sample.quantile_bounds(0.1, 0.4) == (0.0, 1.0)


def test_bucket_sample_variance_approximates_the_exact_variance() -> None:
    values = [-math.log(1 - (k + 0.5) / 300) for k in range(300)]
    exact, rough = ExactSample(), make_bucket_sample(*values, edges=DURATION_BUCKETS)
    exact.extend(values)

    one, other = exact.mean(), rough.mean()

    assert one is not None
    assert other is not None
    assert other.value == pytest.approx(one.value)
    assert other.variance == pytest.approx(one.variance, rel=0.1)
