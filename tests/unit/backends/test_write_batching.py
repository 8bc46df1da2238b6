"""Writes of one loop turn are sent together and in order."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.write_batching import WriteBatcher


class FakeLoop:
    """A loop whose turns a test ends."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None], /) -> None:
        self.calls.append(call)

    def end(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


class FakeTransport:
    """A transport; all transports record into one list."""

    def __init__(self, sent: list[tuple["FakeTransport", bytes]]) -> None:
        self.closes = False
        self._sent = sent

    def is_closing(self) -> bool:
        return self.closes

    def write(self, data: bytes) -> None:
        self._sent.append((self, data))


class BatcherTestBench:
    """A write batcher, the turns of its loop, and the writes sent."""

    def __init__(self) -> None:
        self.turns = FakeLoop()
        self.sent: list[tuple[FakeTransport, bytes]] = []
        self.batcher = WriteBatcher(lambda: self.turns)

    def create_transport(self) -> FakeTransport:
        return FakeTransport(self.sent)

    def send(self, *written: tuple[FakeTransport, bytes]) -> None:
        for transport, data in written:
            self.batcher.send(transport, data)


@pytest.fixture
def bench() -> BatcherTestBench:
    return BatcherTestBench()


def test_writes_of_a_loop_iteration_are_sent_in_order_at_its_end(bench: BatcherTestBench) -> None:
    one, other = bench.create_transport(), bench.create_transport()
    written = [(one, b"1"), (other, b"2"), (one, b"3")]
    bench.send(*written)

    assert (bench.sent, len(bench.turns.calls)) == ([], 1)

    bench.turns.end()
    assert bench.sent == written

    bench.turns.end()
    assert len(bench.sent) == 3


def test_number_of_batched_writes_is_limited(bench: BatcherTestBench) -> None:
    transport = bench.create_transport()
    for _ in range(20):
        bench.batcher.send(transport, b"x")
    assert len(bench.sent) == 16

    bench.turns.end()
    assert len(bench.sent) == 20


def test_single_writer_is_not_delayed(bench: BatcherTestBench) -> None:
    transport = bench.create_transport()
    bench.batcher.send(transport, b"alone")
    bench.turns.end()
    for _ in range(8):
        bench.batcher.send(transport, b"at once")

    assert (len(bench.sent), bench.turns.calls) == (9, [])

    bench.batcher.send(transport, b"perhaps not alone any more")
    bench.batcher.send(transport, b"indeed")
    assert len(bench.sent) == 9

    bench.turns.end()
    bench.batcher.send(transport, b"held back")
    assert (len(bench.sent), len(bench.turns.calls)) == (11, 1)


def test_closing_transport_gets_no_write(bench: BatcherTestBench) -> None:
    gone, there = bench.create_transport(), bench.create_transport()
    bench.send((gone, b"1"), (there, b"2"))
    gone.closes = True

    bench.turns.end()

    assert bench.sent == [(there, b"2")]


def test_flush_sends_pending_writes_once(bench: BatcherTestBench) -> None:
    transport = bench.create_transport()
    bench.batcher.send(transport, b"1")
    bench.batcher.flush()

    assert bench.sent == [(transport, b"1")]

    bench.turns.end()
    bench.batcher.flush()
    assert bench.sent == [(transport, b"1")]


@given(st.lists(st.sampled_from(["send", "end", "flush"])))
def test_write_order_is_kept_and_no_write_is_lost(steps: list[str]) -> None:
    bench = BatcherTestBench()
    transports = [bench.create_transport(), bench.create_transport()]
    written = []
    for number, step in enumerate(steps):
        if step == "send":
            written.append((transports[number % 2], b"%d" % number))
            bench.send(written[-1])
        elif step == "end":
            bench.turns.end()
        else:
            bench.batcher.flush()
        assert bench.sent == written[: len(bench.sent)]

    bench.turns.end()

    assert bench.sent == written
