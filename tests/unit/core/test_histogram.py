"""A histogram's counts and its sum."""

from gateway.core.histogram import Histogram


def test_an_edge_holds_what_is_up_to_it_and_the_last_what_is_above_all() -> None:
    found = Histogram((1.0, 2.5))

    for value in (0.5, 1.0, 1.5, 2.5, 7.0, 8.0):
        found.add(value)

    assert found.counts == [2, 2, 2]
    assert found.total == 20.5
