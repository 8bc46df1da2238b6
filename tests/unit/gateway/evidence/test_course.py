"""The course of a difference, and the decision that follows from a comparison."""

from typing import Any

import pytest

from gateway.evidence.course import (
    TimedValues,
    decide_comparison,
    trace_numbers,
    trace_shares,
)
from gateway.evidence.measures import MeasureResult
from gateway.evidence.sequential import (
    Tally,
    rate_difference_interval,
    superiority_interval,
)
from gateway.evidence.versions import Comparison, SplitRatio


def build_side(count: int, ones: int, start: float) -> TimedValues:
    values = [float(n % count < ones) for n in range(count)]
    return TimedValues([start + 10 * n for n in range(count)], values)


def test_course_of_shares_ends_with_the_interval_of_all_values() -> None:
    a, b = build_side(200, 20, 0), build_side(150, 60, 5)
    points = list(trace_shares(a, b, 0.95))

    interval = rate_difference_interval(Tally(20, 200), Tally(60, 150), 0.95)
    last = points[-1]
    assert (last.at, last.n) == (1990, 350)
    assert (last.value, last.low, last.high) == (interval.value, interval.low, interval.high)
    assert [point.at for point in points] == sorted({point.at for point in points})
    assert points[0].n == 2  # the first moment at which both sides have a value
    assert len(points) <= 41


def test_course_of_numbers_ends_with_the_interval_of_all_pairs() -> None:
    a = TimedValues([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0])
    b = TimedValues([0.5, 1.5, 2.5], [2.0, 3.0, 1.0])
    last = list(trace_numbers(a, b, 0.95))[-1]

    interval = superiority_interval(a.values, b.values, 0.95)
    assert interval is not None
    assert (last.value, last.low, last.high) == (interval.value, interval.low, interval.high)


def test_side_without_values_has_no_course() -> None:
    assert list(trace_shares(TimedValues([], []), build_side(3, 1, 0), 0.95)) == []


def test_values_of_one_moment_are_one_point() -> None:
    side = TimedValues([7.0], [1.0])

    assert [point.at for point in trace_shares(side, side, 0.95)] == [7.0]


def build_comparison(*rows: MeasureResult, ratio: SplitRatio | None = None) -> Comparison:
    return Comparison("s", "1", "2", 0.95, rows, ratio=ratio)


def build_row(verdict: Any, **fields: Any) -> MeasureResult:
    return MeasureResult("failed", "share", 0.1, 0.2, verdict=verdict, variance=0.1, **fields)


@pytest.mark.parametrize(
    ("rows", "action", "requests"),
    [
        ([build_row("worse"), build_row("better")], "stop", None),
        ([build_row("worse"), build_row("not enough data", missing=10, n=5)], "stop", None),
        ([build_row("different"), build_row("not enough data", missing=10, n=5)], "choose", None),
        ([build_row("better"), build_row("not enough data", missing=100, n=50)], "go on", 800),
        ([build_row("not enough data", missing=12_345, n=400)], "go on", 12_000),
        ([build_row("not enough data", missing=100, n=0)], "go on", None),
        ([build_row("not enough data")], "go on", None),
        ([build_row(None)], "go on", None),
        ([build_row("better"), build_row("no relevant difference")], "ship", None),
    ],
)
def test_decision_follows_from_the_verdicts(
    rows: list[MeasureResult], action: str, requests: int | None
) -> None:
    """Both versions have 400 requests."""
    decision = decide_comparison(build_comparison(*rows), 400)

    assert (decision.action, decision.requests) == (action, requests)


def test_split_that_does_not_work_stops_the_experiment() -> None:
    ratio = SplitRatio({"1": 900, "2": 100}, {"1": 1, "2": 1}, 1e-9)
    decision = decide_comparison(build_comparison(build_row("better"), ratio=ratio), 1000)

    assert decision.action == "stop"
    assert "weights" in decision.text
