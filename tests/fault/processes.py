"""Worker processes that a test can kill, freeze and start again."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.waiting import PATIENCE

SCRIPT = Path(__file__).parent / "worker_process.py"


class WorkerProcess:
    """``worker_process.py`` on a loopback port inside ``async with``.

    ``first``, ``pace``, ``grace`` (seconds), ``words``, ``size`` (bytes) and ``log`` are options of
    the script. ``inside`` is a command prefix that runs it elsewhere, and ``address`` its address
    there, as host:port. ``settle`` gets its process id before it receives a request.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        inside: Sequence[str] = (),
        settle: Callable[[int], object] | None = None,
        **options: float | str | Path,
    ) -> None:
        self._address = address
        self._inside = inside
        self._settle = settle
        self._options = [
            part for name, value in options.items() for part in (f"--{name}", str(value))
        ]
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The current process."""
        assert self._process is not None, "the process was not started"
        return self._process

    async def start(self) -> None:
        """Start it on the port of its predecessor, if any; requests may be sent at once."""
        if self._address is None:
            self._spawn_with_listener()
            return
        self._spawn(["--listen", self._address])
        self.url = f"http://{self._address}"
        host, _, port = self._address.rpartition(":")
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return

    def kill(self) -> None:
        """Kill the process: the kernel closes its connections and its listener."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Suspend the process: connections stay open, and nothing gets an answer."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the process."""
        self.process.send_signal(signal.SIGCONT)

    async def ended(self, within: float = PATIENCE) -> int:
        """Wait for the exit status, negative for a signal. Raises TimeoutError."""
        async with asyncio.timeout(within):
            while (status := self.process.poll()) is None:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        return status

    def _spawn_with_listener(self) -> None:
        """Open the listener before the process starts, so that callers need not wait.

        Only the process keeps the socket: when it ends, the port is closed.
        """
        with socket.create_server(("127.0.0.1", self._port), backlog=1024) as listener:
            self._port = listener.getsockname()[1]
            self.url = f"http://127.0.0.1:{self._port}"
            self._spawn(["--fd", str(listener.fileno())], keep=[listener.fileno()])

    def _spawn(self, where: Sequence[str], keep: Sequence[int] = ()) -> None:
        command = [*self._inside, sys.executable, "-I", "-S", str(SCRIPT), *where, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, pass_fds=keep)
        if self._settle is not None:
            self._settle(self._process.pid)
