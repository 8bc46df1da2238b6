"""CPU time and memory of processes, and the machine's load, from /proc."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_BUSY_COLUMNS: Final = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat: user, nice, system, irq, softirq, steal."""
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def list_tree(pid: int) -> Iterator[int]:
    """Return a process and its descendants."""
    yield pid
    with suppress(*_GONE):
        for task in (_PROC / str(pid) / "task").iterdir():
            with suppress(*_GONE):
                for child in (task / "children").read_text("ascii").split():
                    yield from list_tree(int(child))


def read_cpu_time(pid: int) -> int:
    """Return the CPU time of all threads in a process tree, in nanoseconds."""
    total = 0
    for one in list_tree(pid):
        with suppress(*_GONE):
            for task in (_PROC / str(one) / "task").iterdir():
                with suppress(*_GONE):
                    total += int((task / "schedstat").read_text("ascii").split()[0])
    return total


def read_memory(pid: int) -> float:
    """Return the memory of a process tree in MB: its proportional set size (PSS)."""
    total = 0
    for one in list_tree(pid):
        with suppress(*_GONE):
            for line in (_PROC / str(one) / "smaps_rollup").read_text("ascii").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def measure_machine_load(seconds: float) -> float:
    """Return the used share of the machine during these seconds, from 0 to 1."""
    before = _read_ticks()
    time.sleep(seconds)
    used, total = (now - then for now, then in zip(_read_ticks(), before, strict=True))
    return used / total if total else 0.0


def _read_ticks() -> tuple[int, int]:
    columns = [int(one) for one in (_PROC / "stat").read_text("ascii").split("\n")[0].split()[1:9]]
    return sum(columns[one] for one in _BUSY_COLUMNS), sum(columns)


def describe_machine() -> str:
    """Return cores, CPU model and kernel in a line."""
    lines = (_PROC / "cpuinfo").read_text("utf-8").splitlines()
    model = next((one.partition(":")[2].strip() for one in lines if "model name" in one), "?")
    return f"{os.cpu_count()} cores of {model}, Linux {platform.release()}"
