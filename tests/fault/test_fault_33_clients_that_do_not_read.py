"""A client stops reading: its worker waits, memory stays, and in the end it is cut off (33)."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from msgspec import Struct

from tests.conftest import Running, Serve
from tests.fakes import CHUNKED, chunk
from tests.fault.fronts import (
    CLIENTS,
    RELAYED,
    TRANSLATED,
    WELL,
    Client,
    before,
    event,
    one_record,
    reports,
    until,
)
from tests.fault.test_fault_25_26_27_29_bad_answers import memory
from tests.serving import serving

PIECE = chunk(event("x" * 16_000))
MOST = 96 << 20
"""Bytes that the worker would say."""


class Flood(Struct):
    """A worker that says a great deal, as fast as it may."""

    url: str = ""
    written: int = 0
    cut: bool = False


@asynccontextmanager
async def flooding() -> AsyncIterator[Flood]:
    flood = Flood()

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

    async with serving(serve) as url:
        flood.url = url
        yield flood


def deaf(front: Running, client: Client, place: int = 4096) -> socket.socket:
    """A client that asks and does not read, and has ``place`` bytes for what comes all the same."""
    path, body = client.way.call("m", stream=True)
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, place)
    one.connect(("127.0.0.1", front.port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return one


async def settled(flood: Flood) -> int:
    """How much the worker had written when it could write no more."""
    last = -1
    async with asyncio.timeout(10):
        while last != flood.written or not last:
            last = flood.written
            await asyncio.sleep(0.1)
    return last


@pytest.mark.parametrize("client", [RELAYED, TRANSLATED], ids=lambda one: one.name)
async def test_fault_33_a_client_that_does_not_read_holds_up_its_worker_and_is_cut_off(
    serve: Serve, client: Client
) -> None:
    """After ``idle``, a second here. The system's buffers hold some megabytes."""
    async with flooding() as flood:
        front = await before(serve, flood.url, timeouts={"idle": "1s"})
        base = memory()
        with deaf(front, client):
            written = await settled(flood)
            grown = memory() - base
            await until(lambda: flood.cut)
            record = await one_record(front)

    assert written < 24 << 20
    assert grown < 12 << 20
    assert flood.written < 24 << 20
    assert (record.outcome, record.error, record.status) == ("cancelled", "ClientDisconnected", 200)
    [report] = reports(front)
    assert (report.state, report.error) == ("up", ""), "the worker is not to blame"


async def test_fault_33_others_are_served_meanwhile(serve: Serve) -> None:
    async with flooding() as flood:
        front = await before(serve, flood.url)
        with deaf(front, RELAYED):
            await settled(flood)
            health = [await front.http.get("/health") for _ in range(20)]

    assert {answer.status_code for answer in health} == {200}


async def test_fault_33_a_client_that_reads_slowly_is_not_cut_off(serve: Serve) -> None:
    """It is always behind, and for longer than ``idle``; but no write waits so long."""
    async with flooding() as flood:
        front = await before(serve, flood.url, timeouts={"idle": "1s"})
        with deaf(front, CLIENTS[1], 1 << 18) as slow:
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            for _ in range(16):
                taken = 0
                while taken < 2 << 20:
                    taken += len(await loop.sock_recv(slow, 1 << 18))
                await asyncio.sleep(0.1)
            assert not flood.cut
            assert front.records == []
        await until(lambda: front.records)

    assert front.records[0].outcome == "cancelled"
    assert front.records[0].error == "", "it left by itself"
