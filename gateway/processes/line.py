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

from gateway.config.errors import ConfigIssue
from gateway.config.loader import ConfigText
from gateway.reload import ReloadResult

_LENGTH_BYTES = 4


class ListenerPort(Struct, frozen=True, array_like=True):
    """A listener's place and its port."""

    address: str
    number: int
    port: int


class StartCommand(Struct, frozen=True, tag=True):
    """Serve this, as one of so many. ``admin`` is the path of its admin socket, "" for none.

    ``draining``: tell whoever asks that no more requests should come.
    """

    config_text: ConfigText
    process_count: int
    ports: Sequence[ListenerPort]
    admin_socket: str = ""
    log_level: str = "INFO"
    draining: bool = False


class ProcessReady(Struct, frozen=True, tag=True):
    """It serves."""

    urls: Sequence[str]
    models: Sequence[str]


class ProcessFailed(Struct, frozen=True, tag=True):
    """It can't, and ends."""

    reason: str


class PrepareReload(Struct, frozen=True, tag=True):
    """Get ready to serve this instead."""

    config_text: ConfigText
    ports: Sequence[ListenerPort]


class ReloadPrepared(Struct, frozen=True, tag=True):
    """It is ready to, unless there are complaints."""

    issues: Sequence[ConfigIssue] = ()


class CommitReload(Struct, frozen=True, tag=True):
    """Serve what was prepared, or leave it."""

    commit: bool


class ReloadDone(Struct, frozen=True, tag=True):
    """So it did."""


class ReloadRequest(Struct, frozen=True, tag=True):
    """Somebody asks for a reload."""

    number: int


class ReloadReply(Struct, frozen=True, tag=True):
    """What came of it."""

    number: int
    result: ReloadResult


IpcMessage = (
    StartCommand
    | ProcessReady
    | ProcessFailed
    | PrepareReload
    | ReloadPrepared
    | CommitReload
    | ReloadDone
    | ReloadRequest
    | ReloadReply
)
_decoder: msgspec.msgpack.Decoder[IpcMessage] = msgspec.msgpack.Decoder(IpcMessage)
_encode = msgspec.msgpack.Encoder().encode


class IpcChannel:
    """One end of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, end: socket.socket) -> Self:
        """Over this end of a pair of sockets."""
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, message: IpcMessage) -> None:
        """Tell the other end. What nobody can hear any more is lost."""
        data = _encode(message)
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    async def receive(self) -> IpcMessage | None:
        """What the other end tells next; None when it is gone."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            return _decoder.decode(await self._reader.readexactly(size))
        return None

    def close(self) -> None:
        """Say no more."""
        self._writer.close()
