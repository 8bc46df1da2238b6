"""A serving process, as the supervisor sees it."""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

from gateway.multiprocess.ipc import (
    IpcChannel,
    IpcMessage,
    ProcessFailed,
    ProcessReady,
    ReloadReply,
    ReloadRequest,
    StartCommand,
)
from gateway.runtime.reload import ReloadResult


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
