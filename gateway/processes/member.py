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
        self.admin = admin
        self.ready: Ready | None = None
        self._line = line
        self._replies = asyncio.Queue[Message | None]()
        self._gone = False

    @classmethod
    async def born(cls, admin: str) -> Self:
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
        return cls(process, await Line.over(ours), admin)

    async def begin(self, begin: Begin) -> str:
        """Let it serve; why it does not, or ""."""
        match await self.ask(begin):
            case Ready() as ready:
                self.ready = ready
                return ""
            case Failed(why):
                return why
            case _:
                return f"it ended at once, with {await self.ended()}"

    async def ask(self, message: Message, within: float | None = None) -> Message | None:
        """What it replies to that; None when it is gone.

        One that says nothing for so many seconds is killed: it could come back with anything.
        """
        if self._gone:
            return None
        self._line.say(message)
        try:
            async with asyncio.timeout(within):
                return await self._replies.get()
        except TimeoutError:
            self.send(signal.SIGKILL)
            return None

    async def hear(self, reload: Callable[[], Awaitable[Told]]) -> None:
        """Hear it until it is gone. Its wishes are told to ``reload``."""
        async with asyncio.TaskGroup() as tasks:
            while (told := await self._line.hear()) is not None:
                if isinstance(told, Wish):
                    tasks.create_task(self._wish(told.number, reload))
                else:
                    self._replies.put_nowait(told)
            self.ready = None
            self._gone = True
            self._replies.put_nowait(None)
            self._line.close()

    async def ended(self) -> str:
        """Wait for its end; says which it was."""
        code = await self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def send(self, which: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(which)

    async def _wish(self, number: int, reload: Callable[[], Awaitable[Told]]) -> None:
        self._line.say(Outcome(number, await reload()))
