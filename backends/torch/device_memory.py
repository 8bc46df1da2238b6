"""Free memory of a device: what the system, and a container's limit, still allow."""

import re
from pathlib import Path

import torch


def get_free_memory(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    sizes = [_read_available_memory(), _read_cgroup_memory()]
    return min((size for size in sizes if size is not None), default=None)


def _read_available_memory(table: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that Linux can provide without swapping."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", table.read_text()) if table.exists() else None
    return None if match is None else int(match[1]) * 1024


def _read_cgroup_memory(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that a container may still allocate (cgroup v2)."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(int(limit) - used, 0) if limit.isdecimal() else None
