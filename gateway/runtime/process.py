"""Process setup: event loop, garbage collector, threads and file descriptor limit."""

import asyncio
import ctypes
import gc
import importlib.util
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final


def get_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop factory of uvloop; None, the default loop, if it is not installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop  # noqa: PLC0415 - optional

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


_THREAD_SWITCH_INTERVAL: Final = 0.0005
"""Seconds until a thread gives the interpreter lock to the event loop, which a request needs some
ten times; Python's default is ten times as long."""


_COLLECTOR_THRESHOLDS: Final = (10_000, 4, 500)
"""Each pass stops all threads for about a microsecond for each object that it looks at: 50,000 new
ones at most in a pass over the middle generation, and rarely the entire heap."""


_MIN_MAPPED_SIZE: Final = 256 << 10
"""Bytes from which on a block of memory is returned to the system as soon as it is free. The C
library raises its own threshold to the largest block that was ever freed, and what lies between
smaller ones stays with the process."""
_M_MMAP_THRESHOLD: Final = -3
"""A parameter of glibc's ``mallopt``."""


def tune_interpreter() -> None:
    """Run the garbage collector less often, switch threads sooner, and return large free blocks.

    Requests create few reference cycles, so the default thresholds collect far too often. To call
    before clients connect, since it collects everything once.
    """
    with suppress(AttributeError):  # other C libraries have no such parameter
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MIN_MAPPED_SIZE)
    gc.collect()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)
    sys.setswitchinterval(_THREAD_SWITCH_INTERVAL)


# The limit of open files and sockets.

_RESERVED_FDS: Final = 128
"""Descriptors reserved for files, logs, listening sockets and the admin listener's connections."""


def raise_fd_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def compute_max_clients() -> int:
    """The maximum of client connections, if each needs a connection to a worker."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max((soft - _RESERVED_FDS) // 2, 1)
