"""A consumer gets data as soon as it arrives, until it rejects some."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from backends.http.interfaces import UpstreamResponse
from protocols.core.errors import StreamBroken
from protocols.core.interfaces import UpstreamRequest
from tests.support.fakes import CHUNKED, CLOSE, END, HANG, Reply, ScriptedWorker, chunk, chunked
from tests.unit.backends.http.client_requests import open_client

ASK = UpstreamRequest("/", b"{}")


@asynccontextmanager
async def open_response(reply: Reply) -> AsyncIterator[UpstreamResponse]:
    """Open a response whose head has arrived."""
    async with ScriptedWorker(reply) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        yield reading
        reading.release()


class RecordingConsumer:
    """A consumer that records data, and pauses after each of ``full``."""

    def __init__(self, *full: bytes) -> None:
        self.received: list[bytes] = []
        self._full = full

    def __call__(self, pieces: list[bytes]) -> bool:
        data = b"".join(pieces)
        self.received.append(data)
        return data not in self._full


async def test_consumer_gets_every_chunk_and_the_end() -> None:
    listener = RecordingConsumer()
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
    async with open_response(pieces) as reading:
        assert await reading.forward_to(listener)

    assert listener.received == [b"one", b"two", b"three"]


async def test_consumer_gets_data_received_before_registration() -> None:
    listener = RecordingConsumer()
    async with open_response([chunked(b"one", b"two")]) as reading:
        await asyncio.sleep(0.05)
        assert reading.complete
        assert await reading.forward_to(listener)
        assert await reading.forward_to(listener), "the consumer got all data"

    assert b"".join(listener.received) == b"onetwo"


async def test_consumer_is_called_without_a_task_switch() -> None:
    """The socket's read callback calls it."""
    within: list[asyncio.Task[object] | None] = []

    def take(pieces: list[bytes]) -> bool:
        assert pieces
        within.append(asyncio.current_task())
        return True

    async with open_response(
        [CHUNKED, 0.05, chunk(b"one"), 0.05, chunk(b"two"), 0.05, END]
    ) as reading:
        await reading.forward_to(take)

    assert within == [None, None]


async def test_data_after_the_consumer_stops_is_buffered() -> None:
    listener = RecordingConsumer(b"two")
    pieces: Reply = [CHUNKED, 0.05, chunk(b"one"), 0.05, chunk(b"two"), 0.05, chunk(b"three") + END]

    async with open_response(pieces) as reading:
        assert not await reading.forward_to(listener)

        await asyncio.sleep(0.1)
        assert listener.received == [b"one", b"two"]
        assert await reading.forward_to(listener)

    assert listener.received == [b"one", b"two", b"three"]


async def test_consumer_can_stop_at_buffered_data() -> None:
    async with open_response([chunked(b"one")]) as reading:
        await asyncio.sleep(0.05)
        assert not await reading.forward_to(RecordingConsumer(b"one"))
        assert await reading.forward_to(RecordingConsumer())


async def test_consumer_can_stop_at_the_last_chunk() -> None:
    async with open_response([CHUNKED, 0.05, chunk(b"one") + END]) as reading:
        assert not await reading.forward_to(RecordingConsumer(b"one"))
        assert await reading.forward_to(RecordingConsumer())


async def test_incomplete_chunk_header_is_not_forwarded() -> None:
    listener = RecordingConsumer()
    async with open_response([CHUNKED, 0.05, b"3\r", 0.05, b"\none\r\n", 0.05, END]) as reading:
        assert await reading.forward_to(listener)

    assert listener.received == [b"one"]


@pytest.mark.parametrize(
    "reply",
    [[CHUNKED, 0.05, chunk(b"one"), 0.05, CLOSE], [CHUNKED, 0.05, chunk(b"one") + b"zz\r\n", HANG]],
    ids=["closed", "not HTTP"],
)
async def test_broken_response_raises_after_the_forwarded_data(reply: Reply) -> None:
    listener = RecordingConsumer()
    async with open_response(reply) as reading:
        with pytest.raises(StreamBroken):
            await reading.forward_to(listener)

    assert listener.received == [b"one"]


async def test_consumer_exception_is_raised_by_forward_to() -> None:
    def take(pieces: list[bytes]) -> bool:
        raise LookupError(*pieces)

    async with open_response([CHUNKED, 0.05, chunk(b"one"), 0.05, chunk(b"two") + END]) as reading:
        with pytest.raises(LookupError, match="one"):
            await reading.forward_to(take)
        assert await reading.read() == [b"two"]


async def test_cancelled_consumer_gets_no_more_data() -> None:
    listener = RecordingConsumer()
    async with open_response([CHUNKED, 0.05, chunk(b"one"), 0.1, chunk(b"two") + END]) as reading:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reading.forward_to(listener)
        assert await reading.read() == [b"two"]

    assert listener.received == [b"one"]


async def test_abort_raises_stream_broken_in_forward_to() -> None:
    async with open_response([CHUNKED, HANG]) as reading:
        asyncio.get_running_loop().call_later(0.05, reading.abort)
        with pytest.raises(StreamBroken):
            await reading.forward_to(RecordingConsumer())
