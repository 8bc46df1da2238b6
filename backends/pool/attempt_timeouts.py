"""The timeouts of one attempt: they abort a response when its worker is silent for too long.

They set no timer of their own: one timer of the pool calls ``on_deadline``, which aborts the
response, and the read that fails by that raises the timeout's error (``get_cause``).

What must never happen: a cancellation of somebody else that is taken for a timeout, or a timeout
for a failure of the network. The cause is what expired first.
"""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, Final, Literal

from msgspec import Struct

from backends.deadline_timer import DeadlineTimer
from backends.http.interfaces import UpstreamResponse
from backends.interfaces import TIME_IS_UP, Deadline
from protocols.core.errors import DeadlineExceeded, GatewayError, StreamBroken

TimeoutName = Literal["first_token", "idle", "total"]
NO_TIMEOUT: Final = math.inf
_TIMEOUT_TEXTS: dict[tuple[TimeoutName, bool], str] = {
    ("first_token", False): "the worker sent no first token in time (timeouts.first_token)",
    ("first_token", True): "the worker sent comments only, and no first token in time "
    "(timeouts.idle_max)",
    ("idle", False): "the worker stopped sending in the middle of its response (timeouts.idle)",
    ("idle", True): "the worker sent comments only in the middle of its response "
    "(timeouts.idle_max)",
}
"""By timeout, and whether comments extended it to the end of ``idle_max``."""


class AttemptTimeouts(Struct, eq=False):
    """Aborts a worker's response when the worker is silent for too long.

    ``first_due`` is the time, by the timer's clock, by which the first events must arrive;
    ``NO_TIMEOUT`` if only the deadline applies. After the first events (``has_started``), the next
    content may take ``idle_timeout`` seconds. Comments are no content, but signs of life: each lets
    the worker go on for ``idle_timeout`` seconds, up to ``idle_max`` seconds without content. The
    deadline always applies. The reader calls ``start_wait`` or ``wait_next`` before it waits and
    ``stop_wait`` afterwards, and at last removes the object from the timer. A subclass implements
    ``abort_response``.
    """

    deadline_timer: DeadlineTimer
    deadline: Deadline
    first_due: float
    idle_timeout: float
    idle_max: float = 0.0
    has_started: bool = False
    """Whether the first events have arrived."""
    longest_gap: float = 0.0
    """The longest time between two reads since the first events, in seconds."""
    _first_latest: float = 0.0
    """How far comments extend ``first_due``, by the clock."""
    _alive_at: float = -NO_TIMEOUT
    """The last read without content, by the clock."""
    _last_read_at: float = NO_TIMEOUT
    """Start of the last read after the first events, by the clock."""
    _is_waiting: bool = False
    _next_check: float = NO_TIMEOUT
    """When the timer checks it next, by the clock."""
    _expired: TimeoutName | None = None
    """The timeout that expired, if any."""
    _is_extended: bool = False
    """Whether that was ``idle_max``."""
    _connecting_task: asyncio.Task[Any] | None = None
    """The task that waits for a connection."""

    def abort_response(self) -> None:
        """Abort the response, if there is one yet."""

    async def wait_response(
        self, pending_response: Coroutine[Any, Any, UpstreamResponse]
    ) -> UpstreamResponse:
        """Await ``pending_response`` and return the response. Raises DeadlineExceeded."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        cancelled = task.cancelling()
        self._connecting_task = task
        try:
            if self._expired is not None:  # expired just as an idle connection closed
                raise self._make_error(self._expired)
            self.wait_next()
            return await pending_response
        except asyncio.CancelledError:
            # Swallow the cancellation only if nobody else requested one.
            if self._expired is not None and task.uncancel() <= cancelled:
                raise self._make_error(self._expired) from None
            raise
        finally:
            self._connecting_task = None
            pending_response.close()

    def start_wait(self, now: float) -> None:
        """Start to wait for the first bytes. Raises DeadlineExceeded."""
        due, total = self.first_due, self.deadline.expires_at
        if total <= now:
            raise self._make_error("total")
        if due > total:  # noqa: PLR1730 - it would be a call for each request
            due = total
        self._first_latest = now + self.idle_max
        self._is_waiting = True
        self._next_check = due
        self.deadline_timer.add(self, due)

    def wait_next(self, *, had_content: bool = True) -> None:
        """Start to wait for the next bytes. Raises DeadlineExceeded.

        Without ``had_content`` the last read had no content.
        """
        if self.has_started:
            now = self.record_read() if had_content else self.record_life()
            due = self._last_read_at + self.idle_timeout
        else:
            now, due = self.deadline_timer.clock(), self.first_due
        if self._alive_at + self.idle_timeout > due:
            due = self._get_silence_limit()
        total = self.deadline.expires_at
        if total <= now:
            raise self._make_error("total")
        self._is_waiting = True
        if due > total:  # noqa: PLR1730 - it would be a call for each read
            due = total
        if due < self._next_check:
            self._next_check = due
            self.deadline_timer.add(self, due)

    def stop_wait(self) -> None:
        """Stop waiting: no timeout but the next check applies."""
        self._is_waiting = False

    def record_read(self) -> float:
        """Record a read after the first events; returns the time."""
        now = self.deadline_timer.clock()
        if now - self._last_read_at > self.longest_gap:  # noqa: PLR1730 - it would be a call for each read
            self.longest_gap = now - self._last_read_at
        self._last_read_at = now
        return now

    def record_life(self) -> float:
        """Record a read without content, which extends the timeouts; returns the time."""
        self._alive_at = now = self.deadline_timer.clock()
        return now

    def on_deadline(self, now: float) -> None:
        """Abort the response if a timeout has expired by ``now``."""
        self._next_check = NO_TIMEOUT
        if not self._is_waiting:
            return
        due, timeout = self._get_next_limit()
        if due > now:
            self._next_check = due
            self.deadline_timer.add(self, due)
        else:
            self._expire(timeout)

    def cancel_wait(self) -> None:
        """Stop waiting for the first events, whatever time is left."""
        self._expire("first_token")

    def set_drain_deadline(self, seconds: float) -> None:
        """Let the rest of the body take at most ``seconds``."""
        now = self.record_read() if self.has_started else self.deadline_timer.clock()
        self.has_started = False
        self.first_due = self._first_latest = now + seconds

    def get_cause(self, error: GatewayError) -> GatewayError:
        """The cause of ``error``: the timeout error if an expired timeout broke the response."""
        if self._expired is None or not isinstance(error, StreamBroken):
            return error
        return self._make_error(self._expired)

    def _get_silence_limit(self) -> float:
        """The time, by the clock, by which content must arrive."""
        if self.has_started:
            limit, latest = (
                self._last_read_at + self.idle_timeout,
                self._last_read_at + self.idle_max,
            )
        else:
            limit, latest = self.first_due, self._first_latest
        extended = min(self._alive_at + self.idle_timeout, latest)
        return extended if extended > limit else limit  # noqa: FURB136 - a call for each read

    def _get_next_limit(self) -> tuple[float, TimeoutName]:
        """The next timeout, by the clock, and its name."""
        total = self.deadline.expires_at
        limit = self._get_silence_limit()
        if limit > total:
            return total, "total"
        return limit, "idle" if self.has_started else "first_token"

    def _expire(self, timeout: TimeoutName) -> None:
        self._expired = timeout
        usual = self._last_read_at + self.idle_timeout if self.has_started else self.first_due
        latest = self._alive_at + self.idle_timeout
        self._is_extended = usual < self._get_silence_limit() < latest
        self.stop_wait()
        if self._connecting_task is None:
            self.abort_response()
        else:
            self._connecting_task.cancel()

    def _make_error(self, timeout: TimeoutName) -> DeadlineExceeded:
        if timeout == "total":
            return DeadlineExceeded(TIME_IS_UP, which=timeout)
        return DeadlineExceeded(_TIMEOUT_TEXTS[timeout, self._is_extended], which=timeout)
