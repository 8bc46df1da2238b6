"""What is written in one turn is sent together, and nothing overtakes anything."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.outbox import Outbox


class Turns:
    """A loop whose turns a test ends."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None], /) -> None:
        self.calls.append(call)

    def end(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


class Way:
    """A connection's way out; all of them keep one list."""

    def __init__(self, sent: list[tuple["Way", bytes]]) -> None:
        self.closes = False
        self._sent = sent

    def is_closing(self) -> bool:
        return self.closes

    def write(self, data: bytes) -> None:
        self._sent.append((self, data))


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def outbox(turns: Turns) -> Outbox:
    return Outbox(lambda: turns)


def send(outbox: Outbox, *written: tuple[Way, bytes]) -> None:
    for way, data in written:
        outbox.send(way, data)


@pytest.fixture
def sent() -> list[tuple[Way, bytes]]:
    return []


def test_what_is_written_in_a_turn_is_sent_at_its_end_in_its_order(
    turns: Turns, outbox: Outbox, sent: list[tuple[Way, bytes]]
) -> None:
    one, other = Way(sent), Way(sent)
    written = [(one, b"1"), (other, b"2"), (one, b"3")]
    send(outbox, *written)
    assert (sent, len(turns.calls)) == ([], 1)

    turns.end()
    assert sent == written
    turns.end()
    assert len(sent) == 3


def test_so_many_wait_at_most(turns: Turns, outbox: Outbox, sent: list[tuple[Way, bytes]]) -> None:
    way = Way(sent)
    for _ in range(20):
        outbox.send(way, b"x")
    assert len(sent) == 16

    turns.end()
    assert len(sent) == 20


def test_who_writes_alone_is_not_held_back(
    turns: Turns, outbox: Outbox, sent: list[tuple[Way, bytes]]
) -> None:
    way = Way(sent)
    outbox.send(way, b"alone")
    turns.end()
    for _ in range(8):
        outbox.send(way, b"at once")
    assert (len(sent), turns.calls) == (9, [])

    outbox.send(way, b"perhaps not alone any more")
    outbox.send(way, b"indeed")
    assert len(sent) == 9
    turns.end()
    outbox.send(way, b"held back")
    assert (len(sent), len(turns.calls)) == (11, 1)


def test_what_ends_before_the_turn_gets_nothing_and_the_others_theirs(
    turns: Turns, outbox: Outbox, sent: list[tuple[Way, bytes]]
) -> None:
    gone, there = Way(sent), Way(sent)
    send(outbox, (gone, b"1"), (there, b"2"))
    gone.closes = True
    turns.end()
    assert sent == [(there, b"2")]


def test_a_flush_sends_at_once_what_waits_and_once(
    turns: Turns, outbox: Outbox, sent: list[tuple[Way, bytes]]
) -> None:
    way = Way(sent)
    outbox.send(way, b"1")
    outbox.flush()
    assert sent == [(way, b"1")]
    turns.end()
    outbox.flush()
    assert sent == [(way, b"1")]


@given(st.lists(st.sampled_from(["send", "end", "flush"])))
def test_the_order_is_kept_and_nothing_lost(steps: list[str]) -> None:
    turns, sent = Turns(), list[tuple[Way, bytes]]()
    outbox, ways = Outbox(lambda: turns), [Way(sent), Way(sent)]
    written = []
    for number, step in enumerate(steps):
        if step == "send":
            written.append((ways[number % 2], b"%d" % number))
            outbox.send(*written[-1])
        elif step == "end":
            turns.end()
        else:
            outbox.flush()
        assert sent == written[: len(sent)]
    turns.end()
    assert sent == written
