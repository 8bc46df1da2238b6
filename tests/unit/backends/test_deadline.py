"""A request has one deadline, which only gets earlier."""

import pytest

from backends.interfaces import Deadline
from protocols.core.errors import DeadlineExceeded


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_deadline_decreases_with_time_and_can_be_shortened() -> None:
    clock = FakeClock()
    deadline = Deadline(clock, 10)

    assert deadline.remaining() == 10
    assert deadline.remaining(3) == 3

    clock.time += 8
    assert deadline.remaining(3) == 2

    deadline.shorten(60)
    assert deadline.remaining() == 2

    deadline.shorten(1)
    assert deadline.remaining() == 1

    clock.time += 1
    with pytest.raises(DeadlineExceeded):
        deadline.remaining()


def test_expiry_within_never_exceeds_the_deadline() -> None:
    clock = FakeClock()
    deadline = Deadline(clock, 10)

    assert deadline.expiry_within(3) == 103
    assert deadline.expiry_within(30) == 110

    clock.time += 9
    assert deadline.expiry_within(3) == 110

    clock.time += 1
    with pytest.raises(DeadlineExceeded):
        deadline.expiry_within(3)


def test_deadline_can_start_in_the_past() -> None:
    clock = FakeClock()

    assert Deadline(clock, 10, clock.time - 4).remaining() == 6
