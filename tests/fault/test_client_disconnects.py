"""A client disconnect cancels the request at the worker and closes the worker connection."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from backends.http.client import AsyncioHttpClient
from backends.interfaces import PreparedRequest
from backends.pool.pool import PoolBackend
from protocols.core.errors import StreamBroken
from protocols.core.request import GenerationRequest
from tests.fault.line_protocol import (
    STREAMED,
    UNARY,
    CollectEvents,
    build_context,
    collect_events,
    each_consumer,
    encode_line,
    join_text,
    reply_text,
    run_pool,
)
from tests.support.fakes import CHUNKED, HANG, Reply, ScriptedWorker, chunk, make_reply
from tests.support.waiting import PATIENCE, wait_until

if TYPE_CHECKING:
    from protocols.core.events import Event

STARTED_STREAM = chunk(encode_line("Hello"))
WAITING: list[tuple[str, Reply, GenerationRequest]] = [
    ("before the head", [HANG], STREAMED),
    ("before the first event", [CHUNKED, HANG], STREAMED),
    ("mid-stream", [CHUNKED + STARTED_STREAM, HANG], STREAMED),
    ("before a unary response", [HANG], UNARY),
    ("inside a unary response", [make_reply(b"x" * 99)[:-50], HANG], UNARY),
    ("inside an error", [make_reply(b"x" * 99, "500 Oops")[:-50], HANG], UNARY),
]


@each_consumer
@pytest.mark.parametrize(
    ("reply", "request_"), [one[1:] for one in WAITING], ids=[one[0] for one in WAITING]
)
async def test_cancelled_request_closes_the_upstream_connection(
    reply: Reply,
    request_: GenerationRequest,
    collect: CollectEvents,
    record_property: Callable[[str, object], None],
) -> None:
    async with (
        ScriptedWorker(reply, [reply_text("Hello")]) as worker,
        run_pool(worker.url) as backend,
    ):
        events: list[Event] = []
        task = asyncio.get_running_loop().create_task(collect(backend, request_, events))
        await worker.wait_for_request()
        await asyncio.sleep(0.05)
        task.cancel()
        took = await worker.wait_for_disconnect()
        record_property("milliseconds until the worker saw it", round(took * 1000, 1))

        with pytest.raises(asyncio.CancelledError):
            await task

        assert join_text(await collect_events(backend)) == "Hello"
    assert [one.connection for one in worker.requests] == [0, 1]


async def read_one_batch(backend: PoolBackend) -> None:
    """Read one batch and close the generator, like a consumer that fails."""
    batches = backend.send(PreparedRequest(STREAMED), build_context())
    _, events = await anext(batches)
    assert join_text(events) == "Hello"
    await batches.aclose()


async def test_closed_generator_closes_the_upstream_connection() -> None:
    async with (
        ScriptedWorker([CHUNKED + STARTED_STREAM, HANG], [reply_text("Hello")]) as worker,
        run_pool(worker.url) as backend,
    ):
        await read_one_batch(backend)
        await worker.wait_for_disconnect()

        assert join_text(await collect_events(backend)) == "Hello"
    assert worker.connections == 2


async def test_generator_that_never_ran_opens_no_connection() -> None:
    async with (
        ScriptedWorker([reply_text("Hello")]) as worker,
        run_pool(worker.url) as backend,
    ):
        await backend.send(PreparedRequest(STREAMED), build_context()).aclose()

    assert worker.connections == 0


BIG = GenerationRequest(model="x" * (32 << 20), kind="completion", stream=True)
"""Larger than the socket buffers, so that a worker that does not read blocks the upload."""


async def wait_until_sockets_closed(upstream: AsyncioHttpClient) -> None:
    """Wait until the HTTP client has no open connection. Raises TimeoutError."""
    await wait_until(lambda: not any(pool.is_busy for pool in upstream._host_pools.values()))


@pytest.mark.parametrize("reply", [[], [make_reply(b"x" * 99)[:-50]]], ids=["no head", "a head"])
async def test_cancel_during_an_upload_closes_the_upstream_connection(reply: Reply) -> None:
    """Closing must not wait until the worker has read the rest."""
    upstream, never = AsyncioHttpClient(), asyncio.Event()
    async with (
        ScriptedWorker([*reply, never], read_body=False) as worker,
        run_pool(worker.url, upstream=upstream) as backend,
    ):
        task = asyncio.get_running_loop().create_task(collect_events(backend, BIG))
        await worker.wait_for_request()
        await asyncio.sleep(0.2)

        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task

        await wait_until_sockets_closed(upstream)


async def test_pool_close_does_not_wait_for_an_upload() -> None:
    async with ScriptedWorker([asyncio.Event()], read_body=False) as worker:
        async with asyncio.timeout(PATIENCE), run_pool(worker.url) as backend:
            task = asyncio.get_running_loop().create_task(collect_events(backend, BIG))
            await worker.wait_for_request()
            await asyncio.sleep(0.2)
        with pytest.raises(StreamBroken):
            await task


async def test_pool_close_cancels_running_requests() -> None:
    async with ScriptedWorker([CHUNKED + STARTED_STREAM, HANG]) as worker:
        async with run_pool(worker.url) as backend:
            task = asyncio.get_running_loop().create_task(collect_events(backend))
            await worker.wait_for_request()
        await worker.wait_for_disconnect()
        with pytest.raises(StreamBroken):
            await task
