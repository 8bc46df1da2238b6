"""Workers of which every byte is scripted, and a clock. What tests of several folders share.

    async with ScriptedWorker([chunked(b"one", b"two")]) as worker:
        ...  # ask worker.url
    assert worker.requests[0].body == b"..."

A reply is a list of steps, in which

bytes           are written
a number        is a pause, in seconds
an Event        is waited for
a Step          does what it says

and the connection then waits for its next request. The n-th request gets the n-th reply; the last
reply serves for all that follow.
"""

import asyncio
import enum
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from msgspec import Struct

from tests.support.tcp_server import run_server


class FakeClock:
    """Goes on when a test says so: seconds, from some moment on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Step(enum.Enum):
    """What a reply does beside writing."""

    HANG = "wait until the other side leaves"
    CLOSE = "close the connection"
    RESET = "reset the connection"


HANG, CLOSE, RESET = Step.HANG, Step.CLOSE, Step.RESET

Reply = Sequence[bytes | float | asyncio.Event | Step]


class ReceivedRequest(Struct, frozen=True):
    """One request. Header names are lower case; ``connection`` counts connections from 0."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int


class ScriptedWorker:
    """Listens on a loopback port from ``async with`` on, and answers from its script.

    ``listener`` is a socket that is bound already; without ``read_body`` bodies are left unread.
    ``probed`` is what answers a GET, which is then no request of the script.
    """

    def __init__(
        self,
        *replies: Reply,
        read_body: bool = True,
        tls: ssl.SSLContext | None = None,
        listener: socket.socket | None = None,
        probed: bytes | None = None,
    ) -> None:
        self._replies = replies
        self._probed = probed
        self._listener = listener
        self._tls = tls
        self._read_body = read_body
        self._open = AsyncExitStack()
        self.url = ""
        self.requests: list[ReceivedRequest] = []
        self.connections = 0
        self.active = 0
        """Requests being answered now; ``most_active`` is the most there were at a time."""
        self.most_active = 0
        self.left = 0
        """Connections that the other side closed while a reply hung."""
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        served = run_server(self._serve, sock=self._listener, tls=self._tls)
        self.url = await self._open.enter_async_context(served)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        await self._open.aclose()

    async def wait_for_disconnect(self, times: int = 1, *, within: float = 2.0) -> float:
        """Seconds until the other side had left ``times`` hanging replies. Raises TimeoutError."""
        return await self._until("left", times, within)

    async def wait_for_request(self, times: int = 1, *, within: float = 5.0) -> float:
        """Seconds until ``times`` requests had come. Raises TimeoutError."""
        return await self._until("request_count", times, within)

    @property
    def request_count(self) -> int:
        """How many requests have come."""
        return len(self.requests)

    async def _until(self, what: str, times: int, within: float) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(within):
            while getattr(self, what) < times:
                self._changed.clear()
                await self._changed.wait()
        return loop.time() - began

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        while await self._exchange(reader, writer, number):
            pass

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> bool:
        """Answer one request; False when the connection is over."""
        request = await _receive(reader, number, body=self._read_body)
        if self._probed is not None and request.method == "GET":
            writer.write(self._probed)
            return True
        reply = self._replies[min(len(self.requests), len(self._replies) - 1)]
        self.requests.append(request)
        self._changed.set()
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            for step in reply:
                if not await self._do(step, reader, writer):
                    return False
        finally:
            self.active -= 1
        return True

    async def _do(
        self,
        step: bytes | float | asyncio.Event | Step,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        match step:
            case bytes():
                writer.write(step)
                await writer.drain()
            case asyncio.Event():
                await step.wait()
            case Step.HANG:
                await _read_to_end(reader)
                self.left += 1
                self._changed.set()
                return False
            case Step.CLOSE:
                return False
            case Step.RESET:
                reset(writer)
                return False
            case seconds:
                await asyncio.sleep(seconds)
        return True


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with an RST in place of a FIN."""
    one = writer.get_extra_info("socket")
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _receive(reader: asyncio.StreamReader, number: int, *, body: bool) -> ReceivedRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", "0"))
    content = await reader.readexactly(length) if body else b""
    return ReceivedRequest(method, path, headers, content, number)


async def _read_to_end(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionError:
        pass


# --- what workers write ---------------------------------------------------------------------------


def head(status: str = "200 OK", **headers: str) -> bytes:
    """A status line and headers; ``content_length="5"`` is written ``content-length: 5``."""
    lines = [f"HTTP/1.1 {status}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def make_reply(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """An answer in one piece, with its length."""
    headers = {"content_type": "application/json", "content_length": str(len(body))} | headers
    return head(status, **headers) + body


CHUNKED = head(content_type="text/event-stream", transfer_encoding="chunked")
"""The head of a streamed answer."""
END = b"0\r\n\r\n"
"""What ends a chunked body."""


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(*parts: bytes) -> bytes:
    """A streamed answer, complete."""
    return b"".join([CHUNKED, *map(chunk, parts), END])
