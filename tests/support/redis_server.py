"""A real Redis, as a process that can be killed, stopped and started again.

with RedisServer(folder) as redis:
    Store(Shared(redis.url), ...)
    redis.kill()
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.deploy.tools import LIBRARIES, find_tool

_PATIENCE = 10.0


def find_free_port() -> int:
    """A port of this machine that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class RedisServer:
    """It keeps nothing on a disk: with its end all is forgotten.

    ``more`` are options of its command line. It listens at a socket in the file system, and its
    ``url`` is the same after it was started again.
    """

    def __init__(self, *more: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))  # a socket's path must be short
        self._more = more
        self.path = self._folder / "socket"
        self.url = f"unix://{self.path}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    def start(self) -> None:
        """Start it; it answers from then on."""
        command: list[str | Path] = [
            "--port",
            "0",
            "--unixsocket",
            self.path,
            "--save",
            "",
            "--dir",
            self._folder,
        ]
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [find_tool("redis-server"), *command, *self._more],
                stdout=log,
                stderr=log,
                env=os.environ | {"LD_LIBRARY_PATH": str(LIBRARIES)},
            )
        end = time.monotonic() + _PATIENCE
        while not self._answers():
            assert self.process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < end, "the Redis does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL: nobody listens any more, and all is forgotten."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, new ones too, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def call(self, *command: str | float) -> Any:
        """What it replies to a command of ours."""
        once = Retry(NoBackoff(), 0)
        with redis.Redis(
            unix_socket_path=str(self.path), socket_timeout=_PATIENCE, retry=once
        ) as client:
            return client.execute_command(*command)

    def _answers(self) -> bool:
        try:
            self.call("PING")
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False
        return True
