"""What the supervisor and a process tell each other, and the socket that carries it.

Begin    -> Ready, or Failed and its end
Prepare  -> Prepared: with complaints, and it goes on as before; without, and it waits for
Verdict  -> Done
Wish     <- a process is asked for a reload; Outcome tells it, by its number, what came of that

Each is its length in 4 bytes, then MessagePack. Whose other end is closed is alone.
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
from gateway.config.loader import ConfigText
from gateway.runtime.reload import ReloadResult

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


# A serving process, as the supervisor sees it.


class ServingProcess:
    """It runs from ``born`` on. ``ready`` is what it said when it began to serve."""

    def __init__(self, process: Process, line: IpcChannel, admin: str) -> None:
        self.process = process
        self.admin_socket = admin
        self.ready_message: ProcessReady | None = None
        self._channel = line
        self._replies = asyncio.Queue[IpcMessage | None]()
        self._is_gone = False

    @classmethod
    async def spawn(cls, admin: str) -> Self:
        """A new process, in a group of its own: a terminal's Ctrl-C is the supervisor's to hear."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)  # noqa: FBT003 - it has no other form
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gateway.multiprocess.process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        return cls(process, await IpcChannel.connect(ours), admin)

    async def start_serving(self, begin: StartCommand) -> str:
        """Let it serve; why it does not, or ""."""
        match await self.send_request(begin):
            case ProcessReady() as ready:
                self.ready_message = ready
                return ""
            case ProcessFailed(why):
                return why
            case _:
                return f"it ended at once, with {await self.wait_exit()}"

    async def send_request(
        self, message: IpcMessage, within: float | None = None
    ) -> IpcMessage | None:
        """What it replies to that; None when it is gone.

        One that says nothing for so many seconds is killed: it could come back with anything.
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
        """Hear it until it is gone. Its wishes are told to ``reload``."""
        async with asyncio.TaskGroup() as tasks:
            while (told := await self._channel.receive()) is not None:
                if isinstance(told, ReloadRequest):
                    tasks.create_task(self._handle_reload(told.number, reload))
                else:
                    self._replies.put_nowait(told)
            self.ready_message = None
            self._is_gone = True
            self._replies.put_nowait(None)
            self._channel.close()

    async def wait_exit(self) -> str:
        """Wait for its end; says which it was."""
        code = await self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def send_signal(self, which: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(which)

    async def _handle_reload(
        self, number: int, reload: Callable[[], Awaitable[ReloadResult]]
    ) -> None:
        self._channel.send(ReloadReply(number, await reload()))
