"""A histogram counts values by bucket, and their sum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.histogram import Histogram, bucket_quantile, find_bucket
from gateway.observability.stats import FIRST_TOKEN_BUCKETS

EDGES = FIRST_TOKEN_BUCKETS
NUMBERS = st.floats(-1.0, 10.0) | st.integers(0, 9) | st.sampled_from([1.0, 2.5, 4.0])


def test_histogram_buckets_include_their_upper_bound() -> None:
    histogram = Histogram((1.0, 2.5))

    for value in (0.5, 1.0, 1.5, 2.5, 7.0, 8.0):
        histogram.add(value)

    assert histogram.counts == [2, 2, 2]
    assert histogram.total == 20.5


@given(st.lists(st.lists(NUMBERS)))
def test_extend_equals_repeated_add(parts: list[list[float]]) -> None:
    alone, together, total = Histogram((1.0, 2.5, 4.0)), Histogram((1.0, 2.5, 4.0)), 0.0
    for part in parts:
        together.extend(part)
        total = sum(part, total)
        for value in part:
            alone.add(value)

    assert together.counts == alone.counts
    assert together.total == total
    # Since Python 3.12 sum() rounds once, and repeated additions each time.
    assert together.total == pytest.approx(alone.total, rel=1e-12)


def make_bucket_counts(*buckets: int) -> list[int]:
    return [buckets.count(n) for n in range(len(EDGES) + 1)]


@pytest.mark.parametrize(
    ("values", "share", "value"),
    [
        (make_bucket_counts(), 0.5, None),
        (make_bucket_counts(0), 0.5, 0.0005),
        (make_bucket_counts(1, 1), 0.0, 0.001),
        (make_bucket_counts(1, 1), 0.5, 0.003),
        (make_bucket_counts(1, 1), 1.0, 0.005),
        (make_bucket_counts(0, 0, 0, 9), 0.75, 0.001),
        (make_bucket_counts(0, 0, 0, 9), 0.875, 0.2),
        (make_bucket_counts(len(EDGES)), 0.5, EDGES[-1]),
    ],
)
def test_bucket_quantile_interpolates_within_its_bucket(
    values: list[int], share: float, value: float | None
) -> None:
    quantile = bucket_quantile(EDGES, values, share)
    assert quantile == (None if value is None else pytest.approx(value))


def test_quantile_of_no_values_raises_value_error() -> None:
    with pytest.raises(ValueError, match="there are no values"):
        find_bucket([0, 0], 0.5)
