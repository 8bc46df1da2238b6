"""``interlingua`` that reports on SIGUSR1: ``TASKS 12`` and ``LONGEST COLLECTION 3.5 ms``.

The second is the CPU time of the longest garbage collection, which stops everything else.
"""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from gateway.runtime import process

_STANDARD_ERROR = 2


class _CollectionTimer:
    """Measures garbage collections as one of ``gc.callbacks``."""

    def __init__(self) -> None:
        self._started_at = 0.0
        self.longest = 0.0
        """Seconds of CPU time."""

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        del info
        now = time.thread_time()
        if phase == "start":
            self._started_at = now
        else:
            self.longest = max(self.longest, now - self._started_at)


_timer = _CollectionTimer()


def _print_report() -> None:
    longest = f"LONGEST COLLECTION {_timer.longest * 1000:.1f} ms"
    os.write(_STANDARD_ERROR, f"{longest}\nTASKS {len(asyncio.all_tasks())}\n".encode())


def _count_tasks(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> Callable[[], asyncio.AbstractEventLoop]:
    def create_loop() -> asyncio.AbstractEventLoop:
        loop = make()
        loop.call_soon(loop.add_signal_handler, signal.SIGUSR1, _print_report)
        return loop

    return create_loop


if __name__ == "__main__":
    gc.callbacks.append(_timer)
    factory = _count_tasks(process.get_loop_factory() or asyncio.new_event_loop)
    process.get_loop_factory = lambda: factory
    from gateway.cli import main  # it imports the factory by name

    main()
