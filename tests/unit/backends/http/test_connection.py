"""The responses that a worker may send on a connection, and the errors of invalid ones."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from backends.http.client import AsyncioHttpClient
from backends.http.connection import HttpConnection
from backends.write_batching import WriteBatcher
from protocols.core.errors import InternalError, StreamBroken, WorkerError, WorkerFailed
from protocols.core.interfaces import UpstreamRequest
from tests.support.fakes import (
    CHUNKED,
    CLOSE,
    HANG,
    RESET,
    Reply,
    ScriptedWorker,
    chunk,
    head,
    make_reply,
)
from tests.support.tcp_server import run_server
from tests.unit.backends.http.client_requests import open_client, read_body

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ASK = UpstreamRequest("/", b"{}")
OK = [make_reply(b"fine")]


async def send_and_read(upstream: AsyncioHttpClient, worker: ScriptedWorker) -> bytes:
    return await read_body(await upstream.send(worker.url, ASK, 2.0))


def make_raw_head(*headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *headers, "", ""]).encode()


LONG = f"a: {'x' * 66_000}\r\n".encode()


@pytest.mark.parametrize(
    "reply",
    [
        [b"SSH-2.0-OpenSSH_9\r\n", HANG],
        [b"HTTP/1.1 nope OK\r\n\r\n", HANG],
        [b"\x16\x03\x01\x02\x00", HANG],
        [make_raw_head("content-length: 4", "content-length: 5") + b"fine!", HANG],
        [make_raw_head("content-length: 4", "transfer-encoding: chunked") + b"0\r\n\r\n", HANG],
        [make_raw_head("content-length: -1"), HANG],
        [make_raw_head("content-length: 4x") + b"fine", HANG],
        [make_raw_head(f"a: {'x' * 66_000}", "content-length: 4") + b"fine", HANG],
        [make_raw_head(*[f"a{n}: x" for n in range(300)], "content-length: 4") + b"fine", HANG],
        [b"HTTP/1.1 200 OK\r\na: ", *[b"x" * 5000] * 40, HANG],
        [b"HTTP/1.1 200 OK\r\n", LONG + b"b: ", HANG],
        [make_raw_head("transfer-encoding: chunked") + b"0\r\n" + LONG + b"\r\n", HANG],
        [
            make_raw_head("transfer-encoding: chunked") + b"0\r\n" + b"a: x\r\n" * 300 + b"\r\n",
            HANG,
        ],
        [*[b"HTTP/1.1 100 Continue\r\n\r\n" * 1000] * 10, HANG],
        [b"HTTP/1.1 200 OK\r\na b: c\r\ncontent-length: 0\r\n\r\n", HANG],
    ],
    ids=[
        "another protocol",
        "no status",
        "tls",
        "two lengths",
        "length and chunks",
        "negative",
        "not a number",
        "a long header",
        "many headers",
        "a header without end",
        "a long header of a head without end",
        "a long header after a body",
        "many headers after a body",
        "announcements without end",
        "a space in a name",
    ],
)
async def test_invalid_http_response_is_rejected_and_the_connection_closed(reply: Reply) -> None:
    async with ScriptedWorker(reply) as worker, open_client() as upstream:
        with pytest.raises(WorkerFailed):
            await send_and_read(upstream, worker)
        await worker.wait_for_disconnect()


@pytest.mark.parametrize(
    "headers",
    [[f"a: {'x' * 20_000}"], [f"a{n}: {'x' * 500}" for n in range(125)]],
    ids=["one long header", "many headers"],
)
async def test_head_of_a_response_has_a_configured_limit(headers: list[str]) -> None:
    reply = [make_raw_head(*headers, "content-length: 4") + b"fine"]
    async with ScriptedWorker(reply) as worker:
        async with open_client() as client:
            assert await send_and_read(client, worker) == b"fine"
        async with open_client(max_response_head=19_000) as client:
            with pytest.raises(WorkerFailed, match=r"19000 bytes \(max_response_head\)"):
                await send_and_read(client, worker)


@pytest.mark.parametrize(
    "rest_of_it",
    [
        [b"zz\r\n", HANG],
        [b"-1\r\n", HANG],
        [b"1" * 40 + b"\r\n", HANG],
        [b"5;" + b"x" * 9000, *[b"x" * 9000] * 20, HANG],
        [b"0\r\nA: ", *[b"x" * 9000] * 20, HANG],
        [b"0\r\n", LONG + b"b: ", HANG],
        [b"5\r\nab", CLOSE],
        [b"5\r\nab", RESET],
        [CLOSE],
    ],
    ids=[
        "no size",
        "a negative size",
        "a huge size",
        "an extension without end",
        "a trailer without end",
        "a long trailer, and one without end",
        "closed in a chunk",
        "reset in a chunk",
        "closed between chunks",
    ],
)
async def test_broken_body_raises_after_the_received_data(rest_of_it: Reply) -> None:
    reply: Reply = [CHUNKED + chunk(b"text"), 0.02, *rest_of_it]
    async with ScriptedWorker(reply) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert b"".join(await reading.read()).startswith(b"text")
        with pytest.raises(StreamBroken):
            await read_body(reading)


async def test_informational_responses_are_skipped() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    async with ScriptedWorker([early, make_reply(b"fine")]) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert reading.status == 200
        assert "link" not in reading.headers
        assert await read_body(reading) == b"fine"

        await send_and_read(upstream, worker)

    assert worker.connections == 1


async def test_connection_is_not_reused_after_switching_protocols() -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    async with ScriptedWorker([switch, HANG], OK) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert reading.status == 101

        reading.release()
        assert await send_and_read(upstream, worker) == b"fine"

    assert worker.connections == 2


async def test_body_without_content_length_ends_at_connection_close() -> None:
    replies: list[Reply] = [[head("200 OK"), b"fi", 0.02, b"ne", CLOSE], [head("200 OK"), RESET]]
    async with ScriptedWorker(*replies) as worker, open_client() as upstream:
        assert await send_and_read(upstream, worker) == b"fine"
        with pytest.raises(StreamBroken):
            await send_and_read(upstream, worker)


async def test_aborted_body_without_content_length_raises_stream_broken() -> None:
    """The body ends with the connection, which the client closed itself."""
    async with ScriptedWorker([head("200 OK"), b"fi", HANG]) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert b"".join(await reading.read()) == b"fi"

        reading.abort()
        await worker.wait_for_disconnect()
        with pytest.raises(StreamBroken):
            await reading.read()


async def test_slow_reader_applies_backpressure_to_the_worker() -> None:
    """Unread data is buffered up to a limit, and returned by the next read."""
    written = 0
    piece = chunk(b"x" * (1 << 16))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"{}")
        writer.write(CHUNKED)
        for _ in range(400):
            writer.write(piece)
            await writer.drain()
            written += 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with run_server(answer) as url, open_client() as upstream:
        reading = await upstream.send(url, ASK, 2.0)
        still = -1

        while still != written:
            still = written
            await asyncio.sleep(0.3)

        assert 0 < written < 300
        assert len(await read_body(reading)) == 400 << 16


async def test_response_before_the_full_request_closes_the_connection() -> None:
    """The worker would read the rest of the request as the next one."""
    early = ScriptedWorker([make_reply(b"no", status="413 Too Large"), HANG], OK, read_body=False)
    async with early as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, UpstreamRequest("/", b"x" * (32 << 20)), 2.0)
        assert await read_body(reading) == b"no"
        await worker.wait_for_disconnect()


async def test_closed_idle_connection_is_replaced() -> None:
    async with (
        ScriptedWorker([make_reply(b"fine"), 0.05, CLOSE], OK) as worker,
        open_client() as upstream,
    ):
        assert await send_and_read(upstream, worker) == b"fine"
        await asyncio.sleep(0.2)
        assert await send_and_read(upstream, worker) == b"fine"
    assert worker.connections == 2


async def test_request_is_resent_once_only_if_an_idle_connection_was_closed() -> None:
    async with (
        ScriptedWorker(OK, [CLOSE], OK, [CLOSE], [CLOSE]) as worker,
        open_client() as upstream,
    ):
        assert await send_and_read(upstream, worker) == b"fine"
        assert await send_and_read(upstream, worker) == b"fine"
        assert worker.request_count == 3
        with pytest.raises(StreamBroken):
            await send_and_read(upstream, worker)
    assert worker.request_count == 5


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nX: y", "a\rb", "a\0b"])
async def test_line_break_in_a_header_value_is_rejected(value: str) -> None:
    async with ScriptedWorker(OK) as worker, open_client() as upstream:
        with pytest.raises(InternalError):
            await upstream.send(worker.url, UpstreamRequest("/", b"", (("X-A", value),)), 2.0)
        with pytest.raises(InternalError):
            await upstream.send(worker.url, UpstreamRequest("/", b""), 2.0, (("X-A", value),))
    assert worker.request_count == 0


async def test_concurrent_requests_get_their_own_responses() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            top = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(top.split(b"Content-Length: ")[1].split()[0]))
            writer.write(make_reply(body))
            await writer.drain()

    async def one(upstream: AsyncioHttpClient, url: str, n: int) -> bool:
        body = b"%d" % n
        return await read_body(await upstream.send(url, UpstreamRequest("/", body), 10.0)) == body

    async with run_server(echo) as url, open_client() as upstream:
        for start in (0, 300):
            requests = (one(upstream, url, start + n) for n in range(300))
            assert all(await asyncio.gather(*requests))


async def test_closing_the_client_aborts_running_requests() -> None:
    async with ScriptedWorker([CHUNKED + chunk(b"a"), HANG]) as worker:
        async with open_client() as upstream:
            reading = await upstream.send(worker.url, ASK, 2.0)
            await reading.read()
        with pytest.raises(WorkerError):
            await reading.read()
        await worker.wait_for_disconnect()


async def test_closed_connection_leaves_no_reference_cycle() -> None:
    """Neither the parser nor an abandoned response refers back."""
    loop = asyncio.get_running_loop()
    gc.collect()
    gc.disable()
    try:
        connection = HttpConnection(
            loop, WriteBatcher(asyncio.get_running_loop), lambda _: None, lambda _: None
        )
        response = connection.send(b"GET / HTTP/1.1\r\n\r\n")
        response.abort()
        connection.connection_lost(None)
        alive = weakref.ref(connection)
        del connection, response
        assert alive() is None
    finally:
        gc.enable()
