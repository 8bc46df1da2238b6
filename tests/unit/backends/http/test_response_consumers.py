"""One who listens gets what comes at once, for as long as it takes more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from backends.http.interfaces import UpstreamResponse
from protocols.core.errors import StreamBroken
from protocols.core.interfaces import UpstreamRequest
from tests.fakes import CHUNKED, CLOSE, END, HANG, Reply, ScriptedWorker, chunk, chunked
from tests.unit.backends.http.client_requests import client

ASK = UpstreamRequest("/", b"{}")


@asynccontextmanager
async def answered(reply: Reply) -> AsyncIterator[UpstreamResponse]:
    """The answer of a worker, of which the head has come."""
    async with ScriptedWorker(reply) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        yield reading
        reading.release()


class Listener:
    """Takes what comes; no more after each of ``full``."""

    def __init__(self, *full: bytes) -> None:
        self.heard: list[bytes] = []
        self._full = full

    def __call__(self, pieces: list[bytes]) -> bool:
        data = b"".join(pieces)
        self.heard.append(data)
        return data not in self._full


async def test_it_gets_each_piece_and_then_hears_that_it_was_all() -> None:
    listener = Listener()
    pieces: Reply = [
        CHUNKED,
        0.05,
        chunk(b"one"),
        0.05,
        chunk(b"two"),
        0.05,
        chunk(b"three"),
        0.05,
        END,
    ]
    async with answered(pieces) as reading:
        assert await reading.forward_to(listener)

    assert listener.heard == [b"one", b"two", b"three"]


async def test_what_came_before_it_listened_is_its_too() -> None:
    listener = Listener()
    async with answered([chunked(b"one", b"two")]) as reading:
        await asyncio.sleep(0.05)
        assert reading.complete
        assert await reading.forward_to(listener)
        assert await reading.forward_to(listener), "it is still all"

    assert b"".join(listener.heard) == b"onetwo"


async def test_no_task_is_woken_for_a_piece() -> None:
    """It is called by what reads from the socket."""
    within: list[asyncio.Task[object] | None] = []

    def take(pieces: list[bytes]) -> bool:
        assert pieces
        within.append(asyncio.current_task())
        return True

    async with answered([CHUNKED, 0.05, chunk(b"one"), 0.05, chunk(b"two"), 0.05, END]) as reading:
        await reading.forward_to(take)

    assert within == [None, None]


async def test_what_comes_after_it_took_no_more_is_kept() -> None:
    listener = Listener(b"two")
    pieces: Reply = [CHUNKED, 0.05, chunk(b"one"), 0.05, chunk(b"two"), 0.05, chunk(b"three") + END]
    async with answered(pieces) as reading:
        assert not await reading.forward_to(listener)
        await asyncio.sleep(0.1)
        assert listener.heard == [b"one", b"two"]
        assert await reading.forward_to(listener)

    assert listener.heard == [b"one", b"two", b"three"]


async def test_it_may_take_no_more_of_what_had_come_before() -> None:
    async with answered([chunked(b"one")]) as reading:
        await asyncio.sleep(0.05)
        assert not await reading.forward_to(Listener(b"one"))
        assert await reading.forward_to(Listener())


async def test_the_last_piece_may_be_the_one_after_which_it_takes_no_more() -> None:
    async with answered([CHUNKED, 0.05, chunk(b"one") + END]) as reading:
        assert not await reading.forward_to(Listener(b"one"))
        assert await reading.forward_to(Listener())


async def test_a_chunk_that_begins_is_nothing_yet() -> None:
    listener = Listener()
    async with answered([CHUNKED, 0.05, b"3\r", 0.05, b"\none\r\n", 0.05, END]) as reading:
        assert await reading.forward_to(listener)

    assert listener.heard == [b"one"]


@pytest.mark.parametrize(
    "reply",
    [[CHUNKED, 0.05, chunk(b"one"), 0.05, CLOSE], [CHUNKED, 0.05, chunk(b"one") + b"zz\r\n", HANG]],
    ids=["closed", "not HTTP"],
)
async def test_an_answer_that_breaks_is_broken_after_what_was_said(reply: Reply) -> None:
    listener = Listener()
    async with answered(reply) as reading:
        with pytest.raises(StreamBroken):
            await reading.forward_to(listener)

    assert listener.heard == [b"one"]


async def test_what_it_raises_is_raised_where_it_was_asked_to_listen() -> None:
    def take(pieces: list[bytes]) -> bool:
        raise LookupError(*pieces)

    async with answered([CHUNKED, 0.05, chunk(b"one"), 0.05, chunk(b"two") + END]) as reading:
        with pytest.raises(LookupError, match="one"):
            await reading.forward_to(take)
        assert await reading.read() == [b"two"]


async def test_one_who_was_cancelled_hears_no_more() -> None:
    listener = Listener()
    async with answered([CHUNKED, 0.05, chunk(b"one"), 0.1, chunk(b"two") + END]) as reading:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reading.forward_to(listener)
        assert await reading.read() == [b"two"]

    assert listener.heard == [b"one"]


async def test_an_abort_ends_it() -> None:
    async with answered([CHUNKED, HANG]) as reading:
        asyncio.get_running_loop().call_later(0.05, reading.abort)
        with pytest.raises(StreamBroken):
            await reading.forward_to(Listener())
