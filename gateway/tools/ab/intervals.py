"""Figures with the intervals that they lie in, and the differences of two of them.

Every interval is two-sided, and holds the truth as often as ``confidence`` says.
"""

import math
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from gateway.tools.ab.distributions import chi_square_above, normal_quantile, t_quantile
from gateway.tools.ab.samples import Mean, Sample

_LEAST: Final = 2
"""Values from which a spread can be told."""


class Interval(Struct, frozen=True):
    """A value, and what lies around it."""

    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether 0 lies outside."""
        return not self.low <= 0 <= self.high


def z_of(confidence: float) -> float:
    """How many standard deviations lie on each side."""
    return normal_quantile((1 + confidence) / 2)


def wilson(hits: int, of: int, confidence: float) -> Interval:
    """A share of ``of``, which is above 0.

    Source: Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    z = z_of(confidence)
    share = hits / of
    centre = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def apart(a: Interval, b: Interval) -> Interval:
    """How far ``b`` lies above ``a``, from the interval of each.

    With Wilson's intervals this is Newcombe's. Sources: Newcombe, Statistics in Medicine 17 (1998),
    873-890, method 10; Zou and Donner, Statistics in Medicine 27 (2008), 1693-1702.
    """
    value = b.value - a.value
    down = math.hypot(b.value - b.low, a.high - a.value)
    up = math.hypot(b.high - b.value, a.value - a.low)
    return Interval(value, value - down, value + up)


def welch(a: Mean | None, b: Mean | None, confidence: float) -> Interval | None:
    """How far the mean of ``b`` lies above that of ``a``; None where there are too few values.

    Source: Welch, Biometrika 34 (1947), 28-35.
    """
    if a is None or b is None or min(a.n, b.n) < _LEAST:
        return None
    value = b.value - a.value
    of_a, of_b = a.variance / a.n, b.variance / b.n
    both = of_a + of_b
    if not both:
        return Interval(value, value, value)
    freedom = both * both / (of_a * of_a / (a.n - 1) + of_b * of_b / (b.n - 1))
    half = t_quantile((1 + confidence) / 2, freedom) * math.sqrt(both)
    return Interval(value, value - half, value + half)


def by_order(sample: Sample, p: float, confidence: float) -> Interval | None:
    """The ``p``-quantile, between those that it may be mistaken for in so many values.

    None where there are too few values to have such, or no bound is known. Nothing is assumed of
    how they are distributed. Source: Hahn and Meeker, Statistical Intervals (1991), 5.2, with the
    normal approximation of the binomial.
    """
    half = z_of(confidence) * math.sqrt(p * (1 - p) / sample.n) if sample.n else 1.0
    low, high = p - half, p + half
    if not 0 < low < high < 1:
        return None
    found = Interval(sample.quantile(p), *sample.within(low, high))
    return found if math.isfinite(found.high) else None


def unlikely(counts: Sequence[int], weights: Sequence[float]) -> float:
    """How likely counts are so far from their weights, or farther, if nothing is amiss.

    Pearson's chi-square; each weight is above 0, and so is one of the counts.
    """
    total, whole = sum(counts), sum(weights)
    wanted = [total * weight / whole for weight in weights]
    pairs = zip(counts, wanted, strict=True)
    return chi_square_above(sum((n - w) ** 2 / w for n, w in pairs), len(counts) - 1)
