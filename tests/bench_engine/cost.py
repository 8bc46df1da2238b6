"""The CPU time and memory of a server's process tree."""

import os
import re
from pathlib import Path

PROC = Path("/proc")
_PARENT = 1
_TIMES = slice(11, 15)
"""utime, stime, cutime and cstime, counted from the name. (Source: proc(5), stat.)"""


def measure_cpu_seconds(root: int, proc: Path = PROC) -> float:
    """Return the CPU time of a process tree, including threads that have ended.

    The kernel scales the time that its clock ticks see to the time that its scheduler measured: one
    tick, 10 ms, is the largest error of a process.
    """
    ticks = 0
    for pid in list_process_tree(root, proc):
        ticks += sum(map(int, _fields(proc / str(pid) / "stat")[_TIMES]))
    return ticks / os.sysconf("SC_CLK_TCK")


def list_process_tree(root: int, proc: Path = PROC) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        if fields := _fields(stat):
            children.setdefault(int(fields[_PARENT]), []).append(int(stat.parent.name))
    processes = [root]
    for pid in processes:
        processes.extend(children.get(pid, ()))
    return processes


def measure_tree_memory(root: int, proc: Path = PROC) -> int:
    """Return the memory of a process tree in bytes (shared pages count for each process)."""
    return sum(measure_process_memory(pid, proc) for pid in list_process_tree(root, proc))


def measure_peak_memory(root: int, proc: Path = PROC) -> int:
    """Return the sum of the largest memory that each process of a tree has had, in bytes."""
    peaks = [
        re.search(r"VmHWM:\s+(\d+) kB", _read(proc / str(pid) / "status"))
        for pid in list_process_tree(root, proc)
    ]
    return sum(int(peak[1]) << 10 for peak in peaks if peak)


def measure_process_memory(pid: int, proc: Path = PROC) -> int:
    """Return the memory of a process in bytes, 0 once it has exited."""
    try:
        pages = int((proc / str(pid) / "statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _fields(stat: Path) -> list[str]:
    """Return the fields after the name, which may contain anything; none of an exited process."""
    return _read(stat).rpartition(")")[2].split()


def _read(file: Path) -> str:
    """Return the text of a process's file; empty once the process has exited."""
    try:
        return file.read_text()
    except OSError:
        return ""
