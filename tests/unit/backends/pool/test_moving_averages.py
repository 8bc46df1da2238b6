"""Moving averages, with a clock that a test sets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.pool.circuit_breaker import PeakEwma, SlidingWindowCounter

STEPS = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 10)), min_size=1, max_size=40)


def test_average_is_none_before_the_first_value() -> None:
    smoothed = PeakEwma()

    assert smoothed.get_value(5.0) is None

    smoothed.add(5.0, 0.4)
    assert smoothed.get_value(5.0) == 0.4


def test_peak_ewma_rises_immediately_and_falls_gradually() -> None:
    smoothed = PeakEwma(memory=10.0)
    smoothed.add(0.0, 1.0)

    smoothed.add(1.0, 3.0)
    assert smoothed.get_value(1.0) == 3.0

    smoothed.add(11.0, 1.0)
    assert smoothed.get_value(11.0) == pytest.approx(1.0 + 2.0 / math.e)


def test_peak_ewma_decays_without_new_values() -> None:
    smoothed = PeakEwma(memory=10.0)
    smoothed.add(100.0, 2.0)

    assert smoothed.get_value(110.0) == pytest.approx(2.0 / math.e)
    assert smoothed.get_value(1e6) == 0.0


@given(STEPS)
def test_peak_ewma_lies_between_its_values(steps: list[tuple[float, float]]) -> None:
    smoothed, now, values = PeakEwma(), 0.0, list[float]()
    for pause, seconds in steps:
        now += pause
        smoothed.add(now, seconds)
        values.append(seconds)
        value = smoothed.get_value(now)
        assert value is not None
        assert min(values) - 1e-9 <= value <= max(values) + 1e-9
        assert value >= seconds - 1e-9


def test_sliding_window_forgets_events_older_than_the_window() -> None:
    recent = SlidingWindowCounter(10.0)
    for now in (0.0, 0.5, 4.0, 9.0):
        recent.add(now)

    assert [recent.count(now) for now in (9.9, 10.0, 13.9, 14.0, 19.0)] == [4, 2, 2, 1, 0]


def test_cleared_sliding_window_counts_zero() -> None:
    recent = SlidingWindowCounter(10.0)
    recent.add(1.0)

    recent.clear()

    assert recent.count(1.0) == 0


@given(st.lists(st.floats(0, 30), max_size=60), st.floats(0, 30))
def test_sliding_window_is_accurate_to_a_tenth(moments: list[float], window: float) -> None:
    window += 0.1
    recent, happened = SlidingWindowCounter(window), list[float]()
    for now in sorted(moments):
        recent.add(now)
        happened.append(now)
        least = sum(one > now - 0.89 * window for one in happened)
        most = sum(one > now - 1.01 * window for one in happened)
        assert least <= recent.count(now) <= most
        assert len(recent._slots) <= 10
