"""Requests whose body is sent while it arrives, and no faster than the worker reads it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from backends.interfaces import RequestBody
from protocols.core.errors import MalformedRequest, StreamBroken, WorkerUnreachable
from protocols.core.interfaces import UpstreamRequest
from tests.fakes import CLOSE, ScriptedWorker, make_reply
from tests.fault.protocol_clients import wait_until
from tests.tcp_server import run_server
from tests.unit.backends.http.client_requests import open_client, read_body

ASK = UpstreamRequest("/v1/upload", b"")
HEADERS = (("Content-Type", "audio/wav"),)


def make_body(*pieces: bytes, size: int | None = None) -> RequestBody:
    async def read() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
            await asyncio.sleep(0)

    return RequestBody(size, read)


async def test_pieces_of_a_known_length_are_sent_and_the_connection_is_reused() -> None:
    replies = [[make_reply(b"fine")], [make_reply(b"again")]]
    async with ScriptedWorker(*replies) as worker, open_client() as client:
        body = make_body(b"ab", b"", b"cde", size=5)
        response = await client.send_streamed(worker.url, ASK, body, 2.0, HEADERS)
        assert await read_body(response) == b"fine"
        assert await read_body(await client.send(worker.url, ASK, 2.0)) == b"again"

    first, second = worker.requests
    assert first.body == b"abcde"
    assert first.headers["content-length"] == "5"
    assert first.headers["content-type"] == "audio/wav"
    assert (first.connection, second.connection) == (0, 0)


async def test_pieces_of_an_unknown_length_are_sent_in_chunks() -> None:
    received = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        received = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.write(make_reply(b"fine"))
        await writer.drain()

    async with run_server(answer) as url, open_client() as client:
        body = make_body(b"ab", b"", b"cde")
        response = await client.send_streamed(url, ASK, body, 2.0, HEADERS)
        assert await read_body(response) == b"fine"
    head, _, sent = received.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    assert b"Content-Length" not in head
    assert sent == b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"


async def test_body_is_sent_no_faster_than_the_worker_reads() -> None:
    may_read, produced, received = asyncio.Event(), 0, 0
    piece, count = b"a" * (1 << 18), 100

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        await may_read.wait()
        await reader.readuntil(b"\r\n\r\n")
        while received < count * len(piece):
            received += len(await reader.read(1 << 16))
        writer.write(make_reply(b"all"))
        await writer.drain()

    async def read() -> AsyncIterator[bytes]:
        nonlocal produced
        for _ in range(count):
            produced += 1
            yield piece

    async with run_server(answer) as url, open_client() as client:
        body = RequestBody(count * len(piece), read)
        sending = asyncio.create_task(client.send_streamed(url, ASK, body, 2.0))
        await wait_until(lambda: produced > 1)
        await asyncio.sleep(0.1)
        assert produced < count
        may_read.set()
        assert await read_body(await sending) == b"all"
    assert received == count * len(piece)


async def test_response_before_the_end_of_the_body_ends_the_upload() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(make_reply(b"too large", "413 Payload Too Large"))
        await writer.drain()
        await reader.read()

    async def read() -> AsyncIterator[bytes]:
        while True:
            yield b"a" * 100
            await asyncio.sleep(0.001)

    async with run_server(answer) as url, open_client() as client:
        async with asyncio.timeout(10):
            response = await client.send_streamed(url, ASK, RequestBody(None, read), 2.0)
        assert response.status == 413
        assert await read_body(response) == b"too large"
        assert client.connections.idle == 0  # the rest of the body was not sent


async def test_worker_that_leaves_during_the_upload_breaks_the_request() -> None:
    async def read() -> AsyncIterator[bytes]:
        while True:
            yield b"a" * (1 << 16)
            await asyncio.sleep(0)

    async with ScriptedWorker([CLOSE], read_body=False) as worker, open_client() as client:
        with pytest.raises(StreamBroken):
            async with asyncio.timeout(10):
                await client.send_streamed(worker.url, ASK, RequestBody(None, read), 2.0)


async def test_body_that_breaks_off_closes_the_connection() -> None:
    async def read() -> AsyncIterator[bytes]:
        yield b"ab"
        raise MalformedRequest("the body did not arrive whole")

    async with ScriptedWorker([make_reply(b"")]) as worker, open_client() as client:
        with pytest.raises(MalformedRequest):
            await client.send_streamed(worker.url, ASK, RequestBody(9, read), 2.0)
        await wait_until(lambda: client.connections.open == 0)


async def test_body_is_not_read_if_the_worker_cannot_be_reached() -> None:
    def read() -> AsyncIterator[bytes]:
        raise AssertionError("nobody takes it")

    async with open_client() as client:
        with pytest.raises(WorkerUnreachable):
            await client.send_streamed("http://127.0.0.1:9", ASK, RequestBody(1, read), 2.0)
        assert client.connections.failed == 1
