"""A worker that sends scripted bytes, and a clock that a test advances.

    async with ScriptedWorker([chunked(b"one", b"two")]) as worker:
        ...  # send a request to worker.url
    assert worker.requests[0].body == b"..."

A reply is a list of steps:

    bytes         are written
    a number      is a pause in seconds
    an Event      is awaited
    a Step        hangs, closes or resets the connection

After the last step the connection waits for its next request. The n-th request gets the n-th reply;
the last reply is repeated for all later requests.
"""

import asyncio
import enum
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from msgspec import Struct

from tests.support.tcp_server import run_server
from tests.support.waiting import PATIENCE


class FakeClock:
    """A clock in seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Step(enum.Enum):
    """A step of a reply that writes nothing."""

    HANG = "wait until the other side leaves"
    CLOSE = "close the connection"
    RESET = "reset the connection"


HANG, CLOSE, RESET = Step.HANG, Step.CLOSE, Step.RESET

Reply = Sequence[bytes | float | asyncio.Event | Step]


class ReceivedRequest(Struct, frozen=True):
    """A request received. Header names are lower case; connections are numbered from 0."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int


WELL = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
"""The response to a health probe of a worker that is well."""


class ScriptedWorker:
    """Listens on a loopback port inside ``async with``, and sends its scripted replies.

    ``listener`` is a bound socket to use instead; without ``read_body`` bodies are left unread.
    ``probed`` is the response to each GET (a health probe), which uses up no scripted reply, or a
    function that returns the reply to the next one. With None, GETs get the scripted replies, too;
    nothing orders a probe and a request, so this is for tests whose requests are all GETs, or
    where no probe is sent.
    """

    def __init__(
        self,
        *replies: Reply,
        read_body: bool = True,
        tls: ssl.SSLContext | None = None,
        listener: socket.socket | None = None,
        probed: bytes | Callable[[], Reply] | None = WELL,
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
        """Requests in progress; ``most_active`` is the highest number so far."""
        self.most_active = 0
        self.left = 0
        """Connections that the client closed while a reply hung."""
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
        """Stop listening and abort every connection."""
        await self._open.aclose()

    async def wait_for_disconnect(self, times: int = 1, *, within: float = PATIENCE) -> float:
        """Return the seconds until clients left ``times`` hanging replies. Raises TimeoutError."""
        return await self._until("left", times, within)

    async def wait_for_request(self, times: int = 1, *, within: float = PATIENCE) -> float:
        """Return the seconds until ``times`` requests were received. Raises TimeoutError."""
        return await self._until("request_count", times, within)

    @property
    def request_count(self) -> int:
        """The number of requests received."""
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
        """Answer one request; return False when the connection must be closed."""
        request = await _receive(reader, number, body=self._read_body)
        if self._probed is not None and request.method == "GET":
            probed = [self._probed] if isinstance(self._probed, bytes) else self._probed()
            return await self._follow(probed, reader, writer)
        reply = self.select_reply(request.body)
        self.requests.append(request)
        self._changed.set()
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            return await self._follow(reply, reader, writer)
        finally:
            self.active -= 1

    def select_reply(self, body: bytes) -> Reply:
        """The reply to the next request; a worker whose answer depends on the body overrides it."""
        del body
        return self._replies[min(len(self.requests), len(self._replies) - 1)]

    async def _follow(
        self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        for step in reply:
            if not await self._do(step, reader, writer):
                return False
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
    """Close the connection with RST instead of FIN."""
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


# --- responses ------------------------------------------------------------------------------------


def head(status: str = "200 OK", **headers: str) -> bytes:
    """Build a status line and headers; ``content_length="5"`` becomes ``content-length: 5``."""
    lines = [f"HTTP/1.1 {status}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def make_reply(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """Build a complete response with a content-length."""
    headers = {"content_type": "application/json", "content_length": str(len(body))} | headers
    return head(status, **headers) + body


CHUNKED = head(content_type="text/event-stream", transfer_encoding="chunked")
"""The head of a streamed response."""
END = b"0\r\n\r\n"
"""The last chunk of a chunked body."""


def chunk(data: bytes) -> bytes:
    """Build one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(*parts: bytes) -> bytes:
    """Build a complete streamed response."""
    return b"".join([CHUNKED, *map(chunk, parts), END])
