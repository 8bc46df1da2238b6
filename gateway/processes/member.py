"""A serving process, as the supervisor sees it."""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

from gateway.processes.line import Begin, Failed, Line, Message, Outcome, Ready, Wish
from gateway.reload import Told


class Member:
    """It runs from ``born`` on. ``ready`` is what it said when it began to serve."""

    def __init__(self, process: Process, line: Line, admin: str) -> None:
        self.process = process
        self.admin_socket = admin
        self.ready_message: Ready | None = None
        self._channel = line
        self._replies = asyncio.Queue[Message | None]()
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
        return cls(process, await Line.connect(ours), admin)

    async def start_serving(self, begin: Begin) -> str:
        """Let it serve; why it does not, or ""."""
        match await self.send_request(begin):
            case Ready() as ready:
                self.ready_message = ready
                return ""
            case Failed(why):
                return why
            case _:
                return f"it ended at once, with {await self.wait_exit()}"

    async def send_request(self, message: Message, within: float | None = None) -> Message | None:
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

    async def read_messages(self, reload: Callable[[], Awaitable[Told]]) -> None:
        """Hear it until it is gone. Its wishes are told to ``reload``."""
        async with asyncio.TaskGroup() as tasks:
            while (told := await self._channel.receive()) is not None:
                if isinstance(told, Wish):
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

    async def _handle_reload(self, number: int, reload: Callable[[], Awaitable[Told]]) -> None:
        self._channel.send(Outcome(number, await reload()))
