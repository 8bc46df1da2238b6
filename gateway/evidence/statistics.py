"""Samples, the distributions that intervals need, and the intervals. Pure.

Every interval is two-sided and holds the true value as often as ``confidence`` says.

The distributions are exact to about twelve digits. Source: Press et al., Numerical Recipes, 3rd
edition, 6.2 and 6.4: the incomplete gamma and beta functions by series and continued fractions,
evaluated by Lentz's method.
"""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import NormalDist
from typing import Final, Protocol

from msgspec import Struct

from backends.histogram import Histogram, bucket_quantile, find_bucket

_PRECISION: Final = 1e-14
_TINY: Final = 1e-300
_MIN_VALUES: Final = 2
"""The number of values from which a variance is known."""

# --- samples --------------------------------------------------------------------------------------


class Mean(Struct, frozen=True):
    """The mean of ``n`` values; ``variance`` is that of a single value."""

    n: int
    value: float
    variance: float


class Sample(Protocol):
    """The values of one measurement."""

    @property
    def n(self) -> int:
        """The number of values."""

    def mean(self) -> Mean | None:
        """The mean of the values; None if there are none."""

    def quantile(self, p: float) -> float:
        """The value below which the share ``p`` of the values lies. There is at least one value."""

    def quantile_bounds(self, low: float, high: float) -> tuple[float, float]:
        """Bounds of the quantiles from ``low`` to ``high``. There is at least one value."""


class ExactSample:
    """A sample that keeps every value."""

    def __init__(self, edges: tuple[float, ...] = ()) -> None:
        """``edges`` are not needed: a sample of buckets takes the same argument."""
        del edges
        self.values = array("d")
        """In the order in which they came."""
        self._sorted = array("d")

    def extend(self, values: Sequence[float]) -> None:
        """Add values."""
        self.values.extend(values)

    @property
    def n(self) -> int:
        """See Sample."""
        return len(self.values)

    def mean(self) -> Mean | None:
        """See Sample."""
        if not (n := self.n):
            return None
        value = sum(self.values) / n
        squares = sum((item - value) ** 2 for item in self.values)
        return Mean(n, value, squares / max(1, n - 1))

    def quantile(self, p: float) -> float:
        """Interpolate between two values, of which the k-th is the quantile (k - 1/2) / n.

        Source: Hyndman and Fan, The American Statistician 50 (1996), 361-365, definition 5.
        """
        if len(self._sorted) != self.n:
            self._sorted = array("d", sorted(self.values))
        last = self.n - 1
        position = min(max(p * (last + 1) - 0.5, 0.0), float(last))
        lower = int(position)
        upper = min(lower + 1, last)
        values = self._sorted
        return values[lower] + (position - lower) * (values[upper] - values[lower])

    def quantile_bounds(self, low: float, high: float) -> tuple[float, float]:
        """See Sample."""
        return self.quantile(low), self.quantile(high)


class BucketSample(Histogram):
    """A sample that keeps the number of values in each bucket, taken to be spread evenly in it."""

    def set_cumulative(self, cumulative: Mapping[float, int]) -> None:
        """Set the number of values up to each edge, of which the last is infinite.

        Raises ValueError if the numbers decrease or the last edge is missing.
        """
        *edges, last = sorted(cumulative)
        counts = [cumulative[edge] for edge in (*edges, last)]
        if last != math.inf or counts != sorted(counts):
            raise ValueError("the buckets are not complete")
        self.edges = tuple(edges)
        self.counts = [high - low for low, high in pairwise((0, *counts))]

    @property
    def n(self) -> int:
        """See Sample."""
        return sum(self.counts)

    def mean(self) -> Mean | None:
        """See Sample. For the variance, values above the last edge are taken to lie at it."""
        if not (n := self.n):
            return None
        midpoints = [(low + high) / 2 for low, high in self._bucket_edges()]
        widths = [high - low for low, high in self._bucket_edges()]
        centre = (
            sum(count * midpoint for count, midpoint in zip(self.counts, midpoints, strict=True))
            / n
        )
        squares = (
            count * ((midpoint - centre) ** 2 + width**2 / 12)
            for count, midpoint, width in zip(self.counts, midpoints, widths, strict=True)
        )
        return Mean(n, self.total / n, sum(squares) / n)

    def quantile(self, p: float) -> float:
        """See Sample. Values above the last edge are taken to lie at it."""
        value = bucket_quantile(self.edges, self.counts, p)
        if value is None:
            raise ValueError("there are no values")
        return value

    def quantile_bounds(self, low: float, high: float) -> tuple[float, float]:
        """See Sample: from the lower edge of the first bucket to the upper edge of the last."""
        edges = (0.0, *self.edges, math.inf)
        lowest, highest = (find_bucket(self.counts, p)[0] for p in (low, high))
        return edges[lowest], edges[highest + 1]

    def _bucket_edges(self) -> list[tuple[float, float]]:
        """The lower and upper edge of each bucket; the last bucket has no width."""
        return list(pairwise((0.0, *self.edges, self.edges[-1])))


# --- distributions ------------------------------------------------------------------------------


def normal_quantile(p: float) -> float:
    """The value below which a standard normal lies with probability ``p``, in (0, 1)."""
    return NormalDist().inv_cdf(p)


def t_quantile(p: float, freedom: float) -> float:
    """The value below which Student's t lies with probability ``p``, in (0, 1)."""
    if p < 0.5:  # noqa: PLR2004 - it is symmetric
        return -t_quantile(1 - p, freedom)
    high = 1.0
    while t_cdf(high, freedom) < p:
        high *= 2
    return _find_root(lambda t: t_cdf(t, freedom) - p, 0.0, high)


def t_cdf(t: float, freedom: float) -> float:
    """The probability that Student's t is below ``t``, which is at least 0."""
    return 1 - _beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2


def chi_square_tail(x: float, freedom: int) -> float:
    """The probability that chi-square is above ``x``, which is at least 0."""
    a, half = freedom / 2, x / 2
    if half < a + 1:
        return 1 - _gamma_series(a, half)
    factor = math.exp(a * math.log(half) - half - math.lgamma(a))
    return factor / _continued_fraction(
        half + 1 - a, lambda k: (-k * (k - a), half + 2 * k + 1 - a)
    )


def _gamma_series(a: float, x: float) -> float:
    """The lower incomplete gamma function, regularized."""
    if x == 0:
        return 0.0
    term = total = 1 / a
    k = 0
    while term >= total * _PRECISION:
        k += 1
        term *= x / (a + k)
        total += term
    return total * math.exp(a * math.log(x) - x - math.lgamma(a))


def _beta(a: float, b: float, x: float) -> float:
    """The incomplete beta function, regularized; ``x`` is in [0, 1]."""
    if x in (0, 1):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(b, a, 1 - x)
    log_factor = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    factor = math.exp(log_factor + a * math.log(x) + b * math.log1p(-x)) / a

    def step(n: int) -> tuple[float, float]:
        k = n // 2
        if n % 2:
            return -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1)), 1.0
        return k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k)), 1.0

    return factor / _continued_fraction(1.0, step)


def _continued_fraction(first: float, step: Callable[[int], tuple[float, float]]) -> float:
    """``first + a1 / (b1 + a2 / (b2 + …))``, where ``step`` gives the pairs (a, b)."""
    value = numerator = first
    denominator, ratio, k = 0.0, 0.0, 0
    while abs(ratio - 1) >= _PRECISION:
        k += 1
        a, b = step(k)
        denominator = 1 / (b + a * denominator or _TINY)
        numerator = b + a / numerator or _TINY
        ratio = numerator * denominator
        value *= ratio
    return value


def _find_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Find where an increasing function crosses 0 between ``low`` and ``high``, by bisection."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return high


# --- intervals ----------------------------------------------------------------------------------


class Interval(Struct, frozen=True):
    """An estimate and its interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside the interval."""
        return not self.low <= 0 <= self.high


def z_score(confidence: float) -> float:
    """The number of standard deviations on each side of a two-sided interval."""
    return normal_quantile((1 + confidence) / 2)


def wilson_interval(hits: int, total: int, confidence: float) -> Interval:
    """The share ``hits / total``; ``total`` is above 0.

    Source: Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    z = z_score(confidence)
    share = hits / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    spread = share * (1 - share) / total + z * z / (4 * total * total)
    half = z * math.sqrt(spread) / (1 + z * z / total)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def difference_interval(a: Interval, b: Interval) -> Interval:
    """The difference ``b - a``, from the interval of each.

    With Wilson's intervals this is Newcombe's interval. Sources: Newcombe, Statistics in Medicine
    17 (1998), 873-890, method 10; Zou and Donner, Statistics in Medicine 27 (2008), 1693-1702.
    """
    value = b.value - a.value
    down = math.hypot(b.value - b.low, a.high - a.value)
    up = math.hypot(b.high - b.value, a.value - a.low)
    return Interval(value, value - down, value + up)


def welch_interval(a: Mean | None, b: Mean | None, confidence: float) -> Interval | None:
    """The difference of the means, ``b - a``; None if there are too few values.

    Source: Welch, Biometrika 34 (1947), 28-35.
    """
    if a is None or b is None or min(a.n, b.n) < _MIN_VALUES:
        return None
    value = b.value - a.value
    error_a, error_b = a.variance / a.n, b.variance / b.n
    error = error_a + error_b
    if not error:
        return Interval(value, value, value)
    freedom = error * error / (error_a * error_a / (a.n - 1) + error_b * error_b / (b.n - 1))
    half = t_quantile((1 + confidence) / 2, freedom) * math.sqrt(error)
    return Interval(value, value - half, value + half)


def mean_interval(mean: Mean, confidence: float) -> Interval:
    """The mean of one sample, by Student's t; without a width for a single value."""
    if mean.n < _MIN_VALUES:
        return Interval(mean.value, mean.value, mean.value)
    half = t_quantile((1 + confidence) / 2, mean.n - 1) * math.sqrt(mean.variance / mean.n)
    return Interval(mean.value, mean.value - half, mean.value + half)


_POWER: Final = 0.8
"""The probability with which a difference that exists is found, as is usual for such tests."""


def required_per_version(variance: float, difference: float, confidence: float) -> int:
    """How many values each version needs to tell a ``difference`` of their means.

    ``variance`` is that of a single value; both versions have as many. Source: Chow, Shao and Wang,
    Sample Size Calculations in Clinical Research (2008), 3.2.1, with the normal approximation.
    """
    z = z_score(confidence) + normal_quantile(_POWER)
    return max(_MIN_VALUES, math.ceil(2 * variance * (z / difference) ** 2))


def quantile_interval(sample: Sample, p: float, confidence: float) -> Interval | None:
    """The ``p``-quantile, by order statistics: nothing is assumed of the distribution.

    None if there are too few values, or no upper bound is known. Source: Hahn and Meeker,
    Statistical Intervals (1991), 5.2, with the normal approximation of the binomial.
    """
    half = z_score(confidence) * math.sqrt(p * (1 - p) / sample.n) if sample.n else 1.0
    low, high = p - half, p + half
    if not 0 < low < high < 1:
        return None
    interval = Interval(sample.quantile(p), *sample.quantile_bounds(low, high))
    return interval if math.isfinite(interval.high) else None


def chi_square_p_value(counts: Sequence[int], weights: Sequence[float]) -> float:
    """The p-value of Pearson's chi-square test of counts against their weights.

    Each weight is above 0, and so is at least one of the counts.
    """
    total, total_weight = sum(counts), sum(weights)
    expected = [total * weight / total_weight for weight in weights]
    pairs = zip(counts, expected, strict=True)
    return chi_square_tail(sum((n - e) ** 2 / e for n, e in pairs), len(counts) - 1)


# --- exact tests: the probability of a difference at least as large where there is none -----------


def binomial_p_value(hits: int, total: int) -> float:
    """Of ``hits`` among ``total`` where both ways are equally likely, two-sided and exact."""
    if not total:
        return 1.0
    tail = sum(math.comb(total, k) for k in range(min(hits, total - hits) + 1))
    p: float = 2 * tail / 2**total  # of integers: exact, whatever their size
    return min(1.0, p)


def fisher_p_value(a_hits: int, a_total: int, b_hits: int, b_total: int) -> float:
    """Fisher's exact test of two shares, two-sided: tables that are at most as likely."""
    hits, total = a_hits + b_hits, a_total + b_total

    def log_probability(k: int) -> float:
        return _log_comb(a_total, k) + _log_comb(b_total, hits - k) - _log_comb(total, hits)

    observed = log_probability(a_hits)
    lowest, highest = max(0, hits - b_total), min(hits, a_total)
    return min(
        1.0,
        sum(
            math.exp(each)
            for k in range(lowest, highest + 1)
            if (each := log_probability(k)) <= observed + 1e-7
        ),
    )


def _log_comb(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
