"""A nameserver with scripted answers on a loopback port, over UDP and TCP.

    async with StubNameserver() as dns:
        dns.zone["A", "w.local"] = [(1, "127.0.0.1")]     # TTL in seconds, and an address
        dns.zone["SRV", "_http._tcp.w.local"] = [(1, (0, 1, 8000, "a.w.local"))]
        ...  # send queries to dns.address

Names outside the zone do not exist. ``fault`` replaces every answer.
"""

import asyncio
import ipaddress
import socket
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Literal, Self

from tests.support.tcp_server import run_server

Fault = Literal["silence", "garbage", "servfail", "empty", "other", "oversized"] | None
Value = str | tuple[int, int, int, str]
Question = tuple[str, str]

_KINDS = {1: "A", 28: "AAAA", 33: "SRV"}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}


class StubNameserver:
    """Answers from ``zone``, or as ``fault`` says. ``asked`` are the questions so far."""

    def __init__(self) -> None:
        self._open = AsyncExitStack()
        self.zone: dict[Question, list[tuple[int, Value]]] = {}
        self.fault: Fault = None
        self.questions: list[Question] = []
        self.messages: list[bytes] = []
        """The bytes of the queries received."""
        self.over_tcp: list[Question] = []
        self.room: int | None = None
        """Maximum size of a datagram in bytes, independent of the query's EDNS size."""
        self.extended = True
        """Whether it supports EDNS."""
        self.address = ""
        self.strays = False
        """Whether an unrelated datagram precedes each answer."""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        streams, datagrams = bind_same_port(
            ("127.0.0.1", socket.SOCK_STREAM), ("127.0.0.1", socket.SOCK_DGRAM)
        )
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: _Datagrams(self), sock=datagrams
        )
        await self._open.enter_async_context(run_server(self._serve, sock=streams))
        self.address = f"127.0.0.1:{streams.getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._transport.abort()
        await self._open.aclose()

    async def hang_up(self) -> None:
        """Accept no more TCP connections."""
        await self._open.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2))
        question = await reader.readexactly(size)
        self.over_tcp.append(_parse_question(question)[0])
        response = self.answer(question, room=1 << 16)
        writer.write(len(response).to_bytes(2) + response)
        await writer.drain()

    def answer(self, question: bytes, room: int) -> bytes:
        """Return the bytes of the answer, none for silence."""
        query, end = _parse_question(question)
        self.questions.append(query)
        self.messages.append(question)
        extended = question[10:12] != b"\0\0"
        body = question[12:end]
        match self.fault:
            case "silence":
                return b""
            case "garbage":
                return question[:2] + b"\x81\x80\x00\x01\x00\x09" + bytes(4) + body + b"\xff" * 20
            case "servfail":
                return _build_message(question, body, code=2)
            case "empty":
                return _build_message(question, body)
            case "other":
                return _build_message(bytes((question[0] ^ 1, question[1])), body)
            case "oversized":
                return _build_message(question, body, cut=True)
            case None:
                pass
        if extended and not self.extended:
            return _build_message(question, b"", code=1)
        if query not in self.zone:
            return _build_message(question, body, code=3)
        records = [_build_record(query[0], ttl, value) for ttl, value in self.zone[query]]
        whole = _build_message(question, body, records)
        room = self.room or (room if extended else 512)
        return whole if len(whole) <= room else _build_message(question, body, cut=True)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, stub: StubNameserver) -> None:
        self._stub = stub

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if response := self._stub.answer(data, room=1232):
            if self._stub.strays:
                self._transport.sendto(b"\0", addr)
                self._transport.sendto(bytes((data[0] ^ 1,)) + response[1:], addr)
            self._transport.sendto(response, addr)
            self._transport.sendto(response, addr)


def bind_same_port(*wanted: tuple[str, socket.SocketKind]) -> list[socket.socket]:
    """Bind sockets of these addresses and types to one port."""
    for _ in range(50):
        sockets: list[socket.socket] = []
        port = 0
        try:
            for host, kind in wanted:
                sockets.append(socket.socket(socket.AF_INET, kind))
                sockets[-1].setblocking(False)
                sockets[-1].bind((host, port))
                port = sockets[-1].getsockname()[1]
        except OSError:
            for one in sockets:
                one.close()
        else:
            return sockets
    raise AssertionError("no port is free for all addresses")


def _parse_question(question: bytes) -> tuple[Question, int]:
    """Return the record type and the name of the question, and its end."""
    labels, at = [], 12
    while size := question[at]:
        labels.append(question[at + 1 : at + 1 + size].decode())
        at += 1 + size
    kind = int.from_bytes(question[at + 1 : at + 3])
    return (_KINDS[kind], ".".join(labels).lower()), at + 5


def _build_message(
    question: bytes,
    body: bytes,
    records: list[bytes] | None = None,
    *,
    code: int = 0,
    cut: bool = False,
) -> bytes:
    flags = 0x8180 | (0x0200 if cut else 0) | code
    counts = (1 if body else 0, len(records or []), 0, 0)
    numbers = b"".join(number.to_bytes(2) for number in (flags, *counts))
    return question[:2] + numbers + body + b"".join(records or [])


def _build_record(kind: str, ttl: int, value: Value) -> bytes:
    if isinstance(value, str):
        data = ipaddress.ip_address(value).packed
    else:
        *numbers, target = value
        labels = [bytes((len(label),)) + label.encode() for label in target.split(".")]
        data = b"".join(number.to_bytes(2) for number in numbers) + b"".join(labels) + b"\0"
    head = b"\xc0\x0c" + _NUMBERS[kind].to_bytes(2) + b"\0\x01" + ttl.to_bytes(4)
    return head + len(data).to_bytes(2) + data
