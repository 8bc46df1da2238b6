"""``interlingua`` that says how many tasks it has when it is sent SIGUSR1, as ``TASKS 12``."""

import asyncio
import os
import signal
from collections.abc import Callable

from gateway.runtime import process

_STANDARD_ERROR = 2


def _print_task_count() -> None:
    os.write(_STANDARD_ERROR, f"TASKS {len(asyncio.all_tasks())}\n".encode())


def _count_tasks(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> Callable[[], asyncio.AbstractEventLoop]:
    def made() -> asyncio.AbstractEventLoop:
        loop = make()
        loop.call_soon(loop.add_signal_handler, signal.SIGUSR1, _print_task_count)
        return loop

    return made


if __name__ == "__main__":
    factory = _count_tasks(process.get_loop_factory() or asyncio.new_event_loop)
    process.get_loop_factory = lambda: factory
    from gateway.cli import main  # it takes the factory by its name

    main()
