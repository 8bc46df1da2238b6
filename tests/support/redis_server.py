"""A real Redis process that a test can kill, freeze and start again.

with RedisServer() as redis:
    ...  # connect to redis.url
    redis.kill()
"""

import os
import shutil
import signal
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
from tests.support.waiting import PATIENCE


class RedisServer:
    """A server without persistence: all keys are lost when it ends.

    ``options`` are added to its command line. It listens on a Unix socket, and its ``url`` stays
    the same after a restart.
    """

    def __init__(self, *options: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))  # a socket's path must be short
        self._options = options
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
        """Start the server and wait until it answers PING."""
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
                [find_tool("redis-server"), *command, *self._options],
                stdout=log,
                stderr=log,
                env=os.environ | {"LD_LIBRARY_PATH": str(LIBRARIES)},
            )
        end = time.monotonic() + PATIENCE
        while not self._answers():
            assert self.process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < end, "Redis does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the server; its keys are lost."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, new ones too, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the process."""
        self.process.send_signal(signal.SIGCONT)

    def call(self, *command: str | float) -> Any:
        """Send a command and return Redis's reply."""
        once = Retry(NoBackoff(), 0)
        with redis.Redis(
            unix_socket_path=str(self.path), socket_timeout=PATIENCE, retry=once
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
