"""Clients that would use up connections, time or memory, at both HTTP servers."""

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.http_server.aiohttp_listener import AiohttpListener
from gateway.http_server.listener import NativeListener
from gateway.http_server.overload import BodyBudget
from gateway.pipeline.http import HttpRequest, ResponseWriter
from protocols.core.errors import Overloaded
from tests.integration.http_server.probes import request
from tests.integration.http_server.test_listeners import (
    FRONTS,
    LIMITS,
    Seen,
    asked,
    front,
    opened,
    statuses,
    until_end,
)

PEM = Path(__file__).parents[2] / "fault" / "loopback.pem"
QUICK = replace(LIMITS, header_timeout=0.4)
"""Timeouts are checked every tenth of a second."""
CHUNKED = request(b"Transfer-Encoding: chunked", line=b"POST /x HTTP/1.1")


async def drip(port: int) -> bytes:
    """What is answered to a body of which a byte comes now and then."""
    async with asyncio.timeout(20), opened(port) as (reader, writer):
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


@pytest.mark.parametrize("name", FRONTS)
async def test_a_body_below_the_minimum_rate_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http_server.overload.BODY_RATE_GRACE", 0.5)
    async with front(name) as (port, seen, made):
        made.set_limits(replace(QUICK, min_body_rate=1000))
        assert statuses(await drip(port)) == [400]
        assert seen.requests == []


@pytest.mark.parametrize("name", FRONTS)
async def test_a_body_beyond_its_total_time_is_refused(name: str) -> None:
    async with front(name) as (port, seen, made):
        made.set_limits(replace(QUICK, body_total_timeout=0.5, min_body_rate=1))
        assert statuses(await drip(port)) == [400]
        assert seen.requests == []
        if isinstance(made, NativeListener):
            assert made.refused_by_reason == {"slow_body": 1}


@pytest.mark.parametrize("name", FRONTS)
async def test_bodies_beyond_the_budget_are_refused_and_memory_is_given_back(name: str) -> None:
    budget = BodyBudget(limit=100)
    errors: list[Exception] = []

    async def read(http: HttpRequest, writer: ResponseWriter) -> None:
        try:
            await http.body(1000)
        except Overloaded as error:
            errors.append(error)
        writer.send_response(200, (), b"")

    made = FRONTS[name](read, LIMITS, budget)
    port = await made.listen("127.0.0.1", 0)
    declared = request(b"Content-Length: 101", b"Connection: close", body=b"x" * 101)
    chunked = request(
        b"Transfer-Encoding: chunked", b"Connection: close", body=b"65\r\n" + b"x" * 101
    )
    fits = request(b"Content-Length: 100", b"Connection: close", body=b"x" * 100)
    for data in (declared, chunked, fits, fits):
        assert statuses(await until_end(port, data)) == [200]
    assert len(errors) == 2
    assert budget.used == 0
    await made.drain(1)
    await made.close()


async def test_the_slowest_body_makes_room_for_a_new_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.http_server.connection._MIN_EVICTION_AGE", 0.2)
    async with front("native") as (port, seen, made), opened(port) as busy, opened(port) as slow:
        made.set_limits(replace(QUICK, connections=2))
        busy[1].write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await seen.arrived.wait()
        slow[1].write(CHUNKED + b"1\r\nx\r\n")
        async with asyncio.timeout(20):
            while made.refused_by_reason.get("body_evicted") is None:
                async with opened(port) as new:
                    with suppress(ConnectionError, asyncio.IncompleteReadError):
                        await asked(new, "/new")
            with suppress(ConnectionError):
                assert await slow[0].read() == b""
        seen.hold.set()
        assert b"200 OK" in await busy[0].readuntil(b"/hold ")


def tls_server() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    return context


def tls_client() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=PEM)


async def is_served(port: int) -> bool:
    """Whether a new TLS connection is."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls_client())
    except OSError:
        return False
    try:
        return b"200 OK" in await asked((reader, writer), "/a")
    finally:
        writer.transport.abort()


async def until_count(made: NativeListener | AiohttpListener, count: int) -> None:
    """Wait until so many connections are counted."""
    async with asyncio.timeout(10):
        while made.connections != count:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", FRONTS)
async def test_a_silent_tls_connection_counts_from_its_accept_and_is_closed(name: str) -> None:
    made = FRONTS[name](Seen().serve, replace(LIMITS, tls_handshake_timeout=0.5))
    port = await made.listen("127.0.0.1", 0, tls_server())
    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(opened(port)) for _ in range(3)]
        await until_count(made, 3)
        assert await is_served(port)
        async with asyncio.timeout(10):
            for reader, _ in silent:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
        await until_count(made, 0)
    assert made.refused_by_reason == {"tls_handshake": 3}
    await made.drain(1)
    await made.close()


@pytest.mark.parametrize("name", FRONTS)
async def test_silent_tls_connections_are_in_the_limits_of_connections(name: str) -> None:
    limits = replace(LIMITS, connections=2)
    made = FRONTS[name](Seen().serve, limits)
    port = await made.listen("127.0.0.1", 0, tls_server())
    async with opened(port) as oldest, opened(port):
        await until_count(made, 2)
        assert await is_served(port)
        with suppress(ConnectionError):
            assert await oldest[0].read() == b""
        assert made.refused_by_reason == {"idle_evicted": 1}
        made.set_limits(replace(LIMITS, connections_per_address=1))
        await until_count(made, 1)
        assert not await is_served(port)
    await made.drain(1)
    await made.close()


@pytest.mark.parametrize("name", FRONTS)
async def test_closing_ends_tls_handshakes(name: str) -> None:
    made = FRONTS[name](Seen().serve, LIMITS)
    port = await made.listen("127.0.0.1", 0, tls_server())
    async with opened(port) as (reader, _):
        await until_count(made, 1)
        await made.drain(0)
        async with asyncio.timeout(10):
            await made.close()
            with suppress(ConnectionError):
                assert await reader.read() == b""
    assert made.connections == 0


@pytest.mark.parametrize("name", FRONTS)
async def test_a_client_that_closes_its_sending_side_has_left(name: str) -> None:
    """As docs/known-limitations.md says: it can't be told from one that closes both."""
    async with front(name) as (port, seen, _), opened(port) as (reader, writer):
        writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await seen.arrived.wait()
        writer.write_eof()
        async with asyncio.timeout(10):
            await seen.left.wait()
            with suppress(ConnectionError):
                assert await reader.read() == b""


async def test_a_silent_connection_to_aiohttp_is_closed_and_its_errors_are_ours() -> None:
    async with front("reference") as (port, _, made):
        made.set_limits(replace(LIMITS, header_timeout=0.3))
        assert await until_end(port, b"") == b""
        assert await until_end(port, b"GET / HT") == b""
        said = await until_end(port, b"GET /secret-path \x00HTTP/1.1\r\n\r\n")
        assert statuses(said) == [400]
        for word in (b"Python", b"aiohttp", b"secret-path"):
            assert word not in said
        assert made.malformed_by_status == {400: 1}


@pytest.mark.parametrize("name", FRONTS)
async def test_many_silent_connections_leave_room_for_others(name: str) -> None:
    """Far more than the limit of connections; each new one closes the one idle longest."""
    async with front(name) as (port, _, made):
        made.set_limits(replace(LIMITS, connections=20))
        sockets = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(100)]
        try:
            async with asyncio.timeout(10), opened(port) as new:
                assert b"200 OK" in await asked(new, "/a")
            assert made.connections <= 20
        finally:
            for one in sockets:
                one.close()
