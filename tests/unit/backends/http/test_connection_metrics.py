"""The HTTP client counts its connections, and a pool those of another client."""

import asyncio
import socket
from random import Random
from typing import Any

import pytest

from backends.http.client import AsyncioHttpClient
from backends.http.interfaces import ConnectionCounts
from backends.pool.pool import PoolBackend
from protocols.core.errors import WorkerUnreachable
from protocols.core.interfaces import UpstreamRequest
from tests.fault.line_protocol import LineProtocol, pool_settings
from tests.support.fakes import make_reply
from tests.support.tcp_server import run_server

REQUEST = UpstreamRequest("/", b"", ())


async def serve_json(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.readuntil(b"\r\n\r\n"):
        writer.write(make_reply(b"{}"))


async def test_connection_counts_show_the_current_state() -> None:
    upstream = AsyncioHttpClient()
    await upstream.start()
    try:
        assert upstream.connections == ConnectionCounts()

        async with run_server(serve_json) as url:
            reading = await upstream.send(url, REQUEST, 5)
            assert upstream.connections == ConnectionCounts(open=1, created=1)

            while await reading.read():
                pass
            reading.release()
            assert upstream.connections == ConnectionCounts(open=1, idle=1, created=1)

            again = await upstream.send(url, REQUEST, 5)
            assert upstream.connections == ConnectionCounts(open=1, created=1)
            again.abort()

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with pytest.raises(WorkerUnreachable):
            await upstream.send(f"http://127.0.0.1:{port}", REQUEST, 5)
        assert (upstream.connections.created, upstream.connections.failed) == (1, 1)
    finally:
        await upstream.aclose()


@pytest.mark.parametrize("upstream", [None, object()])
def test_client_without_connection_counts_reports_zero(upstream: Any) -> None:
    pool = PoolBackend(
        pool_settings("http://w:1"),
        adapter=LineProtocol(),
        clock=lambda: 0.0,
        draw=Random(7).random,
        http_client=upstream,
    )

    assert pool.connections == ConnectionCounts()
    assert pool.queued_request_ids == []
    assert not pool.in_panic
