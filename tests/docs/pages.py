"""Runs the shell blocks of a page as a reader would: in their order, in one shell, in a new folder.

    ```sh      is run; anything that fails fails the page
    ```text    is what the block before it prints

In what is printed ``…`` stands for anything on its line, a line of nothing else for any lines, and
a run of spaces for any other. ``interlingua`` is the one under test. Ports are free ones, in the
variables that the page itself names with the ports that it shows: ``${PORT:-8000}``. What still
runs when the page ends is stopped.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PORT = re.compile(r"\$\{(\w*PORT):-\d+\}")
_PATIENCE = 90.0
"""Seconds that a page may take."""


class Block(Struct):
    """Commands, and what they are said to print, if the page says it."""

    line: int
    commands: str
    printed: str | None = None


class Ran(Struct, frozen=True):
    """How it went: the exit code, what each block printed, and all that was said on the side."""

    code: int
    outputs: Sequence[str]
    errors: str


def blocks(page: str) -> list[Block]:
    """The shell blocks of a page."""
    found: list[Block] = []
    for fence in _FENCE.finditer(page):
        match fence[1]:
            case "sh":
                found.append(Block(page.count("\n", 0, fence.start()) + 1, fence[2]))
            case "text":
                assert found, "a page shows what is printed before anything is run"
                assert found[-1].printed is None, f"{found[-1].line}: it is shown twice"
                found[-1].printed = fence[2]
            case _:
                pass
    return found


def free_ports(page: str) -> dict[str, str]:
    """A port for each variable that the page names."""
    names = sorted(set(_PORT.findall(page)))
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    ports = {
        name: str(listener.getsockname()[1])
        for name, listener in zip(names, listeners, strict=True)
    }
    for listener in listeners:
        listener.close()
    return ports


def run(page: str, folder: Path) -> Ran:
    """Run the page's blocks in ``folder``, which is empty."""
    every = blocks(page)
    beside = folder.with_name(f"{folder.name}-printed")
    beside.mkdir()
    files = [beside / str(n) for n in range(len(every))]
    pieces = [f"exec >{file}\n{block.commands}" for file, block in zip(files, every, strict=True)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (beside / "errors").open("w+b") as errors:
        shell = subprocess.Popen(
            ["/bin/bash", "-euo", "pipefail", "-c", "\n".join(pieces)],
            cwd=folder,
            env=os.environ | free_ports(page) | {"PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = shell.wait(_PATIENCE)
        finally:
            with suppress(ProcessLookupError):  # nothing runs any more
                os.killpg(shell.pid, signal.SIGKILL)
    outputs = [file.read_text("utf-8") for file in files if file.exists()]
    return Ran(code, outputs, (beside / "errors").read_text("utf-8"))


def differs(shown: str, printed: str) -> str:
    """How what was printed is not what is shown; "" where it is."""
    wanted = "\n".join(map(_line, shown.strip("\n").splitlines()))
    wanted = wanted.replace(_line("…") + "\n", r"(?:.*\n)*")
    got = "\n".join(map(_plain, printed.strip("\n").splitlines()))
    return "" if re.fullmatch(wanted, got) else f"shown:\n{shown}\nprinted:\n{printed}"


def check(page: str, folder: Path) -> None:
    """Run the page. Raises AssertionError with the first block that does not do as it says."""
    ran = run(page, folder)
    every = blocks(page)
    for block, printed in zip(every, ran.outputs, strict=False):
        if block.printed is not None and (why := differs(block.printed, printed)):
            raise AssertionError(f"line {block.line}: {why}\n{ran.errors}")
    last = every[len(ran.outputs) - 1]
    assert ran.code == 0, f"line {last.line} failed:\n{last.commands}\n{ran.errors}"


def _line(text: str) -> str:
    """A pattern for one line."""
    return ".*".join(map(re.escape, _plain(text).split("…")))


def _plain(text: str) -> str:
    return " ".join(text.split())
