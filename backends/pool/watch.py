"""How long a worker may be silent."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from backends.upstream import Reading
from gateway.core.context import Clock, Deadline
from gateway.core.errors import DeadlineExceeded, GatewayError, StreamBroken


class Watch:
    """Listens to one worker's answer, and cuts it off when the worker is silent for too long.

    ``first`` is how long the first events may take, in seconds, from the making of the watch; None
    where only the deadline says. After ``begun`` each read has ``idle`` seconds. The deadline holds
    for all. One timer serves the whole answer: a read only moves the moment at which it is due.
    """

    def __init__(
        self, deadline: Deadline, clock: Clock, *, first: float | None, idle: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._clock = clock
        self._idle = idle
        self._first = math.inf if first is None else clock() + first
        self._begun = False
        self._last = math.inf
        """When the last read after the first events began, by the clock."""
        self.longest = 0.0
        """Seconds from one read to the next, or to ``hurry``, at most; since the first events."""
        self._due = math.inf
        self._looks = math.inf
        """When the timer fires, by the clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._cut: Callable[[], object] = _nothing
        self._which = ""
        self._ran_out = False

    async def open(self, opening: Coroutine[Any, Any, Reading]) -> Reading:
        """The answer whose head ``opening`` waits for. Raises DeadlineExceeded."""
        task = asyncio.current_task(self._loop)
        assert task is not None  # noqa: S101 - a coroutine runs in one
        cancelled = task.cancelling()
        self._cut = task.cancel
        try:
            self.heard()
            reading = await opening
        except asyncio.CancelledError:
            if self._ran_out and task.uncancel() <= cancelled:  # nobody else wants it to end
                raise self._exceeded() from None
            raise
        finally:
            self._cut, self._due = _nothing, math.inf
            opening.close()
        self._cut = reading.abort
        return reading

    async def read(self, reading: Reading) -> bytes:
        """The next bytes, b"" at the end. Raises DeadlineExceeded or StreamBroken."""
        if reading.complete:
            return await reading.read()  # it does not wait
        self.heard()
        try:
            return await reading.read()
        except StreamBroken as broken:
            raise self._cause(broken) from None
        finally:
            self._due = math.inf

    async def listen(self, reading: Reading, take: Callable[[bytes], bool]) -> bool:
        """Give ``take`` the next bytes as they come; it calls ``heard`` each time.

        True once all has come, False if it took no more. Raises as ``read`` does, and as it does.
        """
        self.heard()
        try:
            return await reading.listen(take)
        except StreamBroken as broken:
            raise self._cause(broken) from None
        finally:
            self._due = math.inf

    def begun(self) -> None:
        """The first events have come."""
        self._begun = True

    def give_up(self) -> None:
        """Wait for its first events no longer, whatever time they had."""
        self._which = "first_token"
        self._ran_out = True
        self._cut()

    def hurry(self, seconds: float) -> None:
        """Whatever is still to be read must come within ``seconds``."""
        now = self._clock()
        if self._begun:
            self.longest = max(self.longest, now - self._last)
        self._begun = False
        self._first = now + seconds

    def stop(self) -> None:
        """The answer is over."""
        if self._timer is not None:
            self._timer.cancel()

    def heard(self) -> None:
        """Have it cut off when the next bytes are late. Raises DeadlineExceeded."""
        now = self._clock()
        if self._begun:
            own = now + self._idle
            if now - self._last > self.longest:  # noqa: PLR1730 - it would be a call for each read
                self.longest = now - self._last
            self._last = now
        else:
            own = max(self._first, now)
        due, which = self._deadline.at, "total"
        if own <= due:
            due, which = own, "idle" if self._begun else "first_token"
        self._due, self._which = due, which
        if due <= now and which == "total":
            raise self._exceeded()
        if self._looks <= due:
            return  # it looks again when the timer fires
        if self._timer is not None:
            self._timer.cancel()
        self._looks = due
        self._timer = self._loop.call_later(due - now, self._look)

    def _look(self) -> None:
        self._timer, self._looks = None, math.inf
        left = self._due - self._clock()
        if left == math.inf:
            return
        if left > 0:
            self._looks = self._due
            self._timer = self._loop.call_later(left, self._look)
            return
        self._ran_out = True
        self._cut()

    def _cause(self, broken: StreamBroken) -> GatewayError:
        """What broke it: a limit that ran out cuts it off itself."""
        return self._exceeded() if self._ran_out else broken

    def _exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(_SAID[self._which], which=self._which)


def _nothing() -> None:
    """There is no connection to cut yet."""


_SAID = {
    "first_token": "the worker took too long to begin its answer",
    "idle": "the worker fell silent in the middle of its answer",
    "total": "the request's time is up",
}
