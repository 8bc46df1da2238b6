"""Intervals that are valid at every moment, however often one looks, with a proof.

A *betting confidence sequence*: somebody bets against the claim that a rate is ``m``, at odds that
would be fair if it were. His wealth is then a martingale (for values between 0 and 1 instead of 0
and 1, at most one), and so exceeds ``1 / alpha`` at any moment with a probability of at most
``alpha``, whatever the number of values and their distribution (Ville's inequality). All ``m``
against which the wealth is below ``1 / alpha`` are the interval. The bets here are those of the
Beta(1/2, 1/2) mixture, so that the wealth depends on the sums alone and not on their order.

Two rates: the product of both wealths is a wealth against each pair of claims, as every value bets
against one of them. The differences of all pairs that it leaves are the interval. Nothing is
assumed about the split, which may change at any time.

Numbers: their distributions may have any tails, so that no interval of their means has a proof.
What is estimated is the probability that a value of B is above one of A, ties counting half: the
k-th value of A is compared with the k-th of B, which gives values 0, 1/2 and 1.

Sources: Robbins, The Annals of Mathematical Statistics 41 (1970), 1397-1409 (mixtures); Krichevsky
and Trofimov, IEEE Transactions on Information Theory 27 (1981), 199-207 (the bets); Waudby-Smith
and Ramdas, Journal of the Royal Statistical Society B 86 (2024), 1-27 (betting, and bounded
values); Ville, Étude critique de la notion de collectif (1939).
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from gateway.evidence.statistics import Interval, normal_quantile

_STEPS: Final = 40
"""Of each search: to about 1e-8."""
_POWER: Final = 0.8


class Tally(Struct, frozen=True):
    """``n`` values from 0 to 1 and their sum: of values 0 and 1, the number of ones."""

    hits: float
    n: int

    @property
    def share(self) -> float:
        """The mean. There is at least one value."""
        return self.hits / self.n

    def log_wealth(self, claim: float) -> float:
        """The logarithm of the wealth after all bets against a mean of ``claim``."""
        return self.log_mixture() + self.log_loss(claim)

    def log_mixture(self) -> float:
        """The part of the wealth that is the same against each claim."""
        hits, missed = self.hits + 0.5, self.n - self.hits + 0.5
        return math.lgamma(hits) + math.lgamma(missed) - math.lgamma(self.n + 1) - _LOG_PI

    def log_loss(self, claim: float) -> float:
        """The other part: minus the logarithm of the claim's likelihood, convex in the claim."""
        return -_times_log(self.hits, claim) - _times_log(self.n - self.hits, 1 - claim)


_LOG_PI: Final = math.log(math.pi)


def _times_log(count: float, value: float) -> float:
    """``count * log(value)``, which is 0 for a count of 0."""
    if not count:
        return 0.0
    return count * math.log(value) if value > 0 else -math.inf


def rate_interval(tally: Tally, confidence: float) -> Interval:
    """The mean of values from 0 to 1, such as a rate. There is at least one value."""
    limit = -math.log(1 - confidence)
    low = _find_end(lambda m: tally.log_wealth(m) < limit, tally.share, 0.0)
    high = _find_end(lambda m: tally.log_wealth(m) < limit, tally.share, 1.0)
    return Interval(tally.share, low, high)


def rate_difference_interval(a: Tally, b: Tally, confidence: float) -> Interval:
    """The difference ``b - a`` of two rates. There is at least one value of each."""
    limit = -math.log(1 - confidence) - a.log_mixture() - b.log_mixture()
    value = b.share - a.share

    def is_possible(difference: float) -> bool:
        """Whether some pair of rates with this difference is left."""
        low, high = max(0.0, -difference), min(1.0, 1 - difference)
        return _minimize(lambda m: a.log_loss(m) + b.log_loss(m + difference), low, high) < limit

    return Interval(value, _find_end(is_possible, value, -1.0), _find_end(is_possible, value, 1.0))


def superiority_interval(
    a: Sequence[float], b: Sequence[float], confidence: float
) -> Interval | None:
    """The probability that a value of B is above one of A; None if there are no pairs.

    The values are in the order in which they came.
    """
    tally = count_superior(a, b)
    return rate_interval(tally, confidence) if tally.n else None


def count_superior(a: Sequence[float], b: Sequence[float]) -> Tally:
    """How often the k-th value of B is above the k-th of A; ties count half."""
    pairs = min(len(a), len(b))
    wins = sum((y > x) + 0.5 * (y == x) for x, y in zip(a, b, strict=False))
    return Tally(wins, pairs)


def required_per_side(variance: float, difference: float, confidence: float) -> int:
    """How many values of each version find a ``difference`` of two rates with 80 % probability.

    ``variance`` is that of a single value, both versions have as many, and one looks at the end.
    """

    def is_enough(n: float) -> bool:
        limit = -math.log(1 - confidence) + math.log(max(2.0, n) * math.pi / 2)
        reach = math.sqrt(2 * limit) + normal_quantile(_POWER)
        return reach * math.sqrt(2 * variance / n) <= difference

    high = 2.0
    while not is_enough(high):
        high *= 2
    return math.ceil(_find_end(is_enough, high, 1.0))


def _find_end(is_inside: Callable[[float], bool], inside: float, outside: float) -> float:
    """The end between a point that is inside and one that may be outside, by bisection."""
    if is_inside(outside):
        return outside
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if is_inside(middle) else (inside, middle)
    return inside


def _minimize(function: Callable[[float], float], low: float, high: float) -> float:
    """The least value of a convex function between two points, by the golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(_STEPS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return min(at_left, at_right)
