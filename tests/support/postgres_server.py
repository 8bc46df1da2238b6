"""A real PostgreSQL process that a test can kill, pause and start again.

with PostgresServer() as postgres:
    ...  # connect to postgres.url
    postgres.pause()
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

_HOMES: Final = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
_PATIENCE: Final = 30.0
_QUICK: Final = ("fsync=off", "full_page_writes=off")


def find_postgres_programs() -> Path:
    """Return the folder of PostgreSQL's programs; skip the test if there is none."""
    path = shutil.which("initdb")
    homes = [*_HOMES] if path is None else [Path(path).resolve().parent, *_HOMES]
    if not homes:
        pytest.skip("PostgreSQL is not installed")
    return homes[-1]


class PostgresServer:
    """Listens on a Unix socket; its ``url`` stays the same after a restart."""

    def __init__(self) -> None:
        self._home = find_postgres_programs()
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))  # a socket's path must be short
        self._user: dict[str, Any] = {}
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            self._user = {"user": "nobody", "group": "nogroup"}
            shutil.chown(self._folder, **self._user)
        self.url = f"postgresql://gateway:canary-password@/postgres?host={self._folder}"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        options = ("-D", "data", "-U", "gateway", "-A", "trust", "-E", "UTF8", "--no-sync")
        subprocess.run(
            [self._home / "initdb", *options],
            cwd=self._folder,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=_PATIENCE,
            **self._user,
        )
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
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
        """Start the server and wait until it accepts connections."""
        quick = [part for one in _QUICK for part in ("-c", one)]
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self._home / "postgres", "-D", "data", "-k", self._folder, "-h", "", *quick],
                cwd=self._folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._user,
            )
        until = time.monotonic() + _PATIENCE
        while not self._ready():
            assert time.monotonic() < until, (self._folder / "log").read_text("utf-8")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the server and its child processes."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(_PATIENCE)
            self.process = None

    def pause(self) -> None:
        """Suspend the processes: connections are accepted and get no answer."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the processes."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)
        for one in Path("/proc").glob("[0-9]*/stat"):  # its children have groups of their own
            try:
                parent = one.read_text("ascii").rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == self.process.pid:
                os.kill(int(one.parent.name), number)

    def _ready(self) -> bool:
        command = [str(self._home / "pg_isready"), "-q", "-h", str(self._folder), "-U", "gateway"]
        return subprocess.run(command, check=False, timeout=_PATIENCE).returncode == 0
