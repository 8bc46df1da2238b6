"""How long a worker may be silent."""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, Final, Literal

from backends.aio import DeadlineTimer
from backends.interfaces import Deadline
from backends.upstream import UpstreamResponse
from protocols.core.errors import DeadlineExceeded, GatewayError, StreamBroken

TimeoutName = Literal["first_token", "idle", "total"]

NO_TIMEOUT: Final = math.inf


class AttemptTimeouts:
    """Looks after one worker's answer, and cuts it off when the worker is silent for too long.

    ``first`` is when the first events must be there, by the lookout's clock; ``NEVER`` where only
    the deadline says. Once they have ``begun``, what comes next has ``idle`` seconds each time. The
    deadline holds for all. Whoever waits says so (``start``, then ``wait``), and that it waits no
    more (``rest``); at the end it is taken from the lookout. What reads the answer is one, and says
    how it is ``cut``.
    """

    __slots__ = (
        "_connecting_task",
        "_deadline",
        "_deadline_timer",
        "_expired",
        "_first_due",
        "_idle_timeout",
        "_is_waiting",
        "_last_read_at",
        "_next_check",
        "has_started",
        "longest_gap",
    )

    def __init__(
        self, lookout: DeadlineTimer, deadline: Deadline, first: float, idle: float
    ) -> None:
        self._deadline_timer = lookout
        self._deadline = deadline
        self._idle_timeout = idle
        self._first_due = first
        self.has_started = False
        """The first events have come."""
        self.longest_gap = 0.0
        """Seconds from one read to the next, or to ``hurry``, at most; since the first events."""
        self._last_read_at = NO_TIMEOUT
        """When the last read after the first events began, by the clock."""
        self._is_waiting = False
        self._next_check = NO_TIMEOUT
        """When it is looked at, by the clock."""
        self._expired: TimeoutName | None = None
        """The limit that cut it off."""
        self._connecting_task: asyncio.Task[Any] | None = None
        """What waits for a connection."""

    def abort_response(self) -> None:
        """Cut it off, if there is anything yet."""

    async def wait_response(
        self, opening: Coroutine[Any, Any, UpstreamResponse]
    ) -> UpstreamResponse:
        """The answer whose head ``opening`` waits for. Raises DeadlineExceeded."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        cancelled = task.cancelling()
        self._connecting_task = task
        try:
            if self._expired is not None:  # just when a connection that had rested ended
                raise _make_deadline_error(self._expired)
            self.wait_next()
            return await opening
        except asyncio.CancelledError:
            # Unless somebody else wants it to end, too.
            if self._expired is not None and task.uncancel() <= cancelled:
                raise _make_deadline_error(self._expired) from None
            raise
        finally:
            self._connecting_task = None
            opening.close()

    def start_wait(self, now: float) -> None:
        """Have it cut off when its first bytes are late. Raises DeadlineExceeded."""
        due, total = self._first_due, self._deadline.expires_at
        if total <= now:
            raise _make_deadline_error("total")
        if due > total:  # noqa: PLR1730 - it would be a call for each request
            due = total
        self._is_waiting = True
        self._next_check = due
        self._deadline_timer.add(self, due)

    def wait_next(self) -> None:
        """Have it cut off when the next bytes are late. Raises DeadlineExceeded."""
        if self.has_started:
            now = self.record_read()
            due = now + self._idle_timeout
        else:
            now, due = self._deadline_timer.clock(), self._first_due
        total = self._deadline.expires_at
        if total <= now:
            raise _make_deadline_error("total")
        self._is_waiting = True
        if due > total:  # noqa: PLR1730 - it would be a call for each read
            due = total
        if due < self._next_check:
            self._next_check = due
            self._deadline_timer.add(self, due)

    def stop_wait(self) -> None:
        """Nobody waits."""
        self._is_waiting = False

    def record_read(self) -> float:
        """More has come of an answer that had begun, and more is waited for; gives the time."""
        now = self._deadline_timer.clock()
        if now - self._last_read_at > self.longest_gap:  # noqa: PLR1730 - it would be a call for each read
            self.longest_gap = now - self._last_read_at
        self._last_read_at = now
        return now

    def on_deadline(self, now: float) -> None:
        """Cut it off if it is late by ``now``."""
        self._next_check = NO_TIMEOUT
        if not self._is_waiting:
            return
        due, which = self._get_next_limit()
        if due > now:
            self._next_check = due
            self._deadline_timer.add(self, due)
        else:
            self._expire(which)

    def cancel_wait(self) -> None:
        """Wait for its first events no longer, whatever time they had."""
        self._expire("first_token")

    def set_drain_deadline(self, seconds: float) -> None:
        """Whatever is still to be read must come within ``seconds``."""
        now = self.record_read() if self.has_started else self._deadline_timer.clock()
        self.has_started = False
        self._first_due = now + seconds

    def get_cause(self, error: GatewayError) -> GatewayError:
        """What was behind ``error``: where a limit ran out, that broke the answer."""
        if self._expired is None or not isinstance(error, StreamBroken):
            return error
        return _make_deadline_error(self._expired)

    def _get_next_limit(self) -> tuple[float, TimeoutName]:
        """The next limit, by the clock, and which it is."""
        total = self._deadline.expires_at
        own = self._last_read_at + self._idle_timeout if self.has_started else self._first_due
        if own > total:
            return total, "total"
        return own, "idle" if self.has_started else "first_token"

    def _expire(self, which: TimeoutName) -> None:
        self._expired = which
        self.stop_wait()
        if self._connecting_task is None:
            self.abort_response()
        else:
            self._connecting_task.cancel()


def _make_deadline_error(which: TimeoutName) -> DeadlineExceeded:
    return DeadlineExceeded(_TIMEOUT_TEXTS[which], which=which)


_TIMEOUT_TEXTS: dict[TimeoutName, str] = {
    "first_token": "the worker took too long to begin its answer",
    "idle": "the worker fell silent in the middle of its answer",
    "total": "the request's time is up",
}
