"""What a server costs: the processor time and memory of its whole tree of processes."""

import os
from pathlib import Path

PROC = Path("/proc")
_PARENT = 1
_TIMES = slice(11, 15)
"""utime, stime, cutime and cstime, counted from behind the name. (Source: proc(5), stat.)"""


def measure_cpu_seconds(root: int, proc: Path = PROC) -> float:
    """Seconds on a processor, of a process and all below it, threads that have ended among them.

    The kernel scales what its clock's ticks see to what its scheduler measured: one tick, 10 ms, is
    the largest error of a process.
    """
    ticks = 0
    for pid in list_process_tree(root, proc):
        ticks += sum(map(int, _fields(proc / str(pid) / "stat")[_TIMES]))
    return ticks / os.sysconf("SC_CLK_TCK")


def list_process_tree(root: int, proc: Path = PROC) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        if fields := _fields(stat):
            children.setdefault(int(fields[_PARENT]), []).append(int(stat.parent.name))
    processes = [root]
    for pid in processes:
        processes.extend(children.get(pid, ()))
    return processes


def measure_tree_memory(root: int, proc: Path = PROC) -> int:
    """Bytes of memory that a process and all below it hold (shared pages counted for each)."""
    return sum(measure_process_memory(pid, proc) for pid in list_process_tree(root, proc))


def measure_process_memory(pid: int, proc: Path = PROC) -> int:
    """Bytes of memory that one process holds; none once it has ended."""
    try:
        pages = int((proc / str(pid) / "statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _fields(stat: Path) -> list[str]:
    """What stands behind the name, which may hold anything; nothing of a process that has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:
        return []
