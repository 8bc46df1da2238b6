"""Whether a worker may be asked, and how much of it. Pure: the moment is a parameter, in seconds.

Three things take a worker out: probes that fail, requests that fail, and connections that it does
not take. Each has its own way back. Too many requests (429) take it out never; they make it smaller
for a while.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeVar

from msgspec import Struct

# What was measured of late, as one number. Pure: the moment is a parameter, in seconds.

_WINDOW_SLOTS: Final = 10


class PeakEwma:
    """A mean of seconds in which the latest count most, and a rise counts at once.

    A worker that grows slow must be seen from its first slow answer, and one that grows fast may
    take its time: a larger value replaces the mean, a smaller one only pulls at it. ``memory`` is
    how long (seconds) a value keeps a third of its worth. With nothing new the mean fades to
    nothing, so that a worker which nobody asks any more gets another chance.
    """

    def __init__(self, memory: float = 10.0) -> None:
        self._decay_seconds = memory
        self._mean: float | None = None
        self._updated_at = 0.0

    def add(self, now: float, seconds: float) -> None:
        """One more value."""
        if self._mean is None or seconds >= self._mean:
            self._mean = seconds
        else:
            kept = self._decay_mean(now)
            self._mean = self._mean * kept + seconds * (1.0 - kept)
        self._updated_at = now

    def get_value(self, now: float) -> float | None:
        """The mean, faded by the time since the last value; None when there was none."""
        return None if self._mean is None else self._mean * self._decay_mean(now)

    def _decay_mean(self, now: float) -> float:
        return math.exp((self._updated_at - now) / self._decay_seconds)


class SlidingWindowCounter:
    """How often something happened in the last ``window`` seconds, give or take a tenth of them."""

    __slots__ = (
        "_current_slot",
        "_earlier_slots",
        "_slot_end",
        "_slot_number",
        "_slot_seconds",
        "_slots",
    )

    def __init__(self, window: float) -> None:
        self._slot_seconds = window / _WINDOW_SLOTS
        self._slots: deque[tuple[float, int]] = deque()
        """The number and the count of each that is over and not yet too old."""
        self._earlier_slots = 0
        """How often in these."""
        self._slot_number = 0.0
        self._current_slot = 0
        """How often in the slot that lasts."""
        self._slot_end = -math.inf
        """When that is over."""

    def add(self, now: float) -> None:
        """It happened once more."""
        if now >= self._slot_end:
            self._advance_slot(now)
        self._current_slot += 1

    def count(self, now: float) -> int:
        """How often."""
        if now >= self._slot_end:
            self._advance_slot(now)
        return self._earlier_slots + self._current_slot

    def clear(self) -> None:
        """Nothing has happened."""
        self._slots.clear()
        self._earlier_slots = self._current_slot = 0

    def _advance_slot(self, now: float) -> None:
        """Begin the slot that ``now`` is in, and let go of those that are too old."""
        if self._current_slot:
            self._slots.append((self._slot_number, self._current_slot))
        self._earlier_slots += self._current_slot
        self._current_slot = 0
        self._slot_number = now // self._slot_seconds
        self._slot_end = (self._slot_number + 1) * self._slot_seconds
        while self._slots and self._slots[0][0] <= self._slot_number - _WINDOW_SLOTS:
            self._earlier_slots -= self._slots.popleft()[1]


HealthState = Literal["up", "trial", "out"]
"""``trial``: it was out, its time is over, and one request at a time finds out about it."""

_FIRST_BACKOFF: Final = 0.5
_MAX_BACKOFF: Final = 30.0
_MAX_EJECTION: Final = 300.0
"""Also how long a worker must be good for its earlier ejections to count no more."""
_MAX_DOUBLINGS: Final = 16
_MIN_WEIGHT_FACTOR: Final = 0.1
_LIMIT_DECREASE: Final = 0.7
_MIN_RATE_LIMIT_PAUSE: Final = 1.0
"""Refusals within so many seconds were under way together, and count as one."""
_RATE_LIMIT_MEMORY: Final = 60.0


class HealthSettings(Struct, frozen=True):
    """When a worker is out, and how it comes back. Times are in seconds."""

    fall: int = 3
    """Failed probes in a row that take it out."""
    rise: int = 2
    """Good probes in a row that bring it back from there."""
    consecutive_failures: int = 5
    """Failed requests in a row that take it out."""
    failure_rate: float = 0.25
    """The part of requests in ``window`` that takes it out, if at least ``min_requests``."""
    min_requests: int = 20
    window: float = 10.0
    open_for: float = 15.0
    """How long failed requests keep it out the first time; each time after twice as long."""
    slow_start: float = 30.0
    """In how long its share grows to the whole after it comes back; 0 is at once."""
    panic_threshold: float = 0.3
    """When fewer than this part of all workers are in, it is rather the health that is wrong."""


class WorkerHealth:
    """What is known of one worker. Nothing is known of a new one, and it may be asked.

    Its caller tells what happened and judges nothing itself, but for this: an error that is the
    client's, or a client that left, says nothing about the worker and is not told.
    """

    def __init__(self, settings: HealthSettings | None = None) -> None:
        self._settings = settings or HealthSettings()
        self._health_checks = _HealthCheckResults()
        self._backoff = _ConnectBackoff()
        self._ejection = _OutlierEjection(self._settings)
        self._adaptive_limit = _AdaptiveLimit()
        self._full_weight_at = 0.0
        """When its share is whole again."""
        self.healthy = True
        """Nothing is known against it. What is may lapse with time; that it is well never does."""

    def record_health_check(self, now: float, ok: bool) -> None:  # noqa: FBT001 - it is what a probe gives
        """A probe ended. One that is good also ends an absence: it can be reached again."""
        if not ok:
            self._health_checks.record_failure(self._settings.fall)
        else:
            self.record_connected(now)
            if self._health_checks.record_success(self._settings.rise):
                self._ejection.end_ejection(now)
                self._full_weight_at = now + self._settings.slow_start
        self._update_healthy(now)

    def record_connected(self, now: float) -> None:
        """It took a connection: an absence is over, whatever the answer will be.

        That it missed but one is no reason to go slow.
        """
        if self._backoff.failures > 1:
            self._full_weight_at = now + self._settings.slow_start
        if self._backoff.failures:
            self._backoff = _ConnectBackoff()
            self._update_healthy(now)

    def record_success(self, now: float) -> None:
        """A request was answered."""
        ejection = self._ejection
        if self.healthy:  # nothing ends by it
            ejection.consecutive_failures = 0
            ejection.requests.add(now)
            return
        back = ejection.record_success(now)
        self.record_connected(now)
        self._adaptive_limit.increase(now)
        if back:
            self._full_weight_at = now + self._settings.slow_start
        self._update_healthy(now)

    def record_failure(self, now: float) -> None:
        """A request met a status from 500 on, a cut stream, garbage, or silence."""
        self.record_connected(now)
        self._ejection.record_failure(now)
        self._update_healthy(now)

    def record_connect_failure(self, now: float) -> None:
        """There was no connection: leave it alone, twice as long each time.

        Requests that were under way to it together count as one.
        """
        if self._backoff.record_failure(now):
            self._ejection.record_connect_failure(now)
            self._update_healthy(now)

    def record_rate_limit(self, now: float, retry_after: float | None = None) -> None:
        """It has too many requests (429), and said after how many seconds it may have more."""
        self.record_connected(now)
        self._adaptive_limit.decrease(now, retry_after or 0.0)
        self._update_healthy(now)

    def get_state(self, now: float) -> HealthState:
        """Whether it may be asked."""
        if self._health_checks.down or self.in_backoff(now) or self._ejection.is_active(now):
            return "out"
        return "trial" if self._backoff.failures or self._ejection.ejected else "up"

    def is_available(self, now: float) -> bool:
        """Whether it is not out."""
        return self.get_state(now) != "out"

    def in_backoff(self, now: float) -> bool:
        """Whether it is left alone since it took no connection."""
        return now < self._backoff.until

    def is_rate_limited(self, now: float) -> bool:
        """Whether it refused the only request that it had (429), and its time is not over."""
        return now < self._adaptive_limit.rate_limited_until

    def get_unavailable_until(self, now: float) -> float | None:
        """The moment until which it is left alone, where that is known and still to come."""
        moment = max(self._backoff.until, self._ejection.ejected_until)
        return moment if now < moment else None

    def get_weight_factor(self, now: float) -> float:
        """The part of its weight that counts, which grows after it came back.

        A trial needs no smaller part: it is one request at a time, and it has to come about.
        """
        left = self._full_weight_at - now
        if left <= 0.0 or self.get_state(now) == "trial":
            return 1.0
        return max(_MIN_WEIGHT_FACTOR, 1.0 - left / self._settings.slow_start)

    def get_limit(self, configured: int | None, in_flight: int) -> int | None:
        """How many requests it may have at a time, of which it has ``in_flight`` now."""
        self._adaptive_limit.in_flight = in_flight
        if self._adaptive_limit.limit is None:
            return configured
        limit = int(self._adaptive_limit.limit)
        return limit if configured is None else min(limit, configured)

    def _update_healthy(self, now: float) -> None:
        """Something happened: say whether it is well."""
        pressure = self._adaptive_limit
        eased = pressure.limit is None and pressure.rate_limited_until <= now
        self.healthy = eased and self.get_state(now) == "up"


class HasHealth(Protocol):
    """A worker with its health."""

    @property
    def health(self) -> WorkerHealth:
        """What is known of it."""

    @property
    def in_flight(self) -> int:
        """The requests that it has now."""


HasHealthT = TypeVar("HasHealthT", bound=HasHealth)


def select_available(
    members: Sequence[HasHealthT], now: float, panic: float
) -> Sequence[HasHealthT]:
    """Those that may be asked, of all the ``members`` of a pool: one at least, if there is any.

    When fewer than the part ``panic`` of them are in, health is ignored, but for workers that are
    left alone since they took no connection: they would not take the next either. They are asked
    when there is nobody else, and so are those that have too much to do for even one request.
    """
    for one in members:
        if not one.health.healthy:
            break
    else:
        return members
    known = [one for one in members if one.health.is_available(now)]
    if len(known) < panic * len(members) or not known:
        return [one for one in members if not one.health.in_backoff(now)] or members
    free = [one for one in known if not one.in_flight or one.health.get_state(now) == "up"]
    return [one for one in free if not one.health.is_rate_limited(now)] or free or known


class _HealthCheckResults(Struct):
    """Whether probes say that it is down."""

    successes: int = 0
    failures: int = 0
    down: bool = False

    def record_failure(self, fall: int) -> None:
        self.successes = 0
        self.failures += 1
        self.down = self.down or self.failures >= fall

    def record_success(self, rise: int) -> bool:
        """Whether that brought it back."""
        self.failures = 0
        self.successes += 1
        back = self.down and self.successes >= rise
        self.down = self.down and not back
        return back


class _ConnectBackoff(Struct):
    """How often in a row it took no connection, and until when it is left alone for it."""

    failures: int = 0
    until: float = 0.0

    def record_failure(self, now: float) -> bool:
        """Whether that was another time."""
        if now < self.until:
            return False
        seconds = _FIRST_BACKOFF * 2.0 ** min(self.failures, _MAX_DOUBLINGS)
        self.until = now + min(seconds, _MAX_BACKOFF)
        self.failures += 1
        return True


class _OutlierEjection:
    """Requests that failed, and how long they keep it out.

    ``on`` from the ejection until a request proves it good. What still comes in from requests that
    were sent before says little, and is not counted; but answers that are good a ``window`` later,
    as many in a row as would have taken it out, are those of a worker which all the gateway's
    requests go to for want of a better: it is back.
    """

    def __init__(self, settings: HealthSettings) -> None:
        self.ejected = False
        self.ejected_until = 0.0
        self._settings = settings
        self._since = 0.0
        self._ejections = 0
        self._ended = 0.0
        self.consecutive_failures = 0
        self._successes = 0
        self.requests = SlidingWindowCounter(settings.window)
        self._failures = SlidingWindowCounter(settings.window)

    def is_active(self, now: float) -> bool:
        return self.ejected and now < self.ejected_until

    def record_failure(self, now: float) -> None:
        self._successes = 0
        if self.is_active(now):
            return
        self.consecutive_failures += 1
        self._count_failure(now)
        if (
            self.ejected
            or self.consecutive_failures >= self._settings.consecutive_failures
            or self._exceeds_failure_rate(now)
        ):
            self._eject(now)

    def record_connect_failure(self, now: float) -> None:
        """No connection, which counts among all; the absence says what it is worth in a row."""
        if self.ejected:
            return
        self._count_failure(now)
        if self._exceeds_failure_rate(now):
            self._eject(now)

    def record_success(self, now: float) -> bool:
        """Whether that brought it back."""
        self.consecutive_failures = 0
        self.requests.add(now)
        if not self.ejected:
            return False
        if self.is_active(now):
            self._successes += now >= self._since + self._settings.window
            if self._successes < self._settings.consecutive_failures:
                return False
        self.end_ejection(now)
        return True

    def end_ejection(self, now: float) -> None:
        """It is proven good."""
        if self.ejected:
            self._ended = now
        self.ejected = False
        self.ejected_until = 0.0
        self.consecutive_failures = 0

    def _count_failure(self, now: float) -> None:
        self.requests.add(now)
        self._failures.add(now)

    def _exceeds_failure_rate(self, now: float) -> bool:
        count = self.requests.count(now)
        most = self._settings.failure_rate * count
        return count >= self._settings.min_requests and self._failures.count(now) >= most

    def _eject(self, now: float) -> None:
        if not self.ejected and now - self._ended >= _MAX_EJECTION:
            self._ejections = 0
        seconds = self._settings.open_for * 2.0 ** min(self._ejections, _MAX_DOUBLINGS)
        self._ejections += 1
        self.ejected = True
        self._since = now
        self.ejected_until = now + min(seconds, max(self._settings.open_for, _MAX_EJECTION))
        self.consecutive_failures = self._successes = 0
        self.requests.clear()
        self._failures.clear()


class _AdaptiveLimit(Struct):
    """How small too many requests have made it; ``limit`` is None where they have not.

    A refusal takes a part of what it has or may have, and each answer gives a little back, one
    more request for as many answers as it may have requests: the limit hovers below where refusals
    begin.
    """

    in_flight: int = 0
    limit: float | None = None
    decreased_at: float = 0.0
    grows_at: float = 0.0
    rate_limited_until: float = 0.0

    def decrease(self, now: float, retry_after: float) -> None:
        again = now + max(_MIN_RATE_LIMIT_PAUSE, min(retry_after, _RATE_LIMIT_MEMORY))
        if self.in_flight <= 1:
            self.rate_limited_until = again
        if self.limit is not None and now < self.decreased_at + _MIN_RATE_LIMIT_PAUSE:
            return
        had = self.in_flight if self.limit is None else min(self.in_flight, self.limit)
        self.limit = max(1.0, had * _LIMIT_DECREASE)
        self.decreased_at = now
        self.grows_at = again

    def increase(self, now: float) -> None:
        if self.limit is None or now < self.grows_at:
            return
        over = now >= self.decreased_at + _RATE_LIMIT_MEMORY
        self.limit = None if over else self.limit + 1.0 / self.limit
