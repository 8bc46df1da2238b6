"""Valid and invalid HTTP/1.1, sent to a listener byte by byte.

Where the standard (RFC 9110, 9112) leaves a choice, the listener takes the safe one: bytes that
could be read as two requests are rejected, and the connection is closed.
"""

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import pytest
from msgspec.structs import replace

from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.listener import Listener
from gateway.pipeline.http import HttpRequest, ResponseWriter
from protocols.core.errors import GatewayError
from protocols.core.interfaces import HttpResponse
from tests.integration.http_server.probes import (
    ACCEPTED,
    LATER,
    REFUSED,
    Probe,
    Sent,
    build_request,
)
from tests.support.waiting import PATIENCE

Talk = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LIMIT = 1 << 20
LIMITS = ServerLimitsConfig(header=8190, connections=50)


class RecordingHandler:
    """A request handler that records its requests and whether a client disconnected."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, bytes]] = []
        self.arrived, self.hold, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(self, http: HttpRequest, sink: ResponseWriter) -> None:
        """Echo the body; ``/stream`` streams it, ``/hold`` waits first, ``/deny`` skips it."""
        if http.path == "/deny":
            _send_response(sink, HttpResponse(401, b"who?"))
            return
        try:
            body = await http.body(LIMIT)
        except GatewayError as error:
            _send_response(
                sink,
                HttpResponse(413 if "larger" in error.message else 400, error.message.encode()),
            )
            return
        self.requests.append((http.method, http.path, http.query, body))
        self.arrived.set()
        try:
            if http.path == "/hold":
                await self.hold.wait()
            if http.path == "/stream":
                await _send_stream(sink)
                return
        except asyncio.CancelledError:
            self.left.set()
            raise
        _send_response(sink, HttpResponse(200, b"%b %b" % (http.path.encode(), body)))


def _send_response(sink: ResponseWriter, reply: HttpResponse) -> None:
    sink.send_response(reply.status, reply.headers, reply.body)


async def _send_stream(sink: ResponseWriter) -> None:
    sink.start(200, (("Content-Type", "text/event-stream"),))
    for n in range(3):
        sink.write(b"data: %d\n\n" % n)
        if sink.needs_drain:
            await sink.drain()
    sink.finish()


@asynccontextmanager
async def run_listener() -> AsyncIterator[tuple[int, RecordingHandler, Listener]]:
    handler = RecordingHandler()
    listener = Listener(handler.serve, LIMITS)
    port = await listener.listen("127.0.0.1", 0)
    try:
        yield port, handler, listener
    finally:
        await listener.drain(0)
        await listener.close()


async def send_and_receive(port: int, pieces: Sent, enough: Callable[[bytes], bool]) -> bytes:
    """Return the bytes received until the connection ends, or 0.3 s after ``enough`` of them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    response = b""
    try:
        async with asyncio.timeout(PATIENCE):
            for piece in pieces:
                if isinstance(piece, bytes):
                    writer.write(piece)
                else:
                    await asyncio.sleep(piece)
            while True:
                async with asyncio.timeout(0.3 if enough(response) else None):
                    data = await reader.read(1 << 16)
                if not data:
                    return response + b"<end>"
                response += data
    except (TimeoutError, ConnectionError):
        return response
    finally:
        writer.transport.abort()


def parse_statuses(response: bytes) -> list[int]:
    return [int(one) for one in re.findall(rb"HTTP/1\.[01] (\d{3})", response)]


async def run_probes(
    probes: Sequence[Probe], enough: Callable[[Probe, bytes], bool]
) -> dict[str, tuple[RecordingHandler, bytes]]:
    """Send each probe to a listener of its own, 16 at a time, and return the results by name."""
    places = asyncio.Semaphore(16)

    async def one(probe: Probe) -> tuple[RecordingHandler, bytes]:
        async with places, run_listener() as (port, handler, _):
            return handler, await send_and_receive(port, probe.sent, partial(enough, probe))

    results = await asyncio.gather(*map(one, probes))
    return {probe.name: result for probe, result in zip(probes, results, strict=True)}


def is_rejected(handler: RecordingHandler, response: bytes) -> bool:
    ends = response.endswith(b"<end>")
    return (
        ends and not handler.requests and all(400 <= one < 600 for one in parse_statuses(response))
    )


def get_expected_statuses(probe: Probe) -> list[int]:
    return list(probe.statuses or (200,) * len(probe.read))


def has_all_responses(probe: Probe, response: bytes) -> bool:
    return not probe.ends and len(parse_statuses(response)) >= len(get_expected_statuses(probe))


def matches_probe(probe: Probe, handler: RecordingHandler, response: bytes) -> bool:
    return (
        handler.requests == list(probe.read)
        and parse_statuses(response) == get_expected_statuses(probe)
        and response.endswith(b"<end>") == probe.ends
    )


async def test_invalid_request_is_rejected_and_closes_the_connection() -> None:
    results = await run_probes(REFUSED, lambda probe, response: False)
    wrong = {one for one, result in results.items() if not is_rejected(*result)}
    assert wrong == set()


async def test_invalid_request_after_a_valid_one_is_rejected_and_closes_the_connection() -> None:
    for probe, (handler, response) in zip(
        LATER, (await run_probes(LATER, lambda probe, response: False)).values(), strict=True
    ):
        first, *others = parse_statuses(response)
        assert handler.requests == list(probe.read), probe.name
        assert response.endswith(b"<end>"), probe.name
        assert first == 200, probe.name
        assert all(400 <= one < 600 for one in others), probe.name


async def test_valid_request_is_parsed_as_expected() -> None:
    results = await run_probes(ACCEPTED, has_all_responses)
    wrong = {probe.name for probe in ACCEPTED if not matches_probe(probe, *results[probe.name])}
    assert wrong == set()


def test_probe_names_are_unique_and_at_least_300() -> None:
    names = [probe.name for probe in (*REFUSED, *LATER, *ACCEPTED)]
    assert len(set(names)) == len(names) >= 300


@asynccontextmanager
async def open_client(port: int) -> AsyncIterator[Talk]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def send_get(talk: Talk, path: str) -> bytes:
    reader, writer = talk
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    return await reader.readuntil(f"{path} ".encode())


async def test_only_streams_have_no_cache_and_no_buffering_headers() -> None:
    for path, count in ((b"/stream", 1), (b"/", 0)):
        async with run_listener() as (port, _, _):
            response = await send_and_receive(
                port, [b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path], bool
            )
        for header in (b"cache-control: no-cache\r\n", b"x-accel-buffering: no\r\n"):
            assert response.lower().count(header) == count


async def test_client_disconnect_cancels_the_request_handler() -> None:
    async with run_listener() as (port, handler, _):
        async with open_client(port) as (_, writer):
            writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
            await handler.arrived.wait()
        async with asyncio.timeout(PATIENCE):
            await handler.left.wait()


async def test_drain_finishes_running_requests_and_refuses_new_connections() -> None:
    async with (
        run_listener() as (port, handler, listener),
        open_client(port) as idle,
        open_client(port) as busy,
    ):
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            response = tasks.create_task(send_get(busy, "/hold"))
            await handler.arrived.wait()
            tasks.create_task(listener.drain(5))
            await asyncio.sleep(0.1)

            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)

            handler.hold.set()
        assert b"200 OK" in response.result()

        await listener.close()
        assert await idle[0].read() == b""


async def is_connection_served(port: int) -> bool:
    """Return whether a new connection gets a response."""
    async with open_client(port) as new:
        with suppress(asyncio.IncompleteReadError, ConnectionResetError):
            return b"200 OK" in await send_get(new, "/a")
        return False


async def is_connection_closed(port: int) -> bool:
    """Return whether a new connection is closed at once."""
    async with asyncio.timeout(PATIENCE), open_client(port) as (reader, _):
        with suppress(ConnectionResetError):
            return await reader.read() == b""
        return True


async def test_connection_above_max_connections_is_closed() -> None:
    async with run_listener() as (port, handler, listener), open_client(port) as (reader, writer):
        listener.set_limits(replace(LIMITS, connections=1))
        writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await handler.arrived.wait()

        assert await is_connection_closed(port)

        handler.hold.set()
        assert b"200 OK" in await reader.readuntil(b"/hold ")


async def test_connection_above_max_per_address_is_closed() -> None:
    """Closed connections no longer count."""
    async with run_listener() as (port, _, listener):
        listener.set_limits(replace(LIMITS, connections_per_address=2))
        async with open_client(port) as first, open_client(port) as second:
            assert b"200 OK" in await send_get(first, "/a")
            assert b"200 OK" in await send_get(second, "/a")
            assert await is_connection_closed(port)
            assert b"200 OK" in await send_get(first, "/b")

        async with asyncio.timeout(PATIENCE):
            while not await is_connection_served(port):
                pass


async def test_connection_limit_evicts_the_longest_idle_connection_and_no_busy_one() -> None:
    """A connection with an incomplete request head counts as idle."""
    async with run_listener() as (port, handler, listener), AsyncExitStack() as stack:
        listener.set_limits(replace(LIMITS, connections=4))
        idle, begun, busy, used = [
            await stack.enter_async_context(open_client(port)) for _ in range(4)
        ]
        begun[1].write(b"GET / HT")
        busy[1].write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await handler.arrived.wait()

        assert b"200 OK" in await send_get(used, "/a")

        for late in (idle, begun, used):
            new = await stack.enter_async_context(open_client(port))
            assert b"200 OK" in await send_get(new, "/new")
            async with asyncio.timeout(PATIENCE):
                assert await late[0].read() == b""
        handler.hold.set()
        assert b"200 OK" in await busy[0].readuntil(b"/hold ")


async def test_draining_listener_sends_connection_close_with_each_response() -> None:
    """New connections are served until the listener stops accepting."""
    async with run_listener() as (port, _, listener), open_client(port) as idle_client:
        assert b"200 OK" in await send_get(idle_client, "/a")

        listener.is_draining = True
        async with open_client(port) as new:
            for one in (idle_client, new):
                one[1].write(b"GET /b HTTP/1.1\r\nHost: a\r\n\r\n")
                async with asyncio.timeout(PATIENCE):
                    response = await one[0].read()
                assert b"connection: close" in response.lower()
                assert response.endswith(b"/b ")
        listener.stop_accepting()
        for _ in range(4):  # asyncio first accepts the connections that are already queued
            await asyncio.sleep(0)

        assert not listener.socket_fds
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_response_sent_before_the_body_is_read_has_connection_close() -> None:
    """Otherwise the client would send its next request into a closed connection."""
    deny = build_request(b"Content-Length: 4", line=b"POST /deny HTTP/1.1")
    for sent, ends in ((deny, True), (deny + b"abcd", False)):
        async with run_listener() as (port, _, _):
            response = await send_and_receive(
                port, [sent], lambda response: response.endswith(b"who?")
            )
        assert parse_statuses(response) == [401]
        assert (b"\r\nConnection: close\r\n" in response) is ends
        assert response.endswith(b"<end>") is ends


async def test_inherited_listening_socket_is_shared_until_one_listener_stops() -> None:
    async with run_listener() as (port, old, listener):
        [descriptor] = listener.socket_fds
        shared = socket.socket(fileno=os.dup(descriptor))
        handler = RecordingHandler()
        successor = Listener(handler.serve, LIMITS)

        assert await successor.listen("ignored", 0, sockets=[shared]) == port

        listener.stop_accepting()
        for _ in range(5):
            async with open_client(port) as new:
                assert b"200 OK" in await send_get(new, "/a")
        assert (len(handler.requests), old.requests) == (5, [])

        await successor.drain(0)
        await successor.close()


async def test_inherited_socket_keeps_its_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old process serves it still: a shorter queue would refuse its clients."""
    backlogs: list[int] = []
    listen = socket.socket.listen

    def note_backlog(self: socket.socket, backlog: int) -> None:
        backlogs.append(backlog)
        listen(self, backlog)

    async with run_listener() as (_, _, listener):
        [descriptor] = listener.socket_fds
        shared = socket.socket(fileno=os.dup(descriptor))
        successor = Listener(RecordingHandler().serve, LIMITS)
        monkeypatch.setattr(socket.socket, "listen", note_backlog)

        await successor.listen("ignored", 0, sockets=[shared])
        await successor.drain(0)
        await successor.close()

    assert backlogs
    assert min(backlogs) >= 1024


async def test_header_body_and_idle_timeouts_end_the_connection() -> None:
    """The header, the body and the idle connection each have a timeout of their own."""
    async with run_listener() as (port, handler, listener):
        listener.set_limits(replace(LIMITS, header_timeout=0.2, body_timeout=0.2, idle_timeout=0.2))
        slow = [b"GET / HT", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nab", b""]

        async with asyncio.TaskGroup() as tasks:
            responses = [tasks.create_task(read_until_end(port, one)) for one in slow]

        assert [parse_statuses(one.result()) for one in responses] == [[408], [400], []]
        assert handler.requests == []


async def read_until_end(port: int, sent: bytes) -> bytes:
    async with asyncio.timeout(PATIENCE), open_client(port) as (reader, writer):
        writer.write(sent)
        with suppress(ConnectionResetError):
            return await reader.read()
        return b""


async def test_slow_reader_applies_backpressure_to_its_own_response() -> None:
    """The handler waits once the write buffer of its connection is full."""
    written = 0

    async def flood(http: HttpRequest, sink: ResponseWriter) -> None:
        nonlocal written
        await http.body(LIMIT)
        sink.start(200, ())
        for _ in range(400):
            sink.write(b"x" * (1 << 16))
            if sink.needs_drain:
                await sink.drain()
            written += 1
        sink.finish()

    async with run_listener() as (port, _, listener), open_client(port) as (reader, writer):
        listener.handle_request = flood
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        still = -1

        while still != written:
            still = written
            await asyncio.sleep(0.3)

        assert 0 < written < 300
