"""Calls that may block for as long as they like."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


class BackgroundCall(Generic[ResultT]):
    """One call, made again and again, each time in a thread of its own.

    The loop's own threads are few, and its end waits for them: a name that nobody answers for
    would take them all and then keep the gateway from stopping. Here a call that hangs is the only
    one, and nobody waits for it at the end.
    """

    def __init__(self, call: Callable[[], ResultT]) -> None:
        self._call = call
        self._pending_result: asyncio.Future[ResultT] | None = None

    async def wait_result(self) -> ResultT:
        """What the call gives; what it raises.

        Who is cancelled leaves it running: it is waited for the next time, and not made once more.
        """
        running = self._pending_result or self._start_thread()
        await asyncio.wait({running})
        self._pending_result = None
        return running.result()

    def _start_thread(self) -> asyncio.Future[ResultT]:
        loop = asyncio.get_running_loop()
        self._pending_result = future = loop.create_future()
        future.add_done_callback(_retrieve_exception)

        def work() -> None:
            try:
                settle = partial(future.set_result, self._call())
            except Exception as error:  # noqa: BLE001 - it is raised where the result is wanted
                settle = partial(future.set_exception, error)
            with suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(settle)

        threading.Thread(target=work, name="aside", daemon=True).start()
        return future


def _retrieve_exception(future: asyncio.Future[ResultT]) -> None:
    future.exception()  # so that it counts as seen, also where nobody waits any more
