"""Messages between the supervisor and a serving process, over a socket pair.

StartCommand   -> ProcessReady, or ProcessFailed and its exit
PrepareReload  -> ReloadPrepared: with issues, and nothing changes; without, and it waits for
CommitReload   -> ReloadDone
ReloadRequest  <- the admin API of a process asks for a reload; ReloadReply has the result

A message is its length in 4 bytes and MessagePack.
"""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence
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


# A serving process, seen from the supervisor.


class ServingProcess:
    """A serving process. ``ready_message`` is set while it serves."""

    def __init__(self, process: Process, channel: IpcChannel, admin_socket: str) -> None:
        self.process = process
        self.admin_socket = admin_socket
        self.ready_message: ProcessReady | None = None
        self._channel = channel
        self._replies = asyncio.Queue[IpcMessage | None]()
        self._is_gone = False

    @classmethod
    async def spawn(cls, admin_socket: str) -> Self:
        """Start a process, in its own process group so that Ctrl-C only reaches the supervisor."""
        own_end, other_end = socket.socketpair()
        own_end.setblocking(False)  # noqa: FBT003 - it has no other form
        with other_end:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gateway.multiprocess.process",
                str(other_end.fileno()),
                pass_fds=[other_end.fileno()],
                process_group=0,
            )
        return cls(process, await IpcChannel.connect(own_end), admin_socket)

    async def start_serving(self, command: StartCommand) -> str:
        """Start serving; returns the error, or ""."""
        match await self.send_request(command):
            case ProcessReady() as ready:
                self.ready_message = ready
                return ""
            case ProcessFailed(reason):
                return reason
            case _:
                return f"the process ended at start with {await self.wait_exit()}"

    async def send_request(
        self, message: IpcMessage, within: float | None = None
    ) -> IpcMessage | None:
        """Send a message and wait for the reply; None if the process has ended.

        A process that does not reply within ``within`` seconds is killed: its state is unknown.
        """
        if self._is_gone:
            return None
        self._channel.send(message)
        try:
            async with asyncio.timeout(within):
                return await self._replies.get()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            return None

    async def read_messages(self, reload: Callable[[], Awaitable[ReloadResult]]) -> None:
        """Read its messages until it ends; reload requests call ``reload``."""
        async with asyncio.TaskGroup() as tasks:
            while (message := await self._channel.receive()) is not None:
                if isinstance(message, ReloadRequest):
                    tasks.create_task(self._handle_reload(message.number, reload))
                else:
                    self._replies.put_nowait(message)
            self.ready_message = None
            self._is_gone = True
            self._replies.put_nowait(None)
            self._channel.close()

    async def wait_exit(self) -> str:
        """Wait for its exit; returns the exit code or signal as text."""
        code = await self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def _handle_reload(
        self, number: int, reload: Callable[[], Awaitable[ReloadResult]]
    ) -> None:
        self._channel.send(ReloadReply(number, await reload()))
