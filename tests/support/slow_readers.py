"""A worker that sends large streams, and clients that do not read them."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from msgspec import Struct

from tests.support.fakes import CHUNKED, make_reply
from tests.support.tcp_server import run_server


class FloodingWorker(Struct):
    """A worker whose streams are long, and sent as fast as they are read."""

    url: str = ""
    sent: int = 0
    """Bytes of all streams."""
    cut: int = 0
    """Streams that were closed before their end."""


@asynccontextmanager
async def run_flooding_worker(piece: bytes, most: int) -> AsyncIterator[FloodingWorker]:
    """Run a worker whose streams are repetitions of ``piece``, of ``most`` bytes together."""
    worker = FloodingWorker()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = 0
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
                writer.write(make_reply(b"{}"))
            writer.write(CHUNKED)
            while sent < most:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
                worker.sent += len(piece)
        worker.cut += sent < most

    async with run_server(answer) as url:
        worker.url = url
        yield worker


def open_unread_stream(
    port: int, path: str, body: bytes, receive_buffer: int = 4096
) -> socket.socket:
    """Request a stream, and read nothing of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


async def wait_until_blocked(worker: FloodingWorker, pause: float = 0.3) -> int:
    """Wait until no reader takes any more of the worker's streams; return the bytes sent."""
    last = -1
    async with asyncio.timeout(60):
        while last != worker.sent or not last:
            last = worker.sent
            await asyncio.sleep(pause)
    return last
