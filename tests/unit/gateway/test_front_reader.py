"""What is too large for the native front is found however it is cut."""

import asyncio
from collections.abc import Iterator

import pytest

from gateway.front.incoming import Incoming
from gateway.front.reader import Reader, Refused

LINE = 200
FIRST = b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n"
LARGE = {
    414: b"GET /" + b"x" * LINE + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    431: b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"x" * LINE + b"\r\n\r\n",
}


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize("status", LARGE)
def test_a_part_that_is_too_large_is_refused_wherever_it_is_cut(
    status: int, loop: asyncio.AbstractEventLoop
) -> None:
    whole = FIRST + LARGE[status]
    for at in range(1, len(whole)):
        arrived: list[Incoming | Refused] = []
        reader = Reader(LINE, loop, arrived.append, lambda: None)
        reader.feed(whole[:at])
        reader.feed(whole[at:])
        first, second = arrived
        assert isinstance(first, Incoming), at
        assert isinstance(second, Refused), at
        assert (first.path, second.status) == ("/first", status), at


def test_what_is_as_large_as_it_may_be_is_read(loop: asyncio.AbstractEventLoop) -> None:
    arrived: list[Incoming | Refused] = []
    reader = Reader(LINE, loop, arrived.append, lambda: None)
    path, value = "/" + "x" * (LINE - 1), "y" * (LINE - 1)
    reader.feed(f"GET {path} HTTP/1.1\r\nHost: a\r\nA: {value}\r\n\r\n".encode())
    [one] = arrived
    assert isinstance(one, Incoming)
    assert (one.path, one.headers["a"]) == (path, value)
