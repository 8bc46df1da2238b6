"""Slots for large work in threads, of which each is taken until its thread has ended.

A cancelled caller leaves at once, but its thread goes on: it holds the memory of its work and the
interpreter's lock. If its slot were free then, clients that leave would start more and more.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class SlotThread:
    """Calls functions in a thread, one after the other."""

    running: asyncio.Future[Any] | None = None
    """The call whose thread has not ended."""

    async def call(self, function: Callable[..., ResultT], *values: Any) -> ResultT:
        """What the function returns. If the caller is cancelled, ``running`` is left."""
        loop = asyncio.get_running_loop()
        running = self.running = loop.run_in_executor(None, function, *values)
        try:
            await asyncio.wait({running})
            self.running = None
            result: ResultT = running.result()
            return result
        finally:
            del running  # an error would refer to itself by this frame


@asynccontextmanager
async def hold_slots(*slots: asyncio.Semaphore) -> AsyncIterator[SlotThread]:
    """Wait for the slots, and hold them until the body and its last thread have ended."""
    with ExitStack() as held:
        for slot in slots:
            await slot.acquire()
            held.callback(slot.release)
        thread = SlotThread()
        try:
            yield thread
        finally:
            if thread.running is not None:
                thread.running.add_done_callback(_Release(held.pop_all()))


class _Release:
    """Frees slots when their thread has ended; nobody waits for its result."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held

    def __call__(self, ended: asyncio.Future[Any]) -> None:
        self._held.close()
        if not ended.cancelled():
            ended.exception()  # mark it as retrieved
