"""The event loop that a serving process runs on, and how it lives with the collector."""

import asyncio
import gc
import importlib.util
import resource
import signal
from collections.abc import Callable
from typing import Final


def get_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes uvloop's loop where it is installed; None stands for the library's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop  # noqa: PLC0415 - optional

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def tune_gc() -> None:
    """Let the collector look less often, and no more at what is there to stay.

    A request leaves hardly a cycle behind, and by its own rule it would look after each few.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


# The wish that a process stops, as signals tell it.


class ShutdownSignal:
    """SIGTERM and SIGINT, and whatever else sets ``event``.

    SIGINT is somebody at a terminal: nobody sends requests here who would have to learn of it, so
    it asks for no ``lame_duck``.
    """

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.use_shutdown_delay = True
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.event.set)
        loop.add_signal_handler(signal.SIGINT, self._stop_now)

    async def wait(self) -> None:
        """Wait for it. From then on the next signal ends the process at once."""
        await self.event.wait()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(name)

    def _stop_now(self) -> None:
        self.use_shutdown_delay = False
        self.event.set()


# How many files and sockets the process may have open.

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
