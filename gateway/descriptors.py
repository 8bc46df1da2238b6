"""How many files and sockets the process may have open."""

import resource
from typing import Final

_RESERVED_FDS: Final = 64
"""Those that are neither a client's nor a worker's: files, logs, what listens."""


def raise_fd_limit() -> None:
    """Have as many as the system lets this process have: shells begin with few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def compute_max_clients() -> int:
    """How many clients may be connected, if each may need a connection to a worker."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max((soft - _RESERVED_FDS) // 2, 1)
