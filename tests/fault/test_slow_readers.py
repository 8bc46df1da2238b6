"""A client stops reading: its worker waits, memory stays, and in the end it is cut off (33)."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from msgspec import Struct

from tests.conftest import RunningGateway, Serve
from tests.fault.protocol_clients import (
    CLIENTS,
    RELAYED,
    TRANSLATED,
    WELL,
    Client,
    build_event,
    get_single_record,
    get_worker_reports,
    serve_gateway,
    wait_until,
)
from tests.fault.test_invalid_responses import get_resident_memory
from tests.support.fakes import CHUNKED, chunk
from tests.support.tcp_server import run_server

PIECE = chunk(build_event("x" * 16_000))
MOST = 96 << 20
"""Bytes that the worker would say."""


class FloodState(Struct):
    """A worker that says a great deal, as fast as it may."""

    url: str = ""
    written: int = 0
    cut: bool = False


@asynccontextmanager
async def run_flooding_worker() -> AsyncIterator[FloodState]:
    flood = FloodState()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
                writer.write(WELL)
            writer.write(CHUNKED)
            while flood.written < MOST:
                writer.write(PIECE)
                await writer.drain()
                flood.written += len(PIECE)
        flood.cut = flood.written < MOST

    async with run_server(serve) as url:
        flood.url = url
        yield flood


def open_unread_stream(front: RunningGateway, client: Client, place: int = 4096) -> socket.socket:
    """A client that asks and does not read, and has ``place`` bytes for what comes all the same."""
    path, body = client.way.call("m", stream=True)
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, place)
    one.connect(("127.0.0.1", front.port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return one


async def wait_until_blocked(flood: FloodState) -> int:
    """How much the worker had written when it could write no more."""
    last = -1
    async with asyncio.timeout(10):
        while last != flood.written or not last:
            last = flood.written
            await asyncio.sleep(0.1)
    return last


@pytest.mark.fault(33)
@pytest.mark.parametrize("client", [RELAYED, TRANSLATED], ids=lambda one: one.name)
async def test_unread_stream_pauses_its_worker_and_is_closed_after_idle_timeout(
    serve: Serve, client: Client
) -> None:
    """After ``idle``, a second here. The system's buffers hold some megabytes."""
    async with run_flooding_worker() as flood:
        front = await serve_gateway(serve, flood.url, timeouts={"idle": "1s"})
        base = get_resident_memory()
        with open_unread_stream(front, client):
            written = await wait_until_blocked(flood)
            grown = get_resident_memory() - base
            await wait_until(lambda: flood.cut)
            record = await get_single_record(front)

    assert written < 24 << 20
    assert grown < 12 << 20
    assert flood.written < 24 << 20
    assert (record.outcome, record.error, record.status) == ("cancelled", "ClientDisconnected", 200)
    [report] = get_worker_reports(front)
    assert (report.state, report.error) == ("up", ""), "the worker is not to blame"


@pytest.mark.fault(33)
async def test_other_clients_are_served_during_an_unread_stream(serve: Serve) -> None:
    async with run_flooding_worker() as flood:
        front = await serve_gateway(serve, flood.url)
        with open_unread_stream(front, RELAYED):
            await wait_until_blocked(flood)
            health = [await front.http.get("/health") for _ in range(20)]

    assert {answer.status_code for answer in health} == {200}


@pytest.mark.fault(33)
async def test_slow_reader_is_not_disconnected(serve: Serve) -> None:
    """It is always behind, and for longer than ``idle``; but no write waits so long."""
    async with run_flooding_worker() as flood:
        front = await serve_gateway(serve, flood.url, timeouts={"idle": "1s"})
        with open_unread_stream(front, CLIENTS[1], 1 << 18) as slow:
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            for _ in range(16):
                taken = 0
                while taken < 2 << 20:
                    taken += len(await loop.sock_recv(slow, 1 << 18))
                await asyncio.sleep(0.1)
            assert not flood.cut
            assert front.records == []
        await wait_until(lambda: front.records)

    assert front.records[0].outcome == "cancelled"
    assert front.records[0].error == "", "it left by itself"
