"""What processes use, read from /proc: CPU, memory, and how busy everybody else is."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_BUSY: Final = (0, 1, 2, 5, 6, 7)
"""Of the columns of /proc/stat: user, nice, system, irq, softirq, steal."""
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    with suppress(*_GONE):
        for task in (_PROC / str(pid) / "task").iterdir():
            with suppress(*_GONE):
                for child in (task / "children").read_text("ascii").split():
                    yield from tree(int(child))


def cpu(pid: int) -> int:
    """Nanoseconds that the threads of a tree of processes were on a CPU."""
    total = 0
    for one in tree(pid):
        with suppress(*_GONE):
            for task in (_PROC / str(one) / "task").iterdir():
                with suppress(*_GONE):
                    total += int((task / "schedstat").read_text("ascii").split()[0])
    return total


def memory(pid: int) -> float:
    """Its share of memory in MB (PSS): what it has with others counts for it in part."""
    total = 0
    for one in tree(pid):
        with suppress(*_GONE):
            for line in (_PROC / str(one) / "smaps_rollup").read_text("ascii").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def busy(seconds: float) -> float:
    """The share of the whole machine that is in use, watched for so long."""
    before = _counted()
    time.sleep(seconds)
    used, whole = (now - then for now, then in zip(_counted(), before, strict=True))
    return used / whole if whole else 0.0


def _counted() -> tuple[int, int]:
    columns = [int(one) for one in (_PROC / "stat").read_text("ascii").split("\n")[0].split()[1:9]]
    return sum(columns[one] for one in _BUSY), sum(columns)


def machine() -> str:
    """What it is, in a line."""
    lines = (_PROC / "cpuinfo").read_text("utf-8").splitlines()
    model = next((one.partition(":")[2].strip() for one in lines if "model name" in one), "?")
    return f"{os.cpu_count()} cores of {model}, Linux {platform.release()}"
