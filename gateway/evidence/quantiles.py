"""How much longer the times of one version are than another's, at a quantile; at every moment.

Times are counted in bins that are 1 % wide, so that any number of them takes little room and the
counts of several gateways add up.

The claim that the ``p``-quantile of B is at most that of A, shifted by ``s``, says that there is a
point ``x`` (A's quantile) below which A has at most a share ``p`` of its times, and up to whose
shift ``x + s`` B has at least ``p``. Somebody bets at each ``x`` that A has more below it, and that
B has less up to ``x + s``. Each wealth is a supermartingale if the claim holds at that ``x``, and
so is their product, since every time bets on one side only. The claim is refuted once the product
exceeds ``1 / alpha`` at *all* points: at A's true quantile it does with a probability of at most
``alpha``, however often one looks (Ville's inequality, see ``gateway.evidence.sequential``). One
joint bet finds a difference sooner than two intervals of both quantiles that must not overlap.

A bet is the average of bets on fixed shares, whose distances from ``p`` are a geometric series: its
wealth is at least that of the best of them, divided by their number.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Final

_BINS_PER_E: Final = 100
"""Bins between a time and 2.718 times that."""
_SMALLEST: Final = 1e-6
_OFFSET: Final = 2000
"""Makes the numbers of all bins positive."""
_MAX_SHIFT: Final = 4000
"""More than any two times differ by."""
_BETS: Final = 16
_RATIO: Final = math.sqrt(0.5)
"""Of the distances from ``p`` of two bets, one after the other."""
_BOLDEST: Final = 0.95
"""The distance of the first bet, as a part of the largest one."""

TimeCounts = Mapping[int, int]
"""The number of times in each bin."""

BIN_EXPRESSION: Final = (
    f"CAST(floor({_BINS_PER_E} * ln({{column}} + {_SMALLEST}) + {_OFFSET}) AS INTEGER)"
)
"""SQL for the bin of a time in seconds."""


def count_times(seconds: Sequence[float]) -> TimeCounts:
    """Count times in their bins."""
    counts: dict[int, int] = {}
    for one in seconds:
        number = int(_BINS_PER_E * math.log(one + _SMALLEST) + _OFFSET)
        counts[number] = counts.get(number, 0) + 1
    return counts


def find_quantile(counts: TimeCounts, p: float) -> float:
    """About the ``p``-quantile in seconds. There is at least one time."""
    bins = sorted(counts)
    sums = [*accumulate(counts[one] for one in bins)]
    number = bins[bisect_right(sums, p * sums[-1], hi=len(sums) - 1)]
    return math.exp((number + 0.5 - _OFFSET) / _BINS_PER_E)


def compare_quantiles(
    a: TimeCounts, b: TimeCounts, p: float, confidence: float
) -> tuple[float, float]:
    """By how much the ``p``-quantile of B is longer, relative to A's: at least, and at most.

    Each end holds with this confidence.
    """
    limit = -math.log(1 - confidence)
    low, high = _find_least_shift(a, b, p, limit), -_find_least_shift(b, a, p, limit)
    # a quantile may lie anywhere in its bin
    return _as_ratio(low - 1) - 1, _as_ratio(high + 1) - 1


def _as_ratio(shift: float) -> float:
    return math.exp(shift / _BINS_PER_E)


def _find_least_shift(a: TimeCounts, b: TimeCounts, p: float, limit: float) -> float:
    """The least number of bins by which the quantile of B may exceed A's; maybe -infinity."""
    bet_above, bet_below = _build_bet(p, 1), _build_bet(p, -1)
    points, of_b = sorted(a), sorted(b)
    sums_a, sums_b = (
        [0, *accumulate(side[one] for one in bins)] for side, bins in ((a, points), (b, of_b))
    )
    wealth_a = [bet_above(count, sums_a[-1]) for count in sums_a]
    wealth_b = [bet_below(count, sums_b[-1]) for count in sums_b]

    def is_possible(shift: int) -> bool:
        """Whether the claim stands at some point: a bin of A, or beyond all times."""
        return wealth_a[-1] + wealth_b[-1] < limit or any(
            own + wealth_b[bisect_right(of_b, point + shift)] < limit
            for own, point in zip(wealth_a, points, strict=False)
        )

    if is_possible(-_MAX_SHIFT):
        return -math.inf
    outside, inside = -_MAX_SHIFT, _MAX_SHIFT
    while inside - outside > 1:
        middle = (inside + outside) // 2
        outside, inside = (outside, middle) if is_possible(middle) else (middle, inside)
    return inside


def list_odds(p: float, sign: int) -> list[tuple[float, float]]:
    """What each bet wins in log wealth by a hit, and by a miss. Beside them, one does not bet."""
    largest = _BOLDEST * (1 - p if sign > 0 else p)
    shares = [p + sign * largest * _RATIO**n for n in range(_BETS)]
    return [(math.log(share / p), math.log((1 - share) / (1 - p))) for share in shares]


def _build_bet(p: float, sign: int) -> Callable[[int, int], float]:
    """The logarithm of the wealth of a bet that a share is above ``p``, or below for -1.

    It takes the number of hits and that of all values.
    """
    odds = list_odds(p, sign)

    def log_wealth(hits: int, count: int) -> float:
        terms = [0.0, *(hits * hit + (count - hits) * miss for hit, miss in odds)]
        largest_term = max(terms)
        total = sum(math.exp(term - largest_term) for term in terms)
        return largest_term + math.log(total / len(terms))

    return log_wealth
