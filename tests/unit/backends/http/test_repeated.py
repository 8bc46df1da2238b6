"""Answers whose head is known at a glance are those that a parser would have read."""

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from backends.http.connection import Connection
from gateway.core.glance import Glance
from gateway.core.outbox import Outbox


class Blind(Glance[Any]):
    """Knows nothing again."""

    def body(self, data: bytes) -> int:
        del data
        return 0


class Nowhere(Outbox):
    """Sends nothing."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop)

    def send(self, transport: object, data: bytes) -> None:
        del transport, data


class Line(asyncio.Transport):
    """Where nothing is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = self.held = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        del data

    def abort(self) -> None:
        self.cut = True

    def pause_reading(self) -> None:
        self.held = True

    def resume_reading(self) -> None:
        self.held = False

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.cut


class Worker:
    """What one makes of a worker's answers."""

    def __init__(self, glance: Glance[Any]) -> None:
        loop = cast("asyncio.AbstractEventLoop", None)  # nobody waits
        self.line = Line()
        self.rested = 0
        self._connection = Connection(loop, Nowhere(), self._rest, lambda _: None, glance)
        self._connection.connection_made(self.line)

    def answers(self, reads: list[bytes]) -> object:
        """Ask once, and read these; what came of them."""
        answer = self._connection.ask(b"")
        taken = b""
        for data in reads:
            if not self.line.cut:
                self._connection.data_received(data)
            taken += b"".join(answer.taken()) if answer.status else b""
        complete = answer.complete
        answer.release() if complete else answer.abort()
        told = answer.status, answer.headers, complete, taken
        return *told, self.line.cut, self.line.held, self.rested

    def _rest(self, connection: Connection) -> None:
        del connection
        self.rested += 1


TOPS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 204 No",
        b"HTTP/1.1 500 Oh",
        b"HTTP/1.0 200 OK",
        b"HTTP/1.1 100 Continue",
    ]
)
LINES = st.sampled_from(
    [
        b"a: b",
        b"A: b",
        b"a: \xff",
        b"date: x",
        b"connection: close",
        b"connection: keep-alive",
        b" folded",
        b"set-cookie: a\r\nset-cookie: b",
        b"transfer-encoding: chunked",
    ]
)
LENGTHS = st.sampled_from([b"content-length: %d", b"Content-Length:%d ", b"content-length: 0%d"])
WITHIN = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\na: b\r\n\r\n{}"
BODIES = st.sampled_from([b"", b"{}", b"x" * 20, b"y" * (65 << 10), WITHIN])


USUAL = b"HTTP/1.1 200 OK", [b"a: b"], b"content-length: %d", False
KINDS = st.tuples(TOPS, st.lists(LINES, max_size=2), LENGTHS, st.booleans()) | LINES.map(
    lambda line: (USUAL[0], [line], USUAL[2], False)
)


@st.composite
def conversations(draw: st.DrawFn) -> list[list[bytes]]:
    """Answers, of which most have a head that came before; the reads of each."""
    answers = []
    for top, lines, length, more in draw(
        st.lists(st.sampled_from([USUAL] * 8 + [draw(KINDS)]), min_size=2, max_size=8)
    ):
        body = draw(BODIES)
        extra = b"more" if more else b""
        whole = b"\r\n".join([top, length % len(body), *lines, b"", body + extra])
        cuts = [5, whole.index(b"\r\n\r\n") + 4, len(whole) - 1]
        at = draw(st.sampled_from([*[len(whole)] * 6, *cuts]))
        answers.append([read for read in (whole[:at], whole[at:]) if read])
    return answers


@given(conversations())
def test_what_is_known_at_a_glance_is_what_would_have_been_read(
    conversation: list[list[bytes]],
) -> None:
    seen, read = Worker(Glance()), Worker(Blind())
    for reads in conversation:
        if read.line.cut:
            break
        assert seen.answers(reads) == read.answers(reads)


def test_a_head_is_known_to_all_connections_of_a_worker() -> None:
    head = b"HTTP/1.1 200 OK\r\na: b\r\ncontent-length: %d\r\n\r\n"
    glance = Glance[Any]()
    for _ in range(2):
        Worker(glance).answers([head % 2 + b"{}"])
    other = Worker(glance)
    other._connection._parser = other._connection._feed = None  # type: ignore[assignment]  # it is not needed
    headers = {"a": "b", "content-length": "3"}
    assert other.answers([head % 3 + b"{ }"]) == (200, headers, True, b"{ }", False, False, 1)
