"""Retries: whether a request may be sent to another worker. Pure.

Generation has no side effects, so a request may be retried until the client has received
something. Each worker gets at most one attempt. The cost of a failure limits the retries:

- A failed connect costs nothing: any number of workers is skipped.
- A 429 costs little: all workers may be tried within the budget; if all refuse, the client
  receives the 429.
- Any other failure allows ``max`` retries, within the budget, so that retries do not add load when
  all workers fail.
- A request that killed two workers is not sent to a third.

A fallback to another pool is no retry if that pool has other workers: it is sent to one of those.
If it has the same workers, the fallback is a retry within the same budget, at a worker that was
not tried. What a worker says of one model (see ``is_model_refusal``) is no failure of the worker:
a fallback to another model at the same URL is no retry.
"""

from typing import Final

from msgspec import Struct, field

from backends.interfaces import AttemptHistory
from backends.pool.circuit_breaker import SlidingWindowCounter
from backends.pool.metrics import PoolMetrics
from backends.pool.settings import RetryReason, RetrySettings
from protocols.core.errors import (
    DeadlineExceeded,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    UnknownFinishReason,
    WorkerError,
    WorkerFailed,
    WorkerModelNotFound,
    WorkerUnreachable,
)

# The retry budget of a set of workers. Time is a parameter, in seconds.
#
# If every worker fails, retries would double the load and keep the workers down. The budget keeps
# retries a small part of all requests.


class RetryCounters:
    """The recent requests and retries of one set of workers."""

    def __init__(self, window: float = 10.0) -> None:
        """Recent is the last ``window`` seconds."""
        self.requests = SlidingWindowCounter(window)
        self.retries = SlidingWindowCounter(window)


class RetryBudget:
    """Allows ``min_retries`` retries in ``window`` seconds, plus ``share`` of the requests."""

    def __init__(
        self,
        share: float = 0.2,
        min_retries: int = 3,
        window: float = 10.0,
        *,
        counters: RetryCounters | None = None,
    ) -> None:
        """``window`` is that of ``counters``, if they are given."""
        self._share = share
        self._min_retries = min_retries
        self._counters = counters or RetryCounters(window)
        self._requests, self._retries = self._counters.requests, self._counters.retries
        self.record_request = self._requests.add
        """Record the first attempt of a request, at a time."""

    def allows_retry(self, now: float) -> bool:
        """Whether one more retry is allowed; call ``record_retry`` when it is sent."""
        limit = self._min_retries + self._share * self._requests.count(now)
        return self._retries.count(now) + 1 <= limit

    def record_retry(self, now: float) -> None:
        """Record a retry."""
        self._retries.add(now)


_STATUS_REASONS: Final[dict[int, RetryReason]] = {500: "500", 502: "502", 503: "503", 504: "504"}
_MAX_WORKERS_KILLED: Final = 2


def is_model_refusal(error: GatewayError) -> bool:
    """Whether a worker refused one model only: 429, 503, 529, or it does not know the model."""
    return isinstance(error, RateLimitExceeded | Overloaded | WorkerModelNotFound)


def classify_error(error: GatewayError, *, accepted: bool) -> RetryReason | None:
    """The reason for a retry, as in ``RetrySettings.on``; None if ``error`` is not retryable.

    ``accepted``: the worker had sent status 200.
    """
    match error:
        case WorkerUnreachable():
            return "connect"
        case RateLimitExceeded():
            return "429"
        case Overloaded():
            return "503"
        case StreamBroken() | DeadlineExceeded(phase="first_token"):
            return "before_first_token"
        case UnknownFinishReason():
            return None  # the answer is whole: another worker would only say the same again
        case WorkerError() if accepted:
            return "before_first_token"
        case WorkerFailed(status=int() as status):
            return _STATUS_REASONS.get(status)
        case _:
            return None


class RetryState(Struct):
    """The attempts of one request: the keys of the workers, and their outcomes."""

    settings: RetrySettings
    budget: RetryBudget
    tried: set[int] = field(default_factory=set[int])
    retries: int = 0
    """Retries that count against ``max``."""
    workers_killed: int = 0
    """Workers that accepted the request, then broke the stream or timed out."""
    min_retry_after: float | None = None
    """The shortest Retry-After of the workers, in seconds."""
    metrics: PoolMetrics = field(default_factory=PoolMetrics)
    history: AttemptHistory = field(default_factory=AttemptHistory)
    """The failures of the request in all pools."""
    has_failed_worker: bool = False
    """Whether a worker of this pool failed, and not only refused the model."""

    def allows_retry(self, error: GatewayError, now: float, *, accepted: bool) -> bool:
        """Whether to retry after ``error``. Nothing was sent to the client yet."""
        reason = classify_error(error, accepted=accepted)
        if reason is None or reason not in self.settings.on:
            return False
        if reason != "connect" and not self._spend_budget(error, now, counts=reason != "429"):
            return False
        self.metrics.retries[reason] += 1
        return True

    def _spend_budget(self, error: GatewayError, now: float, *, counts: bool) -> bool:
        """Take one retry from the budget; returns whether that was possible."""
        if isinstance(error, StreamBroken | DeadlineExceeded):
            self.workers_killed += 1
        if self.workers_killed >= _MAX_WORKERS_KILLED or (
            counts and self.retries >= self.settings.max
        ):
            return False
        if not self._take_from_budget(now):
            return False
        self.retries += counts
        return True

    def allows_fallback(self, now: float) -> bool:
        """Whether a request that failed in another pool may be sent to the same workers here."""
        if self.workers_killed >= _MAX_WORKERS_KILLED or not self._take_from_budget(now):
            return False
        self.metrics.retries["fallback"] += 1
        return True

    def _take_from_budget(self, now: float) -> bool:
        if not self.budget.allows_retry(now):
            self.metrics.exhausted += 1
            return False
        self.budget.record_retry(now)
        return True

    def record_failure(self, key: int, error: GatewayError) -> None:
        """Record that the attempt at this worker failed with ``error``."""
        self.tried.add(key)
        self.has_failed_worker |= not is_model_refusal(error)
        if isinstance(error, RateLimitExceeded | Overloaded) and error.retry_after is not None:
            shortest = self.min_retry_after
            self.min_retry_after = (
                error.retry_after if shortest is None else min(shortest, error.retry_after)
            )

    def get_final_error(self, error: GatewayError, *, has_untried: bool) -> GatewayError:
        """The error for the client if the request is not retried.

        ``has_untried``: some workers were not tried. Retry-After is the shortest of all attempts.
        """
        match error:
            case WorkerUnreachable():
                return Overloaded("no worker is available", retry_after=self.min_retry_after or 1.0)
            case RateLimitExceeded() if has_untried and "429" in self.settings.on:
                return Overloaded(error.message, retry_after=self.min_retry_after or 1.0)
            case RateLimitExceeded() | Overloaded():
                error.retry_after = self.min_retry_after
                return error
            case _:
                return error
