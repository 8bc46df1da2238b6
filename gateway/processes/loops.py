"""The event loop that a serving process runs on, and how it lives with the collector."""

import asyncio
import gc
import importlib.util
from collections.abc import Callable


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
