"""Health of a worker: availability, slow start and limits. Pure: time is a parameter, in seconds.

Three things take a worker out of rotation: failed health checks, failed requests (outlier ejection)
and failed connects (backoff). Each ends in its own way. A 429 never takes a worker out; it lowers
the worker's concurrency limit for a while.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeVar

from msgspec import Struct

from backends.pool.settings import CircuitBreakerSettings, HealthCheckSettings

# Recent measurements: a latency average and counters over a sliding window.

_WINDOW_SLOTS: Final = 10
_MEAN_VALUES: Final = 16
"""About how many of the last values ``PeakEwma.recent_mean`` is made of."""


class PeakEwma:
    """Peak EWMA: an exponentially weighted average in seconds that rises at once.

    A slow worker must show from its first slow response: a larger value replaces the average, a
    smaller one only lowers it gradually. ``memory`` is the decay time in seconds. Without new
    values the average decays to zero, so that an unused worker is tried again.
    """

    def __init__(self, memory: float = 10.0) -> None:
        self.recent_mean: float | None = None
        """The mean of the last values, which neither rises at once nor decays: the true figure."""
        self._decay_seconds = memory
        self._count = 0
        self._mean: float | None = None
        self._updated_at = 0.0

    def add(self, now: float, seconds: float) -> None:
        """Add a value."""
        self._count = min(self._count + 1, _MEAN_VALUES)
        mean = self.recent_mean or 0.0
        self.recent_mean = mean + (seconds - mean) / self._count
        if self._mean is None or seconds >= self._mean:
            self._mean = seconds
        else:
            decay = self._decay_mean(now)
            self._mean = self._mean * decay + seconds * (1.0 - decay)
        self._updated_at = now

    def get_value(self, now: float) -> float | None:
        """The average, decayed since the last value; None without values."""
        return None if self._mean is None else self._mean * self._decay_mean(now)

    def _decay_mean(self, now: float) -> float:
        return math.exp((self._updated_at - now) / self._decay_seconds)


class SlidingWindowCounter:
    """Counts events in the last ``window`` seconds, within a tenth of them."""

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
        """Number and count of each past slot within the window."""
        self._earlier_slots = 0
        """The sum of their counts."""
        self._slot_number = 0.0
        self._current_slot = 0
        """The count of the current slot."""
        self._slot_end = -math.inf
        """When the current slot ends."""

    def add(self, now: float) -> None:
        """Count one event."""
        if now >= self._slot_end:
            self._advance_slot(now)
        self._current_slot += 1

    def count(self, now: float) -> int:
        """The number of events in the window."""
        if now >= self._slot_end:
            self._advance_slot(now)
        return self._earlier_slots + self._current_slot

    def clear(self) -> None:
        """Forget all events."""
        self._slots.clear()
        self._earlier_slots = self._current_slot = 0

    def _advance_slot(self, now: float) -> None:
        """Begin the slot of ``now`` and drop slots outside the window."""
        if self._current_slot:
            self._slots.append((self._slot_number, self._current_slot))
        self._earlier_slots += self._current_slot
        self._current_slot = 0
        self._slot_number = now // self._slot_seconds
        self._slot_end = (self._slot_number + 1) * self._slot_seconds
        while self._slots and self._slots[0][0] <= self._slot_number - _WINDOW_SLOTS:
            self._earlier_slots -= self._slots.popleft()[1]


HealthState = Literal["up", "trial", "out"]
"""``trial`` (half open): the time out is over; one request at a time tests the worker."""
OutReason = Literal["", "health_check", "connect", "ejected"]
"""What takes a worker out of rotation; "" if nothing does."""

_FIRST_BACKOFF: Final = 0.5
_MAX_BACKOFF: Final = 30.0
_MAX_EJECTION: Final = 300.0
"""Also how long a worker must be healthy until earlier ejections are forgotten."""
_MAX_DOUBLINGS: Final = 16
_MIN_WEIGHT_FACTOR: Final = 0.1
_LIMIT_DECREASE: Final = 0.7
_MIN_RATE_LIMIT_PAUSE: Final = 1.0
"""429s within so many seconds were in flight together and count as one."""
_RATE_LIMIT_MEMORY: Final = 60.0
_MAX_MODEL_LIMITS: Final = 256
"""With a wildcard, clients choose the names of models."""


class WorkerHealth:
    """The health of one worker. A new worker is available.

    The caller records all outcomes, except client errors and client disconnects, which say nothing
    about the worker.
    """

    def __init__(
        self,
        settings: HealthCheckSettings = HealthCheckSettings(),  # noqa: B008 - frozen
        breaker: CircuitBreakerSettings = CircuitBreakerSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._settings = settings
        self._health_checks = _HealthCheckResults()
        self._backoff = _ConnectBackoff()
        self._ejection = _OutlierEjection(breaker)
        self._adapts_to_429 = breaker.adaptive_concurrency
        self._model_limits: dict[str, _AdaptiveLimit] = {}
        """The limits of the models of which the worker refused requests not long ago.

        The latest is the last one.
        """
        self._full_weight_at = 0.0
        """When slow start ends."""
        self.healthy = True
        """No problem is recorded. True stays true until a failure; False may end with time."""

    def __repr__(self) -> str:
        return f"<WorkerHealth {'healthy' if self.healthy else 'unhealthy'}>"

    def record_health_check(self, now: float, ok: bool) -> None:  # noqa: FBT001 - the result of a check
        """Record a health check. A successful one also ends the connect backoff."""
        if not ok:
            self._health_checks.record_failure(self._settings.fall)
        else:
            self.record_connected(now)
            if self._health_checks.record_success(self._settings.rise):
                self._ejection.end_ejection(now)
                self._full_weight_at = now + self._settings.slow_start
        self._update_healthy(now)

    def record_connected(self, now: float) -> None:
        """Record a successful connect, which ends the backoff whatever the response will be.

        Slow start follows only after more than one failed connect.
        """
        if self._backoff.failures > 1:
            self._full_weight_at = now + self._settings.slow_start
        if self._backoff.failures:
            self._backoff = _ConnectBackoff()
            self._update_healthy(now)

    def record_success(self, now: float, model: str = "") -> None:
        """Record a completed request for ``model``."""
        ejection = self._ejection
        if self.healthy:  # no state to leave
            ejection.consecutive_failures = 0
            ejection.requests.add(now)
            return
        returned = ejection.record_success(now)
        self.record_connected(now)
        if (limit := self._model_limits.get(model)) is not None and not limit.increase(now):
            del self._model_limits[model]
        if returned:
            self._full_weight_at = now + self._settings.slow_start
        self._update_healthy(now)

    def record_failure(self, now: float) -> None:
        """Record a failed request: a status from 500 on, a broken stream, garbage or a timeout."""
        self.record_connected(now)
        self._ejection.record_failure(now)
        self._update_healthy(now)

    def record_connect_failure(self, now: float) -> None:
        """Record a failed connect: back off, twice as long each time.

        Requests that were in flight together count as one.
        """
        if self._backoff.record_failure(now):
            self._ejection.record_connect_failure(now)
            self._update_healthy(now)

    def record_rate_limit(
        self, now: float, retry_after: float | None = None, *, model: str = "", in_flight: int = 1
    ) -> None:
        """Record a 429 for ``model``, with the worker's Retry-After in seconds, if any.

        It limits that model only: a worker may have room for its other models. ``in_flight`` are
        the requests for the model, with this one.
        """
        self.record_connected(now)
        if not self._adapts_to_429:
            return
        limit = self._model_limits.pop(model, None) or _AdaptiveLimit()
        if len(self._model_limits) >= _MAX_MODEL_LIMITS:
            del self._model_limits[next(iter(self._model_limits))]
        self._model_limits[model] = limit
        limit.decrease(now, retry_after or 0.0, in_flight)
        self._update_healthy(now)

    def get_state(self, now: float) -> HealthState:
        """The state at ``now``."""
        if self.get_out_reason(now):
            return "out"
        return "trial" if self._backoff.failures or self._ejection.ejected else "up"

    def get_out_reason(self, now: float) -> OutReason:
        """Why it is out: failed health checks, failed connects, or outlier ejection."""
        if self._health_checks.down:
            return "health_check"
        if self.in_backoff(now):
            return "connect"
        return "ejected" if self._ejection.is_active(now) else ""

    def is_available(self, now: float) -> bool:
        """Whether it is not out of rotation."""
        return self.get_state(now) != "out"

    def in_backoff(self, now: float) -> bool:
        """Whether it is in backoff after failed connects."""
        return now < self._backoff.until

    def is_rate_limited(self, now: float, model: str = "") -> bool:
        """Whether it answered 429 to the only request for ``model``, and the pause is not over."""
        limit = self._model_limits.get(model)
        return limit is not None and now < limit.rate_limited_until

    def get_unavailable_until(self, now: float) -> float | None:
        """When the backoff or ejection ends; None if there is none or the end is unknown."""
        moment = max(self._backoff.until, self._ejection.ejected_until)
        return moment if now < moment else None

    def get_weight_factor(self, now: float) -> float:
        """The factor of its weight during slow start, up to 1.

        It is 1 in a trial, which is limited to one request at a time anyway.
        """
        remaining = self._full_weight_at - now
        if remaining <= 0.0 or self.get_state(now) == "trial":
            return 1.0
        return max(_MIN_WEIGHT_FACTOR, 1.0 - remaining / self._settings.slow_start)

    def get_limit(self, model: str = "") -> int | None:
        """The concurrency limit of ``model`` after 429s; None without one."""
        limit = self._model_limits.get(model)
        return None if limit is None else int(limit.limit)

    @property
    def limits_models(self) -> bool:
        """Whether it refused requests for a model not long ago."""
        return bool(self._model_limits)

    def get_limits(self) -> dict[str, int]:
        """The concurrency limits after 429s, by model."""
        return {model: int(limit.limit) for model, limit in self._model_limits.items()}

    def _update_healthy(self, now: float) -> None:
        """Update ``healthy``."""
        if self._model_limits:
            kept = {name: one for name, one in self._model_limits.items() if not one.is_over(now)}
            self._model_limits = kept
        self.healthy = not self._model_limits and self.get_state(now) == "up"


class HasHealth(Protocol):
    """Something with the health of a worker."""

    @property
    def health(self) -> WorkerHealth:
        """The worker's health."""

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""


HasHealthT = TypeVar("HasHealthT", bound=HasHealth)


def select_available(
    workers: Sequence[HasHealthT], now: float, panic: float, model: str = ""
) -> Sequence[HasHealthT]:
    """The available workers of a pool for ``model``: at least one, if there is any.

    If a smaller part than ``panic`` of them is available, health is ignored, except for workers in
    connect backoff. Those, and workers that answer 429 to a single request, are used only if there
    is no other.
    """
    for worker in workers:
        if not worker.health.healthy:
            break
    else:
        return workers
    available = [worker for worker in workers if worker.health.is_available(now)]
    if len(available) < panic * len(workers) or not available:
        return [worker for worker in workers if not worker.health.in_backoff(now)] or workers
    usable = [
        worker
        for worker in available
        if not worker.in_flight or worker.health.get_state(now) == "up"
    ]
    return (
        [worker for worker in usable if not worker.health.is_rate_limited(now, model)]
        or usable
        or available
    )


class _HealthCheckResults(Struct):
    """Consecutive results of health checks, and whether they take the worker out."""

    successes: int = 0
    failures: int = 0
    down: bool = False

    def record_failure(self, fall: int) -> None:
        self.successes = 0
        self.failures += 1
        self.down = self.down or self.failures >= fall

    def record_success(self, rise: int) -> bool:
        """Returns whether the worker is back."""
        self.failures = 0
        self.successes += 1
        returned = self.down and self.successes >= rise
        self.down = self.down and not returned
        return returned


class _ConnectBackoff(Struct):
    """Consecutive failed connects, and the end of the backoff."""

    failures: int = 0
    until: float = 0.0

    def record_failure(self, now: float) -> bool:
        """Returns whether this counts as a further failure."""
        if now < self.until:
            return False
        seconds = _FIRST_BACKOFF * 2.0 ** min(self.failures, _MAX_DOUBLINGS)
        self.until = now + min(seconds, _MAX_BACKOFF)
        self.failures += 1
        return True


class _OutlierEjection:
    """Outlier ejection by failed requests.

    ``ejected`` from the ejection until a request succeeds after it. Results of requests that were
    sent before the ejection are not counted. If all requests go to an ejected worker in panic,
    ``failures`` consecutive successes at least one ``window`` later bring it back as well.
    """

    def __init__(self, settings: CircuitBreakerSettings) -> None:
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
        """Count a failed connect in the failure rate, not among consecutive failures."""
        if self.ejected:
            return
        self._count_failure(now)
        if self._exceeds_failure_rate(now):
            self._eject(now)

    def record_success(self, now: float) -> bool:
        """Returns whether the worker is back."""
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
        """End the ejection."""
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
        limit = self._settings.failure_rate * count
        return count >= self._settings.min_requests and self._failures.count(now) >= limit

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
    """A concurrency limit that adapts to 429s (AIMD).

    A 429 lowers the limit by a factor; each response raises it by 1/limit, so that it stays just
    below the load at which the worker refuses.
    """

    limit: float = math.inf
    decreased_at: float = -math.inf
    grows_at: float = 0.0
    rate_limited_until: float = 0.0

    def decrease(self, now: float, retry_after: float, in_flight: int) -> None:
        resumes_at = now + max(_MIN_RATE_LIMIT_PAUSE, min(retry_after, _RATE_LIMIT_MEMORY))
        if in_flight <= 1:
            self.rate_limited_until = resumes_at
        if now < self.decreased_at + _MIN_RATE_LIMIT_PAUSE:
            return
        self.limit = max(1.0, min(in_flight, self.limit) * _LIMIT_DECREASE)
        self.decreased_at = now
        self.grows_at = resumes_at

    def increase(self, now: float) -> bool:
        """Returns whether there still is a limit."""
        if now < self.grows_at:
            return True
        self.limit += 1.0 / self.limit
        return now < self.decreased_at + _RATE_LIMIT_MEMORY

    def is_over(self, now: float) -> bool:
        """Whether the last 429 was long ago, so that nothing is known of the limit any more."""
        return now >= max(self.decreased_at + 2 * _RATE_LIMIT_MEMORY, self.rate_limited_until)
