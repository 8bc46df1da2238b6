"""Clients that try to exhaust connections, time or memory are limited."""

import asyncio
import asyncio.sslproto
import socket
import ssl
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.http_server.connection import CONNECTION_SIZE
from gateway.http_server.listener import Listener
from gateway.http_server.overload import ConnectionTracker
from gateway.http_server.response import WRITE_HIGH_WATER
from gateway.http_server.sockets import TLS_SIZE, ListenSockets
from gateway.memory import MemoryBudget
from gateway.pipeline.http import HttpRequest, ResponseWriter
from protocols.core.errors import Overloaded
from tests.integration.http_server.probes import build_request
from tests.integration.http_server.test_listeners import (
    LIMITS,
    RecordingHandler,
    open_client,
    parse_statuses,
    read_until_end,
    run_listener,
    send_get,
)
from tests.support.waiting import PATIENCE

PEM = Path(__file__).parents[2] / "fault" / "loopback.pem"
QUICK = replace(LIMITS, header_timeout=0.4)
"""Timeouts are checked every 0.1 s."""
CHUNKED = build_request(b"Transfer-Encoding: chunked", line=b"POST /x HTTP/1.1")


async def send_slow_body(port: int) -> bytes:
    """Send one byte of the body every 50 ms and return the response's head."""
    async with asyncio.timeout(PATIENCE), open_client(port) as (reader, writer):
        writer.write(CHUNKED)

        async def send() -> None:
            with suppress(ConnectionError):
                while True:
                    writer.write(b"1\r\nx\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.05)

        sending = asyncio.create_task(send())
        try:
            return await reader.readuntil(b"\r\n\r\n")
        finally:
            sending.cancel()


async def test_body_below_the_minimum_rate_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http_server.overload.BODY_RATE_GRACE", 0.5)
    async with run_listener() as (port, handler, listener):
        listener.set_limits(replace(QUICK, min_body_rate=1000))
        assert parse_statuses(await send_slow_body(port)) == [400]
        assert handler.requests == []


async def test_body_above_the_total_body_timeout_is_rejected() -> None:
    async with run_listener() as (port, handler, listener):
        listener.set_limits(replace(QUICK, body_total_timeout=0.5, min_body_rate=1))
        assert parse_statuses(await send_slow_body(port)) == [400]
        assert handler.requests == []
        assert listener.refused_by_reason == {"slow_body": 1}


async def test_bodies_above_the_memory_budget_are_rejected_and_memory_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.http_server.connection.CONNECTION_SIZE", 0)
    budget = MemoryBudget(limit=100)
    errors: list[Exception] = []

    async def read(http: HttpRequest, writer: ResponseWriter) -> None:
        try:
            await http.body(1000)
        except Overloaded as error:
            errors.append(error)
        writer.send_response(200, (), b"")

    listener = Listener(read, LIMITS, budget)
    port = await listener.listen("127.0.0.1", 0)
    declared = build_request(b"Content-Length: 101", b"Connection: close", body=b"x" * 101)
    announced = build_request(b"Content-Length: 101", b"Connection: close", body=b"")
    chunked = build_request(
        b"Transfer-Encoding: chunked", b"Connection: close", body=b"65\r\n" + b"x" * 101
    )
    fits = build_request(b"Content-Length: 100", b"Connection: close", body=b"x" * 100)

    for data in (declared, announced, chunked, fits, fits):
        assert parse_statuses(await read_until_end(port, data)) == [200]
    assert len(errors) == 3
    assert budget.get_use("bodies") == 0

    await listener.drain(1)
    await listener.close()


async def test_one_upload_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is free at once, so that no further client is disconnected for the new one."""
    monkeypatch.setattr("gateway.http_server.connection._MIN_EVICTION_AGE", 0.1)
    begun = build_request(b"Content-Length: 30000", line=b"POST /x HTTP/1.1", body=b"x" * 20_000)
    whole = build_request(b"Content-Length: 15000", line=b"POST /x HTTP/1.1", body=b"x" * 15_000)
    async with run_listener() as (port, _, listener), AsyncExitStack() as stack:
        listener.set_limits(QUICK)
        budget, [tracker] = listener.memory, listener.memory.listeners
        clients = [await stack.enter_async_context(open_client(port)) for _ in range(5)]
        new = await stack.enter_async_context(open_client(port))
        for _, writer in clients:
            writer.write(begun)
        async with asyncio.timeout(PATIENCE):
            # Neither has an event.
            while budget.get_use("bodies") < 100_000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while tracker.get_slowest_rate() is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        budget.limit = budget.used

        new[1].write(whole)
        assert b"200 OK" in await new[0].readuntil(b"\r\n\r\n")

        assert listener.refused_by_reason == {"memory_evicted": 1}
        await wait_for_connection_count(listener, 5)
        assert budget.get_use("bodies") == 80_000
        assert budget.get_use("connections") == 5 * CONNECTION_SIZE
    assert (budget.get_use("bodies"), budget.get_use("connections")) == (0, 0)


async def test_announced_body_closes_a_slow_upload_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.http_server.connection._MIN_EVICTION_AGE", 0.1)
    begun = build_request(b"Content-Length: 30000", line=b"POST /x HTTP/1.1", body=b"x" * 20_000)
    announced = build_request(
        b"Content-Length: 15000", b"Expect: 100-continue", line=b"POST /x HTTP/1.1", body=b""
    )
    async with run_listener() as (port, _, listener), AsyncExitStack() as stack:
        listener.set_limits(replace(QUICK, min_body_rate=1 << 30))
        budget, [tracker] = listener.memory, listener.memory.listeners
        slow = await stack.enter_async_context(open_client(port))
        new = await stack.enter_async_context(open_client(port))
        slow[1].write(begun)
        async with asyncio.timeout(30):
            # Neither has an event.
            while budget.get_use("bodies") < 20_000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while tracker.get_slowest_rate() is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        budget.limit = budget.used

        new[1].write(announced)
        assert b"100 Continue" in await new[0].readuntil(b"\r\n\r\n")
        assert listener.refused_by_reason == {"memory_evicted": 1}
        new[1].write(b"x" * 15_000)
        assert b"200 OK" in await new[0].readuntil(b"\r\n\r\n")


async def test_stream_is_paused_within_a_turn_of_the_event_loop() -> None:
    """A worker that sends much at once fills no buffer before the transport says that it is full.

    When the client has read it, the stream goes on.
    """
    sizes: list[int] = []

    async def flood(_http: HttpRequest, writer: ResponseWriter) -> None:
        writer.start(200, ())
        for _ in range(20):
            await writer.drain()
            size = 0
            while not writer.needs_drain and size < 1 << 20:
                writer.write(b"x" * 1024)
                size += 1024
            sizes.append(size)
        writer.finish()

    listener = Listener(flood, LIMITS)
    port = await listener.listen("127.0.0.1", 0)
    received = await read_until_end(port, build_request(b"Connection: close", body=b""))

    assert len(sizes) == 20
    assert max(sizes) <= WRITE_HIGH_WATER + 1024
    assert received.count(b"x") == sum(sizes)
    await listener.drain(1)
    await listener.close()


async def test_one_idle_connection_makes_room_for_another() -> None:
    async with run_listener() as (port, _, listener), AsyncExitStack() as stack:
        for _ in range(10):
            await stack.enter_async_context(open_client(port))
        await wait_for_connection_count(listener, 10)
        listener.memory.limit = listener.memory.used

        async with open_client(port) as new:
            assert b"200 OK" in await send_get(new, "/a")

        assert listener.refused_by_reason == {"idle_evicted": 1}


async def test_connection_limit_evicts_the_connection_with_the_slowest_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.http_server.connection._MIN_EVICTION_AGE", 0.2)
    async with (
        run_listener() as (port, handler, listener),
        open_client(port) as busy,
        open_client(port) as slow,
    ):
        listener.set_limits(replace(QUICK, connections=2))
        busy[1].write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await handler.arrived.wait()
        slow[1].write(CHUNKED + b"1\r\nx\r\n")
        async with asyncio.timeout(PATIENCE):
            while listener.refused_by_reason.get("slow_evicted") is None:
                async with open_client(port) as new:
                    with suppress(ConnectionError, asyncio.IncompleteReadError):
                        await send_get(new, "/new")
            with suppress(ConnectionError):
                assert await slow[0].read() == b""
        handler.hold.set()

        assert b"200 OK" in await busy[0].readuntil(b"/hold ")


def create_server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    return context


def create_client_context() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=PEM)


async def is_served(port: int) -> bool:
    """Return whether a new TLS connection gets a response."""
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=create_client_context()
        )
    except OSError:
        return False
    try:
        return b"200 OK" in await send_get((reader, writer), "/a")
    finally:
        writer.transport.abort()


async def wait_for_connection_count(listener: Listener, count: int) -> None:
    """Wait until the listener has this number of connections."""
    async with asyncio.timeout(PATIENCE):
        while listener.connections != count:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)


async def test_tls_handshake_timeout_closes_a_silent_connection() -> None:
    listener = Listener(RecordingHandler().serve, replace(LIMITS, tls_handshake_timeout=0.5))
    port = await listener.listen("127.0.0.1", 0, create_server_context())

    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(open_client(port)) for _ in range(3)]
        await wait_for_connection_count(listener, 3)

        assert await is_served(port)
        async with asyncio.timeout(PATIENCE):
            for reader, _ in silent:
                with suppress(ConnectionError):
                    assert await reader.read() == b""

        await wait_for_connection_count(listener, 0)

    assert listener.refused_by_reason == {"tls_handshake": 3}

    await listener.drain(1)
    await listener.close()


async def test_silent_tls_connections_count_against_connection_limits() -> None:
    limits = replace(LIMITS, connections=2)
    listener = Listener(RecordingHandler().serve, limits)
    port = await listener.listen("127.0.0.1", 0, create_server_context())
    async with open_client(port) as oldest, open_client(port):
        await wait_for_connection_count(listener, 2)
        assert await is_served(port)
        with suppress(ConnectionError):
            assert await oldest[0].read() == b""
        assert listener.refused_by_reason == {"idle_evicted": 1}

        listener.set_limits(replace(LIMITS, connections_per_address=1))
        await wait_for_connection_count(listener, 1)
        assert not await is_served(port)
    await listener.drain(1)
    await listener.close()


async def test_memory_of_tls_counts_from_the_accept_to_the_close() -> None:
    budget = MemoryBudget()
    listener = Listener(RecordingHandler().serve, LIMITS, budget)
    port = await listener.listen("127.0.0.1", 0, create_server_context())

    async with open_client(port), open_client(port):
        await wait_for_connection_count(listener, 2)
        assert budget.get_use("connections") == 2 * TLS_SIZE
    await wait_for_connection_count(listener, 0)
    assert budget.get_use("connections") == 0

    client = await asyncio.open_connection("127.0.0.1", port, ssl=create_client_context())
    assert b"200 OK" in await send_get(client, "/a")
    assert budget.get_use("connections") == TLS_SIZE + CONNECTION_SIZE
    client[1].transport.abort()
    await wait_for_connection_count(listener, 0)
    assert budget.get_use("connections") == 0
    await listener.close()


async def test_memory_that_connections_lack_closes_pending_tls_handshakes() -> None:
    """The oldest handshake ends where connections hold more than the budget."""
    budget = MemoryBudget(2 * TLS_SIZE)
    listener = Listener(RecordingHandler().serve, LIMITS, budget)
    port = await listener.listen("127.0.0.1", 0, create_server_context())

    async with open_client(port) as oldest, open_client(port), open_client(port):
        async with asyncio.timeout(30):
            with suppress(ConnectionError):
                assert await oldest[0].read() == b""
        await wait_for_connection_count(listener, 2)
        assert budget.get_use("connections") == 2 * TLS_SIZE
    await listener.close()


def test_buffers_of_tls_are_small() -> None:
    """Each connection keeps its buffer, as long as it is open."""
    sockets = ListenSockets(asyncio.Protocol, ConnectionTracker(LIMITS))
    sockets.set_tls_context(create_server_context())

    assert asyncio.sslproto.SSLProtocol.max_size <= TLS_SIZE // 2


async def test_close_ends_pending_tls_handshakes() -> None:
    listener = Listener(RecordingHandler().serve, LIMITS)
    port = await listener.listen("127.0.0.1", 0, create_server_context())

    async with open_client(port) as (reader, _):
        await wait_for_connection_count(listener, 1)
        await listener.drain(0)
        async with asyncio.timeout(PATIENCE):
            await listener.close()
            with suppress(ConnectionError):
                assert await reader.read() == b""

    assert listener.connections == 0


async def test_half_closed_connection_counts_as_client_disconnect() -> None:
    """docs/known-limitations.md says so: it can't be told from a closed connection."""
    async with run_listener() as (port, handler, _), open_client(port) as (reader, writer):
        writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await handler.arrived.wait()
        writer.write_eof()
        async with asyncio.timeout(PATIENCE):
            await handler.left.wait()
            with suppress(ConnectionError):
                assert await reader.read() == b""


async def test_connection_limit_evicts_the_longest_idle_connections() -> None:
    """With far more clients than connections, each new one evicts the one that is idle longest."""
    async with run_listener() as (port, _, listener):
        listener.set_limits(replace(LIMITS, connections=20))
        sockets = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(100)]
        try:
            async with asyncio.timeout(PATIENCE), open_client(port) as new:
                assert b"200 OK" in await send_get(new, "/a")
            assert listener.connections <= 20
        finally:
            for one in sockets:
                one.close()
