"""Many limits of time, with one timer for all of them: one for each would cost a request much more.

Pure: who makes a lookout hands it what finds the loop.
"""

import asyncio
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Final, Generic, Protocol, TypeVar

from protocols.core.interfaces import Clock

_SORT_WINDOW: Final = 1.0
"""Those that are due within so many seconds are put in order together."""


class TimerHandle(Protocol):
    """What was to be called later."""

    def cancel(self) -> None:
        """Don't."""


class SupportsCallLater(Protocol):
    """What calls something later."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> TimerHandle:
        """Call it in so many seconds."""


class TimerTarget(Protocol):
    """What is looked at."""

    def on_deadline(self, now: float) -> None:
        """What it waits for may be late by ``now``."""


class DeadlineTimer:
    """Who looks whether any of many waits for too long.

    Each is looked at once when the limit runs out that it told of last, and says then when it is
    next. Nearly all are over long before that: only those whose time is near are put in order.
    """

    __slots__ = (
        "_deadlines",
        "_fires_at",
        "_loop",
        "_sorted_until",
        "_timer",
        "_upcoming",
        "clock",
    )

    def __init__(self, clock: Clock, loop: Callable[[], SupportsCallLater]) -> None:
        self.clock = clock
        self._loop = loop
        self._deadlines: dict[TimerTarget, float] = {}
        """When to look at each, by the clock."""
        self._upcoming: list[tuple[TimerTarget, float]] = []
        """Those that were due before ``_until`` when that was set: the first comes last."""
        self._sorted_until = math.inf
        """When others may be due."""
        self._fires_at = math.inf
        """When the timer fires, by the clock."""
        self._timer: TimerHandle | None = None

    def add(self, watched: TimerTarget, due: float) -> None:
        """Look at it then, and not when it said before."""
        self._deadlines[watched] = due
        if due < self._sorted_until:
            self._sorted_until = due
            if due < self._fires_at:
                self._schedule(due)

    def remove(self, watched: TimerTarget) -> None:
        """It is over."""
        self._deadlines.pop(watched, None)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._sorted_until, self._fires_at = None, math.inf, math.inf

    def _schedule(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = moment
        self._timer = self._loop().call_later(moment - self.clock(), self._fire)

    def _fire(self) -> None:
        now = self.clock()
        if now >= self._sorted_until:
            self._sort_upcoming(now)
        dues, soon = self._deadlines, self._upcoming
        while soon and soon[-1][1] <= now:
            watched, due = soon.pop()
            if dues.get(watched) == due:  # else it is over, or said another time since
                del dues[watched]
                watched.on_deadline(now)
        self._timer, self._fires_at = None, math.inf
        first = min(self._sorted_until, soon[-1][1]) if soon else self._sorted_until
        if first < math.inf:
            self._schedule(first)

    def _sort_upcoming(self, now: float) -> None:
        """Put those in order that are due soon; where nobody is, the next is waited for."""
        dues = self._deadlines
        self._sorted_until = until = max(now + _SORT_WINDOW, min(dues.values(), default=math.inf))
        self._upcoming = sorted(
            (one for one in dues.items() if one[1] < until), key=itemgetter(1), reverse=True
        )


# Write batching: the writes of one turn of the event loop, sent together. Pure.
#
# A write wakes the reader at the other end, which costs the sender more than the write itself.
# Where many connections end in one process (clients behind a proxy, a pool's connections to a
# worker), batching wakes that process once.

_MAX_BATCH: Final = 16
"""Writes that wait at a time: the first waits for as long as the others are made."""
_UNBATCHED_WRITES: Final = 8
"""Writes that are not held back after a turn that had only one: it would be another turn for each.
"""


class Transport(Protocol):
    """One connection's way out."""

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""

    def write(self, data: bytes) -> None:
        """Send it."""


class SupportsCallSoon(Protocol):
    """What has turns."""

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call it in the next one."""


class WriteBatcher:
    """Holds back what is written until the turn's end, and keeps its order.

    Whoever does anything else with a transport that was written to calls ``flush`` before.
    """

    __slots__ = ("_flush_scheduled", "_loop", "_pending", "_unbatched_left")

    def __init__(self, loop: Callable[[], SupportsCallSoon]) -> None:
        """``loop`` gives the one that runs."""
        self._loop = loop
        self._pending: list[tuple[Transport, bytes]] = []
        self._unbatched_left = 0
        """Writes that are sent at once, while none waits."""
        self._flush_scheduled = False
        """The turn's end will be told."""

    def send(self, transport: Transport, data: bytes) -> None:
        """Write this. To one that is closing by then it is not sent."""
        if self._unbatched_left:
            self._unbatched_left -= 1
            transport.write(data)
            return
        waiting = self._pending
        waiting.append((transport, data))
        if len(waiting) >= _MAX_BATCH:
            self.flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop().call_soon(self._end_turn)

    def flush(self) -> None:
        """Send what waits."""
        waiting, self._pending = self._pending, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)

    def _end_turn(self) -> None:
        """The turn is over."""
        self._flush_scheduled = False
        if len(self._pending) == 1:
            self._unbatched_left = _UNBATCHED_WRITES
        self.flush()


# Calls that may block for as long as they like.

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
