"""Clients that would use up connections, time or memory."""

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.http_server.listener import Listener
from gateway.http_server.overload import BodyBudget
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

PEM = Path(__file__).parents[2] / "fault" / "loopback.pem"
QUICK = replace(LIMITS, header_timeout=0.4)
"""Timeouts are checked every tenth of a second."""
CHUNKED = build_request(b"Transfer-Encoding: chunked", line=b"POST /x HTTP/1.1")


async def send_slow_body(port: int) -> bytes:
    """What is answered to a body of which a byte comes now and then."""
    async with asyncio.timeout(20), open_client(port) as (reader, writer):
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
    async with run_listener() as (port, seen, listener):
        listener.set_limits(replace(QUICK, min_body_rate=1000))
        assert parse_statuses(await send_slow_body(port)) == [400]
        assert seen.requests == []


async def test_body_above_the_total_body_timeout_is_rejected() -> None:
    async with run_listener() as (port, seen, listener):
        listener.set_limits(replace(QUICK, body_total_timeout=0.5, min_body_rate=1))
        assert parse_statuses(await send_slow_body(port)) == [400]
        assert seen.requests == []
        assert listener.refused_by_reason == {"slow_body": 1}


async def test_bodies_above_the_memory_budget_are_rejected_and_memory_is_released() -> None:
    budget = BodyBudget(limit=100)
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
    assert budget.used == 0
    await listener.drain(1)
    await listener.close()


async def test_connection_limit_evicts_the_connection_with_the_slowest_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.http_server.connection._MIN_EVICTION_AGE", 0.2)
    async with (
        run_listener() as (port, seen, listener),
        open_client(port) as busy,
        open_client(port) as slow,
    ):
        listener.set_limits(replace(QUICK, connections=2))
        busy[1].write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await seen.arrived.wait()
        slow[1].write(CHUNKED + b"1\r\nx\r\n")
        async with asyncio.timeout(20):
            while listener.refused_by_reason.get("body_evicted") is None:
                async with open_client(port) as new:
                    with suppress(ConnectionError, asyncio.IncompleteReadError):
                        await send_get(new, "/new")
            with suppress(ConnectionError):
                assert await slow[0].read() == b""
        seen.hold.set()
        assert b"200 OK" in await busy[0].readuntil(b"/hold ")


def create_server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    return context


def create_client_context() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=PEM)


async def is_served(port: int) -> bool:
    """Whether a new TLS connection is."""
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
    """Wait until so many connections are counted."""
    async with asyncio.timeout(10):
        while listener.connections != count:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)


async def test_tls_handshake_timeout_closes_a_silent_connection() -> None:
    listener = Listener(RecordingHandler().serve, replace(LIMITS, tls_handshake_timeout=0.5))
    port = await listener.listen("127.0.0.1", 0, create_server_context())
    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(open_client(port)) for _ in range(3)]
        await wait_for_connection_count(listener, 3)
        assert await is_served(port)
        async with asyncio.timeout(10):
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


async def test_close_ends_pending_tls_handshakes() -> None:
    listener = Listener(RecordingHandler().serve, LIMITS)
    port = await listener.listen("127.0.0.1", 0, create_server_context())
    async with open_client(port) as (reader, _):
        await wait_for_connection_count(listener, 1)
        await listener.drain(0)
        async with asyncio.timeout(10):
            await listener.close()
            with suppress(ConnectionError):
                assert await reader.read() == b""
    assert listener.connections == 0


async def test_half_closed_connection_counts_as_client_disconnect() -> None:
    """As docs/known-limitations.md says: it can't be told from one that closes both."""
    async with run_listener() as (port, seen, _), open_client(port) as (reader, writer):
        writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await seen.arrived.wait()
        writer.write_eof()
        async with asyncio.timeout(10):
            await seen.left.wait()
            with suppress(ConnectionError):
                assert await reader.read() == b""


async def test_connection_limit_evicts_the_longest_idle_connections() -> None:
    """Far more than the limit of connections; each new one closes the one idle longest."""
    async with run_listener() as (port, _, listener):
        listener.set_limits(replace(LIMITS, connections=20))
        sockets = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(100)]
        try:
            async with asyncio.timeout(10), open_client(port) as new:
                assert b"200 OK" in await send_get(new, "/a")
            assert listener.connections <= 20
        finally:
            for one in sockets:
                one.close()
