"""How the interval of a difference became narrower, and what it says to do now.

The course is the picture of a sequential test: its intervals hold all together, so that the test
may end at the first one that excludes the value of no difference.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Final, Literal

from msgspec import Struct

from gateway.evidence.measures import MeasureResult, is_difference
from gateway.evidence.sequential import (
    Tally,
    count_superior,
    rate_difference_interval,
    rate_interval,
)
from gateway.evidence.statistics import Interval
from gateway.evidence.versions import Comparison

_POINTS: Final = 40
_ComputeInterval = Callable[[int, int], Interval]
"""From the first so many values of both sides."""


class TimedValues(Struct):
    """Values from 0 to 1, or other numbers, with their times in ascending order."""

    times: Sequence[float]
    values: Sequence[float]


class CoursePoint(Struct, frozen=True):
    """The interval at a time, in Unix seconds, and the number of values until then."""

    at: float
    n: int
    value: float
    low: float
    high: float


class Course(Struct, frozen=True):
    """The intervals of a measure from its first values to its last ones."""

    measure: str
    unit: Literal["share", "probability"]
    neutral: float
    """The value of no difference."""
    relevant: float
    """The smallest difference that matters."""
    points: tuple[CoursePoint, ...]


def trace_shares(a: TimedValues, b: TimedValues, confidence: float) -> Iterator[CoursePoint]:
    """The course of the difference of two shares."""
    sums = [[0.0, *accumulate(side.values)] for side in (a, b)]

    def compute(n_a: int, n_b: int) -> Interval:
        return rate_difference_interval(
            Tally(sums[0][n_a], n_a), Tally(sums[1][n_b], n_b), confidence
        )

    return _trace(a, b, compute)


def trace_numbers(a: TimedValues, b: TimedValues, confidence: float) -> Iterator[CoursePoint]:
    """The course of the probability that a value of ``b`` is above one of ``a``."""

    def compute(n_a: int, n_b: int) -> Interval:
        return rate_interval(count_superior(a.values[:n_a], b.values[:n_b]), confidence)

    return _trace(a, b, compute)


def _trace(a: TimedValues, b: TimedValues, compute: _ComputeInterval) -> Iterator[CoursePoint]:
    if not a.times or not b.times:
        return
    first, last = max(a.times[0], b.times[0]), max(a.times[-1], b.times[-1])
    counts = (0, 0)
    for number in range(_POINTS + 1):
        at = last if number == _POINTS else first + (last - first) * number / _POINTS
        before, counts = counts, (bisect_right(a.times, at), bisect_right(b.times, at))
        if counts != before:
            interval = compute(*counts)
            yield CoursePoint(at, sum(counts), interval.value, interval.low, interval.high)


class Decision(Struct, frozen=True):
    """What to do with the second version now.

    ``choose``: the versions differ, and whether that is good only people know.
    """

    action: Literal["stop", "go on", "choose", "ship"]
    text: str
    requests: int | None = None
    """About how many more requests to both versions together would decide, if that is known."""


def decide_comparison(comparison: Comparison, requests: int) -> Decision:
    """What follows from a comparison of versions that were sent so many ``requests``."""
    version, verdicts = comparison.b, comparison.verdicts
    if comparison.ratio is not None and not comparison.ratio.is_plausible:
        return Decision("stop", "the counts do not fit the weights of the split")
    if worse := [row for row in verdicts if row.verdict == "worse"]:
        return Decision("stop", f"version {version} is worse: {_name(worse)}")
    if differing := [row for row in verdicts if is_difference(row) and row.verdict != "better"]:
        return Decision("choose", f"the versions differ: {_name(differing)}; is that good?")
    if unknown := [row for row in verdicts if row.verdict == "not enough data"]:
        missing = max((_estimate_missing(row, requests) for row in unknown), default=0.0)
        text = f"not enough data yet for {_name(unknown)}"
        return Decision("go on", text, _round(missing) if 0 < missing < math.inf else None)
    if not verdicts:
        return Decision("go on", "there are no values of both versions yet")
    return Decision("ship", f"version {version} is worse in none of {len(verdicts)} measures")


def _estimate_missing(row: MeasureResult, requests: int) -> float:
    """The requests that bring the values that a row lacks, at the rate so far."""
    if not row.missing:
        return 0.0 if row.variance is not None else math.inf
    return row.missing * requests / row.n if row.n else math.inf


def _round(number: float) -> int:
    """A number with two digits."""
    return int(float(f"{number:.2g}"))


def _name(rows: Sequence[MeasureResult]) -> str:
    return ", ".join(row.measure for row in rows)
