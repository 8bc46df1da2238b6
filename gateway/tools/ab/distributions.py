"""The distributions that intervals are computed by, each to about twelve digits.

Source: Press et al., Numerical Recipes, 3rd edition, 6.2 and 6.4: the incomplete gamma and beta
functions by their series and continued fractions, these by Lentz's method.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Final

_CLOSE: Final = 1e-14
_TINY: Final = 1e-300


def normal_quantile(p: float) -> float:
    """Below which a standard normal lies with probability ``p``, in (0, 1)."""
    return NormalDist().inv_cdf(p)


def t_quantile(p: float, freedom: float) -> float:
    """Below which Student's t lies with probability ``p``, in (0, 1); ``freedom`` above 0."""
    if p < 0.5:  # noqa: PLR2004 - it is symmetric
        return -t_quantile(1 - p, freedom)
    high = 1.0
    while t_below(high, freedom) < p:
        high *= 2
    return _root(lambda t: t_below(t, freedom) - p, 0.0, high)


def t_below(t: float, freedom: float) -> float:
    """The probability that Student's t is below ``t``, which is at least 0."""
    return 1 - _beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2


def chi_square_above(x: float, freedom: int) -> float:
    """The probability that chi-square is above ``x``, which is at least 0."""
    a, half = freedom / 2, x / 2
    if half < a + 1:
        return 1 - _gamma_series(a, half)
    front = math.exp(a * math.log(half) - half - math.lgamma(a))
    return front / _fraction(half + 1 - a, lambda k: (-k * (k - a), half + 2 * k + 1 - a))


def _gamma_series(a: float, x: float) -> float:
    """The lower incomplete gamma function, regularized."""
    if x == 0:
        return 0.0
    term = total = 1 / a
    k = 0
    while term >= total * _CLOSE:
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
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logs + a * math.log(x) + b * math.log1p(-x)) / a

    def step(n: int) -> tuple[float, float]:
        k = n // 2
        if n % 2:
            return -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1)), 1.0
        return k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k)), 1.0

    return front / _fraction(1.0, step)


def _fraction(first: float, step: Callable[[int], tuple[float, float]]) -> float:
    """``first + a1 / (b1 + a2 / (b2 + …))``, where ``step`` gives the pairs (a, b)."""
    value = above = first
    below, change, k = 0.0, 0.0, 0
    while abs(change - 1) >= _CLOSE:
        k += 1
        a, b = step(k)
        below = 1 / (b + a * below or _TINY)
        above = b + a / above or _TINY
        change = above * below
        value *= change
    return value


def _root(of: Callable[[float], float], low: float, high: float) -> float:
    """Where it comes to 0 between two values of which the lower one's is not above it."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if of(middle) < 0 else (low, middle)
    return high
