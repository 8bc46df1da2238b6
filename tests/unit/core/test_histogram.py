"""A histogram's counts and its sum."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.histogram import Histogram

NUMBERS = st.floats(-1.0, 10.0) | st.integers(0, 9) | st.sampled_from([1.0, 2.5, 4.0])


def test_an_edge_holds_what_is_up_to_it_and_the_last_what_is_above_all() -> None:
    found = Histogram((1.0, 2.5))

    for value in (0.5, 1.0, 1.5, 2.5, 7.0, 8.0):
        found.add(value)

    assert found.counts == [2, 2, 2]
    assert found.total == 20.5


@given(st.lists(st.lists(NUMBERS)))
def test_many_at_once_are_as_each_by_itself(parts: list[list[float]]) -> None:
    alone, together = Histogram((1.0, 2.5, 4.0)), Histogram((1.0, 2.5, 4.0))
    for part in parts:
        together.extend(part)
        for value in part:
            alone.add(value)
    assert together.counts == alone.counts
    assert together.total == alone.total
