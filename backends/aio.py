"""Shared asyncio tools: one timer for many deadlines, write batching, calls in own threads."""

import asyncio
import math
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Final, Generic, Protocol, TypeVar

from protocols.core.interfaces import Clock

_SORT_WINDOW: Final = 1.0
"""Deadlines within so many seconds are sorted together."""
_STALL: Final = 0.05
_MAX_POSTPONEMENT: Final = 0.5


class TimerHandle(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancel the call."""


class SupportsCallLater(Protocol):
    """An event loop, as far as the timer uses it."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> TimerHandle:
        """Call ``callback`` in ``delay`` seconds."""


class TimerTarget(Protocol):
    """Something with a deadline."""

    def on_deadline(self, now: float) -> None:
        """Called when a deadline has passed at ``now``."""


class DeadlineTimer:
    """Watches many deadlines with one timer of the event loop.

    A target's ``on_deadline`` is called once when its latest deadline passes; it may add the next
    one then. Most targets are removed long before their deadline, so only near ones are sorted.

    The event loop may have been stalled, by other work or by other processes: what has arrived
    meanwhile is not read yet, so that a peer looks silent that is not. If the timer fires more than
    ``_STALL`` seconds late, it therefore waits once as long as it was late, up to
    ``_MAX_POSTPONEMENT`` seconds.
    """

    __slots__ = (
        "_deadlines",
        "_expected_at",
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
        """The deadline of each target, by the clock."""
        self._upcoming: list[tuple[TimerTarget, float]] = []
        """The targets due before ``_sorted_until`` when it was set, the first of them last."""
        self._sorted_until = math.inf
        """From when on other targets may be due."""
        self._fires_at = math.inf
        """When the timer fires, by the clock."""
        self._expected_at = math.inf
        """When the timer can fire at the earliest; infinite once it was postponed."""
        self._timer: TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<DeadlineTimer {len(self._deadlines)} targets>"

    def add(self, target: TimerTarget, due: float) -> None:
        """Set the target's deadline, replacing an earlier one."""
        self._deadlines[target] = due
        if due < self._sorted_until:
            self._sorted_until = due
            if due < self._fires_at:
                self._schedule(due)

    def remove(self, target: TimerTarget) -> None:
        """Remove the target."""
        self._deadlines.pop(target, None)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._sorted_until, self._fires_at = None, math.inf, math.inf

    def _schedule(self, fires_at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = fires_at
        now = self.clock()
        self._expected_at = max(now, fires_at)
        self._timer = self._loop().call_later(fires_at - now, self._fire)

    def _fire(self) -> None:
        now = self.clock()
        late = now - self._expected_at
        if late > _STALL:
            self._expected_at = math.inf
            self._timer = self._loop().call_later(min(late, _MAX_POSTPONEMENT), self._fire)
            return
        if now >= self._sorted_until:
            self._sort_upcoming(now)
        deadlines, upcoming = self._deadlines, self._upcoming
        while upcoming and upcoming[-1][1] <= now:
            target, due = upcoming.pop()
            if deadlines.get(target) == due:  # else it was removed or has a new deadline
                del deadlines[target]
                target.on_deadline(now)
        self._timer, self._fires_at = None, math.inf
        earliest = min(self._sorted_until, upcoming[-1][1]) if upcoming else self._sorted_until
        if earliest < math.inf:
            self._schedule(earliest)

    def _sort_upcoming(self, now: float) -> None:
        """Sort the targets that are due soon, or else the next one."""
        deadlines = self._deadlines
        self._sorted_until = until = max(
            now + _SORT_WINDOW, min(deadlines.values(), default=math.inf)
        )
        self._upcoming = sorted(
            (item for item in deadlines.items() if item[1] < until), key=itemgetter(1), reverse=True
        )


# Write batching: the writes of one turn of the event loop, sent together. Pure.
#
# A write wakes the reader at the other end, which costs the sender more than the write itself.
# Where many connections end in one process (clients behind a proxy, a pool's connections to a
# worker), batching wakes that process once.

_MAX_BATCH: Final = 16
"""The largest batch, since the first write waits for the others."""
_UNBATCHED_WRITES: Final = 8
"""Writes that are sent at once after a turn with a single write."""


class Transport(Protocol):
    """A transport, as far as the batcher uses it."""

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""

    def write(self, data: bytes) -> None:
        """Send ``data``."""


class SupportsCallSoon(Protocol):
    """An event loop, as far as the batcher uses it."""

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call ``callback`` in the next turn."""


class WriteBatcher:
    """Buffers writes until the end of the loop's turn, in order.

    Call ``flush`` before any other operation on a transport that was written to.
    """

    __slots__ = ("_call_soon", "_flush_scheduled", "_loop", "_pending", "_unbatched_left")

    def __init__(self, loop: Callable[[], SupportsCallSoon]) -> None:
        """``loop`` returns the running event loop."""
        self._loop = loop
        self._call_soon: Callable[[Callable[[], None]], object] | None = None
        """Of the event loop, once it is known: asking for it takes a system call."""
        self._pending: list[tuple[Transport, bytes]] = []
        self._unbatched_left = 0
        """How many more writes are sent at once."""
        self._flush_scheduled = False
        """Whether ``_end_turn`` is scheduled."""

    def __repr__(self) -> str:
        return f"<WriteBatcher {len(self._pending)} writes pending>"

    def send(self, transport: Transport, data: bytes) -> None:
        """Write ``data``; dropped if the transport is closing by then."""
        if self._unbatched_left:
            self._unbatched_left -= 1
            transport.write(data)
            return
        writes = self._pending
        writes.append((transport, data))
        if len(writes) >= _MAX_BATCH:
            self.flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            if self._call_soon is None:
                self._call_soon = self._loop().call_soon
            self._call_soon(self._end_turn)

    def flush(self) -> None:
        """Send the buffered writes."""
        writes, self._pending = self._pending, []
        for transport, data in writes:
            if not transport.is_closing():
                transport.write(data)

    def _end_turn(self) -> None:
        """Called at the end of the turn."""
        self._flush_scheduled = False
        if len(self._pending) == 1:
            self._unbatched_left = _UNBATCHED_WRITES
        self.flush()


# Blocking calls in threads of their own.

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
