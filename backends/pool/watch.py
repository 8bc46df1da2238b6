"""How long a worker may be silent."""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, Final, Literal

from backends.upstream import Reading
from gateway.core.context import Deadline
from gateway.core.errors import DeadlineExceeded, GatewayError, StreamBroken
from gateway.core.lookout import Lookout

Which = Literal["first_token", "idle", "total"]

NEVER: Final = math.inf


class Watch:
    """Looks after one worker's answer, and cuts it off when the worker is silent for too long.

    ``first`` is when the first events must be there, by the lookout's clock; ``NEVER`` where only
    the deadline says. Once they have ``begun``, what comes next has ``idle`` seconds each time. The
    deadline holds for all. Whoever waits says so (``start``, then ``wait``), and that it waits no
    more (``rest``); at the end it is taken from the lookout. What reads the answer is one, and says
    how it is ``cut``.
    """

    __slots__ = (
        "_by",
        "_deadline",
        "_idle",
        "_last",
        "_lookout",
        "_looks",
        "_opens",
        "_ran_out",
        "_waits",
        "begun",
        "longest",
    )

    def __init__(self, lookout: Lookout, deadline: Deadline, first: float, idle: float) -> None:
        self._lookout = lookout
        self._deadline = deadline
        self._idle = idle
        self._by = first
        self.begun = False
        """The first events have come."""
        self.longest = 0.0
        """Seconds from one read to the next, or to ``hurry``, at most; since the first events."""
        self._last = NEVER
        """When the last read after the first events began, by the clock."""
        self._waits = False
        self._looks = NEVER
        """When it is looked at, by the clock."""
        self._ran_out: Which | None = None
        """The limit that cut it off."""
        self._opens: asyncio.Task[Any] | None = None
        """What waits for a connection."""

    def cut(self) -> None:
        """Cut it off, if there is anything yet."""

    async def open(self, opening: Coroutine[Any, Any, Reading]) -> Reading:
        """The answer whose head ``opening`` waits for. Raises DeadlineExceeded."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        cancelled = task.cancelling()
        self._opens = task
        try:
            if self._ran_out is not None:  # just when a connection that had rested ended
                raise _exceeded(self._ran_out)
            self.wait()
            return await opening
        except asyncio.CancelledError:
            # Unless somebody else wants it to end, too.
            if self._ran_out is not None and task.uncancel() <= cancelled:
                raise _exceeded(self._ran_out) from None
            raise
        finally:
            self._opens = None
            opening.close()

    def start(self, now: float) -> None:
        """Have it cut off when its first bytes are late. Raises DeadlineExceeded."""
        due, total = self._by, self._deadline.at
        if total <= now:
            raise _exceeded("total")
        if due > total:  # noqa: PLR1730 - it would be a call for each request
            due = total
        self._waits = True
        self._looks = due
        self._lookout.add(self, due)

    def wait(self) -> None:
        """Have it cut off when the next bytes are late. Raises DeadlineExceeded."""
        if self.begun:
            now = self.heard()
            due = now + self._idle
        else:
            now, due = self._lookout.clock(), self._by
        total = self._deadline.at
        if total <= now:
            raise _exceeded("total")
        self._waits = True
        if due > total:  # noqa: PLR1730 - it would be a call for each read
            due = total
        if due < self._looks:
            self._looks = due
            self._lookout.add(self, due)

    def rest(self) -> None:
        """Nobody waits."""
        self._waits = False

    def heard(self) -> float:
        """More has come of an answer that had begun, and more is waited for; gives the time."""
        now = self._lookout.clock()
        if now - self._last > self.longest:  # noqa: PLR1730 - it would be a call for each read
            self.longest = now - self._last
        self._last = now
        return now

    def look(self, now: float) -> None:
        """Cut it off if it is late by ``now``."""
        self._looks = NEVER
        if not self._waits:
            return
        due, which = self._limit()
        if due > now:
            self._looks = due
            self._lookout.add(self, due)
        else:
            self._end(which)

    def give_up(self) -> None:
        """Wait for its first events no longer, whatever time they had."""
        self._end("first_token")

    def hurry(self, seconds: float) -> None:
        """Whatever is still to be read must come within ``seconds``."""
        now = self.heard() if self.begun else self._lookout.clock()
        self.begun = False
        self._by = now + seconds

    def cause(self, error: GatewayError) -> GatewayError:
        """What was behind ``error``: where a limit ran out, that broke the answer."""
        if self._ran_out is None or not isinstance(error, StreamBroken):
            return error
        return _exceeded(self._ran_out)

    def _limit(self) -> tuple[float, Which]:
        """The next limit, by the clock, and which it is."""
        total = self._deadline.at
        own = self._last + self._idle if self.begun else self._by
        if own > total:
            return total, "total"
        return own, "idle" if self.begun else "first_token"

    def _end(self, which: Which) -> None:
        self._ran_out = which
        self.rest()
        if self._opens is None:
            self.cut()
        else:
            self._opens.cancel()


def _exceeded(which: Which) -> DeadlineExceeded:
    return DeadlineExceeded(_SAID[which], which=which)


_SAID: dict[Which, str] = {
    "first_token": "the worker took too long to begin its answer",
    "idle": "the worker fell silent in the middle of its answer",
    "total": "the request's time is up",
}
