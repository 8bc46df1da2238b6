"""A serving process, as the supervisor sees it."""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

from gateway.processes.line import (
    IpcChannel,
    IpcMessage,
    ProcessFailed,
    ProcessReady,
    ReloadReply,
    ReloadRequest,
    StartCommand,
)
from gateway.reload import ReloadResult


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
                "gateway.processes.serving",
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
