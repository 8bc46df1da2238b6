"""The background writer keeps the order, bounds its queue, and finishes on close."""

import threading
import time
from collections.abc import Sequence

import pytest

from gateway.observability.background_writer import BackgroundWriter

PATIENCE = 20.0


class BlockingSink:
    """Accepts batches only while allowed, and reports ``lost`` items of each as lost."""

    def __init__(self, lost: int = 0) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.may = threading.Event(), threading.Event()
        self._lost = lost

    def write(self, batch: Sequence[int]) -> int:
        self.begun.set()
        assert self.may.wait(PATIENCE)
        self.batches.append(list(batch))
        return self._lost


def test_items_are_written_in_order_and_in_batches() -> None:
    slow = BlockingSink()
    writer = BackgroundWriter("test", 10_000, slow.write)
    slow.may.set()
    for number in range(2500):
        writer.enqueue(number)
    assert repr(writer) == "<BackgroundWriter test, 2500 waiting, 0 dropped>"

    writer.start()

    assert writer.close(PATIENCE)
    assert [len(batch) for batch in slow.batches] == [1000, 1000, 500]
    assert [one for batch in slow.batches for one in batch] == list(range(2500))
    assert writer.dropped == 0


def test_idle_writer_wakes_for_a_new_item() -> None:
    slow = BlockingSink()
    writer = BackgroundWriter("test", 10, slow.write)
    writer.start()
    slow.may.set()

    for number in range(3):
        slow.begun.clear()
        writer.enqueue(number)
        assert slow.begun.wait(PATIENCE)

    assert writer.close(PATIENCE)
    assert [one for batch in slow.batches for one in batch] == [0, 1, 2]


def test_items_during_the_batch_delay_do_not_wake_the_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    woken: list[float] = []
    writer = BackgroundWriter[int]("test", 10_000, len, 0.5)
    wake = writer._wake.set

    def count() -> None:
        woken.append(time.monotonic())
        wake()

    monkeypatch.setattr(writer._wake, "set", count)
    writer.start()
    began = time.monotonic()

    while time.monotonic() - began < 1.2:
        writer.enqueue(1)
        time.sleep(0.001)

    assert len(woken) <= 1
    assert writer.close(PATIENCE)


def test_full_queue_drops_and_counts_items_without_blocking() -> None:
    slow = BlockingSink()
    writer = BackgroundWriter("test", 5, slow.write)
    writer.start()
    writer.enqueue(0)

    assert slow.begun.wait(PATIENCE)

    for number in range(1, 9):
        writer.enqueue(number)
    assert writer.dropped == 3

    slow.may.set()
    assert writer.close(PATIENCE)
    assert slow.batches == [[0], [1, 2, 3, 4, 5]]
    assert writer.dropped == 3


def test_items_lost_by_the_sink_are_counted_as_dropped() -> None:
    slow = BlockingSink(lost=1)
    slow.may.set()
    writer = BackgroundWriter("test", 5, slow.write)
    writer.enqueue(1)

    writer.start()

    assert writer.close(PATIENCE)
    assert writer.dropped == 1


def test_close_stops_waiting_at_the_timeout() -> None:
    slow = BlockingSink()
    writer = BackgroundWriter("test", 5, slow.write)
    writer.start()
    writer.enqueue(1)

    assert slow.begun.wait(PATIENCE)
    assert not writer.close(0.01)

    slow.may.set()
    assert writer.close(PATIENCE)


def test_writer_that_was_never_started_can_be_closed() -> None:
    assert BackgroundWriter("test", 5, BlockingSink().write).close(PATIENCE)
