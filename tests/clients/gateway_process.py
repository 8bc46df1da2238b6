"""A gateway process started as its users do, with the URL that it prints."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final

COMMAND: Final = Path(sys.executable).with_name("interlingua")
SCRIPTED: Final = str(Path(__file__).with_name("clients.yaml"))
_PATIENCE: Final = 60.0
_SERVES = re.compile(rb"interlingua serves .* on (http://[\w.:]+)")


@contextmanager
def run_gateway(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run ``interlingua serve`` with these arguments; yield its first URL."""
    with TemporaryFile() as log:
        process = subprocess.Popen(
            [COMMAND, "serve", *arguments], stderr=log, env=os.environ | (env or {})
        )
        try:
            yield _wait_for_url(process, log)
        finally:
            process.terminate()
            _wait_for_exit(process)


@contextmanager
def run_built_in_models() -> Iterator[str]:
    """Run ``interlingua serve`` with only free ports as options: the built-in models."""
    with run_gateway("--port", "0") as url:
        yield url


def _wait_for_url(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    until = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < until:
        if match := _SERVES.search(_read_output(log)):
            return match[1].decode()
        time.sleep(0.05)
    raise AssertionError(f"the gateway does not serve: {_read_output(log).decode()}")


def _wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def _read_output(log: IO[bytes]) -> bytes:
    """Read without seeking: the process shares the file position."""
    return os.pread(log.fileno(), 1 << 16, 0)
