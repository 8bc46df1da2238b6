"""A blocking call that is repeated, each time in a thread of its own."""

import asyncio
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


class BackgroundCall(Generic[ResultT]):
    """A blocking call that is repeated, each time in a daemon thread of its own.

    The loop's executor has few threads and shutdown waits for them: DNS lookups that hang would
    take them all and delay the shutdown. Here at most one call hangs, and shutdown ignores it.
    """

    def __init__(self, call: Callable[[], ResultT]) -> None:
        self._call = call
        self._pending_result: asyncio.Future[ResultT] | None = None

    async def wait_result(self) -> ResultT:
        """The result of the call, or its exception.

        If the waiting task is cancelled, the call goes on, and the next wait gets its result.
        """
        running = self._pending_result or self._start_thread()
        await asyncio.wait({running})
        self._pending_result = None
        return running.result()

    def _start_thread(self) -> asyncio.Future[ResultT]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        future.add_done_callback(_retrieve_exception)

        def work() -> None:
            try:
                settle = partial(future.set_result, self._call())
            except Exception as error:  # noqa: BLE001 - raised in wait_result
                settle = partial(future.set_exception, error)
            with suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(settle)

        start_new_thread(work, ())  # Thread.start() would wait until the thread runs
        self._pending_result = future
        return future


def _retrieve_exception(future: asyncio.Future[ResultT]) -> None:
    future.exception()  # mark it as retrieved, even if nobody waits
