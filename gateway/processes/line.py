"""What the supervisor and a process tell each other, and the socket that carries it.

Begin    -> Ready, or Failed and its end
Prepare  -> Prepared: with complaints, and it goes on as before; without, and it waits for
Verdict  -> Done
Wish     <- a process is asked for a reload; Outcome tells it, by its number, what came of that

Each is its length in 4 bytes, then MessagePack. Whose other end is closed is alone.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import msgspec
from msgspec import Struct

from gateway.config import Complaint
from gateway.processes.text import Text
from gateway.reload import Told

_LENGTH = 4


class Seated(Struct, frozen=True, array_like=True):
    """A listener's place and its port."""

    address: str
    number: int
    port: int


class Begin(Struct, frozen=True, tag=True):
    """Serve this, as one of so many. ``admin`` is the path of its admin socket, "" for none.

    ``draining``: tell whoever asks that no more requests should come.
    """

    config_text: Text
    process_count: int
    ports: Sequence[Seated]
    admin_socket: str = ""
    log_level: str = "INFO"
    draining: bool = False


class Ready(Struct, frozen=True, tag=True):
    """It serves."""

    urls: Sequence[str]
    models: Sequence[str]


class Failed(Struct, frozen=True, tag=True):
    """It can't, and ends."""

    reason: str


class Prepare(Struct, frozen=True, tag=True):
    """Get ready to serve this instead."""

    config_text: Text
    ports: Sequence[Seated]


class Prepared(Struct, frozen=True, tag=True):
    """It is ready to, unless there are complaints."""

    issues: Sequence[Complaint] = ()


class Verdict(Struct, frozen=True, tag=True):
    """Serve what was prepared, or leave it."""

    commit: bool


class Done(Struct, frozen=True, tag=True):
    """So it did."""


class Wish(Struct, frozen=True, tag=True):
    """Somebody asks for a reload."""

    number: int


class Outcome(Struct, frozen=True, tag=True):
    """What came of it."""

    number: int
    result: Told


Message = Begin | Ready | Failed | Prepare | Prepared | Verdict | Done | Wish | Outcome
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encode = msgspec.msgpack.Encoder().encode


class Line:
    """One end of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, end: socket.socket) -> Self:
        """Over this end of a pair of sockets."""
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, message: Message) -> None:
        """Tell the other end. What nobody can hear any more is lost."""
        data = _encode(message)
        self._writer.write(len(data).to_bytes(_LENGTH, "big") + data)

    async def receive(self) -> Message | None:
        """What the other end tells next; None when it is gone."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            size = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
            return _decoder.decode(await self._reader.readexactly(size))
        return None

    def close(self) -> None:
        """Say no more."""
        self._writer.close()
