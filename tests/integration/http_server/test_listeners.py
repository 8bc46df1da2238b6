"""Valid and invalid HTTP/1.1, sent to a listener byte by byte.

Where the standard (RFC 9110, 9112) leaves a choice the server must be safe: what could be two
requests is refused, and the connection ends.
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

Talk = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LIMIT = 1 << 20
LIMITS = ServerLimitsConfig(header=8190, connections=50)


class RecordingHandler:
    """What reached the gateway, and whether a client left while it was at work."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, bytes]] = []
        self.arrived, self.hold, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(self, http: HttpRequest, sink: ResponseWriter) -> None:
        """Tell what was read; ``/stream`` in pieces, ``/hold`` when it is let, ``/deny`` unread."""
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
    seen = RecordingHandler()
    listener = Listener(seen.serve, LIMITS)
    port = await listener.listen("127.0.0.1", 0)
    try:
        yield port, seen, listener
    finally:
        await listener.drain(0)
        await listener.close()


async def send_and_receive(port: int, pieces: Sent, enough: Callable[[bytes], bool]) -> bytes:
    """What is answered until the other side ends, or has said enough and says no more at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    response = b""
    try:
        async with asyncio.timeout(5.0):
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
    """What came of every probe, each with a listener of its own, some at a time."""
    places = asyncio.Semaphore(16)

    async def one(probe: Probe) -> tuple[RecordingHandler, bytes]:
        async with places, run_listener() as (port, seen, _):
            return seen, await send_and_receive(port, probe.sent, partial(enough, probe))

    results = await asyncio.gather(*map(one, probes))
    return {probe.name: result for probe, result in zip(probes, results, strict=True)}


def is_rejected(seen: RecordingHandler, response: bytes) -> bool:
    ends = response.endswith(b"<end>")
    return ends and not seen.requests and all(400 <= one < 600 for one in parse_statuses(response))


def get_expected_statuses(probe: Probe) -> list[int]:
    return list(probe.statuses or (200,) * len(probe.read))


def has_all_responses(probe: Probe, response: bytes) -> bool:
    return not probe.ends and len(parse_statuses(response)) >= len(get_expected_statuses(probe))


def matches_probe(probe: Probe, seen: RecordingHandler, response: bytes) -> bool:
    return (
        seen.requests == list(probe.read)
        and parse_statuses(response) == get_expected_statuses(probe)
        and response.endswith(b"<end>") == probe.ends
    )


async def test_invalid_request_is_rejected_and_closes_the_connection() -> None:
    results = await run_probes(REFUSED, lambda probe, response: False)
    wrong = {one for one, result in results.items() if not is_rejected(*result)}
    assert wrong == set()


async def test_invalid_request_after_a_valid_one_is_rejected_and_closes_the_connection() -> None:
    for probe, (seen, response) in zip(
        LATER, (await run_probes(LATER, lambda probe, response: False)).values(), strict=True
    ):
        first, *others = parse_statuses(response)
        assert seen.requests == list(probe.read), probe.name
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
    async with run_listener() as (port, seen, _):
        async with open_client(port) as (_, writer):
            writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
            await seen.arrived.wait()
        async with asyncio.timeout(5):
            await seen.left.wait()


async def test_drain_finishes_running_requests_and_refuses_new_connections() -> None:
    async with (
        run_listener() as (port, seen, listener),
        open_client(port) as idle,
        open_client(port) as busy,
    ):
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(send_get(busy, "/hold"))
            await seen.arrived.wait()
            tasks.create_task(listener.drain(5))
            await asyncio.sleep(0.1)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            seen.hold.set()
        assert b"200 OK" in answer.result()
        await listener.close()
        assert await idle[0].read() == b""


async def is_connection_served(port: int) -> bool:
    """Whether a new connection is."""
    async with open_client(port) as new:
        with suppress(asyncio.IncompleteReadError, ConnectionResetError):
            return b"200 OK" in await send_get(new, "/a")
        return False


async def is_connection_closed(port: int) -> bool:
    """Whether a new connection is closed at once."""
    async with asyncio.timeout(5), open_client(port) as (reader, _):
        with suppress(ConnectionResetError):
            return await reader.read() == b""
        return True


async def test_connection_above_max_connections_is_closed() -> None:
    async with run_listener() as (port, seen, listener), open_client(port) as (reader, writer):
        listener.set_limits(replace(LIMITS, connections=1))
        writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await seen.arrived.wait()
        assert await is_connection_closed(port)
        seen.hold.set()
        assert b"200 OK" in await reader.readuntil(b"/hold ")


async def test_connection_above_max_per_address_is_closed() -> None:
    """Those that have ended don't count."""
    async with run_listener() as (port, _, listener):
        listener.set_limits(replace(LIMITS, connections_per_address=2))
        async with open_client(port) as first, open_client(port) as second:
            assert b"200 OK" in await send_get(first, "/a")
            assert b"200 OK" in await send_get(second, "/a")
            assert await is_connection_closed(port)
            assert b"200 OK" in await send_get(first, "/b")
        async with asyncio.timeout(5):
            while not await is_connection_served(port):
                pass


async def test_connection_limit_evicts_the_longest_idle_connection_and_no_busy_one() -> None:
    """A head that has begun to come does not count as work."""
    async with run_listener() as (port, seen, listener), AsyncExitStack() as stack:
        listener.set_limits(replace(LIMITS, connections=4))
        idle, begun, busy, used = [
            await stack.enter_async_context(open_client(port)) for _ in range(4)
        ]
        begun[1].write(b"GET / HT")
        busy[1].write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await seen.arrived.wait()
        assert b"200 OK" in await send_get(used, "/a")
        for late in (idle, begun, used):
            new = await stack.enter_async_context(open_client(port))
            assert b"200 OK" in await send_get(new, "/new")
            async with asyncio.timeout(5):
                assert await late[0].read() == b""
        seen.hold.set()
        assert b"200 OK" in await busy[0].readuntil(b"/hold ")


async def test_draining_listener_sends_connection_close_with_each_response() -> None:
    """New ones are served as well, until it listens no more."""
    async with run_listener() as (port, _, listener), open_client(port) as idle_client:
        assert b"200 OK" in await send_get(idle_client, "/a")
        listener.is_draining = True
        async with open_client(port) as new:
            for one in (idle_client, new):
                one[1].write(b"GET /b HTTP/1.1\r\nHost: a\r\n\r\n")
                async with asyncio.timeout(5):
                    response = await one[0].read()
                assert b"connection: close" in response.lower()
                assert response.endswith(b"/b ")
        listener.stop_accepting()
        for _ in range(4):  # turns: whom the standard loop lets in as it shuts is met first
            await asyncio.sleep(0)
        assert not listener.socket_fds
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_response_sent_before_the_body_is_read_has_connection_close() -> None:
    """Or it would send its next request into a connection that is closed."""
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
        seen = RecordingHandler()
        heir = Listener(seen.serve, LIMITS)
        assert await heir.listen("ignored", 0, sockets=[shared]) == port
        listener.stop_accepting()
        for _ in range(5):
            async with open_client(port) as new:
                assert b"200 OK" in await send_get(new, "/a")
        assert (len(seen.requests), old.requests) == (5, [])
        await heir.drain(0)
        await heir.close()


async def test_header_body_and_idle_timeouts_end_the_connection() -> None:
    """Each thing that a client may dawdle over has its own time."""
    async with run_listener() as (port, seen, listener):
        listener.set_limits(replace(LIMITS, header_timeout=0.2, body_timeout=0.2, idle_timeout=0.2))
        slow = [b"GET / HT", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nab", b""]
        async with asyncio.TaskGroup() as tasks:
            responses = [tasks.create_task(read_until_end(port, one)) for one in slow]
        assert [parse_statuses(one.result()) for one in responses] == [[408], [400], []]
        assert seen.requests == []


async def read_until_end(port: int, sent: bytes) -> bytes:
    async with asyncio.timeout(10), open_client(port) as (reader, writer):
        writer.write(sent)
        with suppress(ConnectionResetError):
            return await reader.read()
        return b""


async def test_slow_reader_applies_backpressure_to_its_own_response() -> None:
    """What it does not take waits in the gateway up to a bound, and then who writes it waits."""
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
