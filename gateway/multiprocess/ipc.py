"""Messages between the supervisor and a serving process, over a socket pair.

StartCommand   -> ProcessReady, or ProcessFailed and its exit
PrepareReload  -> ReloadPrepared: with issues, and nothing changes; without, and it waits for
CommitReload   -> ReloadDone
ReloadRequest  <- the admin API of a process asks for a reload; ReloadReply has the result

A message is its length in 4 bytes and MessagePack.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import msgspec
from msgspec import Struct

from gateway.config.errors import ConfigIssue
from gateway.config.source import ConfigText
from gateway.runtime.reload import ReloadResult

_LENGTH_BYTES = 4


class ListenerPort(Struct, frozen=True, array_like=True):
    """A listener id and its port."""

    address: str
    number: int
    port: int


class StartCommand(Struct, frozen=True, tag=True):
    """Serve this configuration as one of ``process_count`` processes.

    ``admin_socket`` is the path of the admin socket, or "". ``draining``: start in draining state.
    """

    config_text: ConfigText
    process_count: int
    ports: Sequence[ListenerPort]
    admin_socket: str = ""
    log_level: str = "INFO"
    draining: bool = False


class ProcessReady(Struct, frozen=True, tag=True):
    """The process serves."""

    urls: Sequence[str]
    models: Sequence[str]


class ProcessFailed(Struct, frozen=True, tag=True):
    """The process cannot serve and exits."""

    reason: str


class PrepareReload(Struct, frozen=True, tag=True):
    """Prepare a new configuration."""

    config_text: ConfigText
    ports: Sequence[ListenerPort]


class ReloadPrepared(Struct, frozen=True, tag=True):
    """The process has prepared it, unless there are issues."""

    issues: Sequence[ConfigIssue] = ()


class CommitReload(Struct, frozen=True, tag=True):
    """Apply or discard the prepared configuration."""

    commit: bool


class ReloadDone(Struct, frozen=True, tag=True):
    """The process has applied or discarded it."""


class ReloadRequest(Struct, frozen=True, tag=True):
    """A client of a process's admin API requests a reload."""

    number: int


class ReloadReply(Struct, frozen=True, tag=True):
    """The result of a requested reload."""

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
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, end: socket.socket) -> Self:
        """Open a channel over a socket."""
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, message: IpcMessage) -> None:
        """Send a message; it is lost if the other end is closed."""
        data = _encode(message)
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    async def receive(self) -> IpcMessage | None:
        """Receive the next message; None if the other end is closed."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            return _decoder.decode(await self._reader.readexactly(size))
        return None

    def close(self) -> None:
        """Close this end."""
        self._writer.close()
