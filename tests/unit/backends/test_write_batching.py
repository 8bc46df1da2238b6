"""What is written in one turn is sent together, and nothing overtakes anything."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.aio import WriteBatcher


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


class Post:
    """An outbox, the turns of its loop, and what was sent."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.sent: list[tuple[Way, bytes]] = []
        self.outbox = WriteBatcher(lambda: self.turns)

    def way(self) -> Way:
        return Way(self.sent)

    def send(self, *written: tuple[Way, bytes]) -> None:
        for way, data in written:
            self.outbox.send(way, data)


@pytest.fixture
def post() -> Post:
    return Post()


def test_what_is_written_in_a_turn_is_sent_at_its_end_in_its_order(post: Post) -> None:
    one, other = post.way(), post.way()
    written = [(one, b"1"), (other, b"2"), (one, b"3")]
    post.send(*written)
    assert (post.sent, len(post.turns.calls)) == ([], 1)

    post.turns.end()
    assert post.sent == written
    post.turns.end()
    assert len(post.sent) == 3


def test_so_many_wait_at_most(post: Post) -> None:
    way = post.way()
    for _ in range(20):
        post.outbox.send(way, b"x")
    assert len(post.sent) == 16

    post.turns.end()
    assert len(post.sent) == 20


def test_who_writes_alone_is_not_held_back(post: Post) -> None:
    way = post.way()
    post.outbox.send(way, b"alone")
    post.turns.end()
    for _ in range(8):
        post.outbox.send(way, b"at once")
    assert (len(post.sent), post.turns.calls) == (9, [])

    post.outbox.send(way, b"perhaps not alone any more")
    post.outbox.send(way, b"indeed")
    assert len(post.sent) == 9
    post.turns.end()
    post.outbox.send(way, b"held back")
    assert (len(post.sent), len(post.turns.calls)) == (11, 1)


def test_what_ends_before_the_turn_gets_nothing_and_the_others_theirs(post: Post) -> None:
    gone, there = post.way(), post.way()
    post.send((gone, b"1"), (there, b"2"))
    gone.closes = True
    post.turns.end()
    assert post.sent == [(there, b"2")]


def test_a_flush_sends_at_once_what_waits_and_once(post: Post) -> None:
    way = post.way()
    post.outbox.send(way, b"1")
    post.outbox.flush()
    assert post.sent == [(way, b"1")]
    post.turns.end()
    post.outbox.flush()
    assert post.sent == [(way, b"1")]


@given(st.lists(st.sampled_from(["send", "end", "flush"])))
def test_the_order_is_kept_and_nothing_lost(steps: list[str]) -> None:
    post = Post()
    ways = [post.way(), post.way()]
    written = []
    for number, step in enumerate(steps):
        if step == "send":
            written.append((ways[number % 2], b"%d" % number))
            post.send(written[-1])
        elif step == "end":
            post.turns.end()
        else:
            post.outbox.flush()
        assert post.sent == written[: len(post.sent)]
    post.turns.end()
    assert post.sent == written
