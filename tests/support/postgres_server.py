"""A real PostgreSQL, as a process that can be killed, stopped and started again.

with PostgresServer() as postgres:
    book(postgres.url, ...)
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
    """Where its programs are; skips the test where there are none."""
    path = shutil.which("initdb")
    homes = [*_HOMES] if path is None else [Path(path).resolve().parent, *_HOMES]
    if not homes:
        pytest.skip("there is no PostgreSQL on this machine")
    return homes[-1]


class PostgresServer:
    """It listens at a socket in the file system, and its ``url`` is the same when it is back."""

    def __init__(self) -> None:
        self._home = find_postgres_programs()
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))  # a socket's path must be short
        self._user: dict[str, Any] = {}
        if os.getuid() == 0:  # which it refuses
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
        """Start it, and wait until it takes connections."""
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
        """End it and all its processes at once."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(_PATIENCE)
            self.process = None

    def pause(self) -> None:
        """Stop it as it is: it takes connections and says nothing."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
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
