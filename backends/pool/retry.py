"""Whether a request may be sent to another worker. Pure.

Generation changes nothing in the world, so a request may be sent again while its client has seen
nothing. Each worker is asked once at most. What it costs decides how often:

- A worker that can't be reached costs nothing: any number of them is passed over.
- One that has too much to do (429) costs little: all may be asked while the budget lasts, and the
  client hears of it when all have said so.
- For anything else another worker is asked ``max`` times at most, and within the budget, so that
  workers which all fail are not given more work for it.
- A request that two workers did not survive is not given to a third.
"""

from typing import Final, Literal, get_args

from msgspec import Struct, field

from backends.pool.circuit_breaker import SlidingWindowCounter
from backends.pool.metrics import PoolMetrics
from protocols.core.errors import (
    DeadlineExceeded,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    WorkerError,
    WorkerFailed,
    WorkerUnreachable,
)

# How many requests a pool may try again. Pure: the moment is a parameter, in seconds.
#
# When every worker fails, trying again is what keeps them down: each request would come twice. So
# what is tried again stays a small part of what is asked.


class RetryBudget:
    """In ``window`` seconds ``least`` tries, and beside them ``share`` of the requests asked."""

    def __init__(self, share: float = 0.2, least: int = 3, window: float = 10.0) -> None:
        self._share = share
        self._min_retries = least
        self._requests = SlidingWindowCounter(window)
        self.record_request = self._requests.add
        """To be told when a request is sent for the first time."""
        self._retries = SlidingWindowCounter(window)

    def allows_retry(self, now: float) -> bool:
        """Whether one more may be tried again; tell ``retried`` when it is."""
        most = self._min_retries + self._share * self._requests.count(now)
        return self._retries.count(now) + 1 <= most

    def record_retry(self, now: float) -> None:
        """A request was sent once more."""
        self._retries.add(now)


RetryReason = Literal["connect", "429", "500", "502", "503", "504", "before_first_token"]
"""``before_first_token``: it took the request, and was lost, fell silent, or began with an
error."""

_STATUS_REASONS: Final[dict[int, RetryReason]] = {500: "500", 502: "502", 503: "503", 504: "504"}
_DEFAULT_REASONS: Final[frozenset[RetryReason]] = frozenset(get_args(RetryReason))
_MAX_WORKERS_KILLED: Final = 2


class RetrySettings(Struct, frozen=True):
    """How often, and after what, another worker is asked.

    ``budget`` is the share of the requests of late that may be sent a second time.
    """

    max: int = 1
    budget: float = 0.2
    on: frozenset[RetryReason] = _DEFAULT_REASONS


def classify_error(error: GatewayError, *, accepted: bool) -> RetryReason | None:
    """What ``error`` is in the words of ``RetrySettings.on``; None if it is none of them.

    ``accepted``: the worker had begun an answer that looked good.
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
        case WorkerError() if accepted:
            return "before_first_token"
        case WorkerFailed(status=int() as status):
            return _STATUS_REASONS.get(status)
        case _:
            return None


class RetryState(Struct):
    """What was tried for one request: the keys of the workers, and what came of it."""

    settings: RetrySettings
    budget: RetryBudget
    tried: set[int] = field(default_factory=set[int])
    retries: int = 0
    """How often another worker was asked that counts."""
    workers_killed: int = 0
    """How many workers took the request and were lost, or fell silent."""
    min_retry_after: float | None = None
    """The shortest time after which a worker said that it could be asked again."""
    metrics: PoolMetrics = field(default_factory=PoolMetrics)

    def allows_retry(self, error: GatewayError, now: float, *, accepted: bool) -> bool:
        """Whether another worker may be asked after ``error``; nothing was passed on so far."""
        reason = classify_error(error, accepted=accepted)
        if reason is None or reason not in self.settings.on:
            return False
        if reason != "connect" and not self._spend_budget(error, now, counts=reason != "429"):
            return False
        self.metrics.retries[reason] += 1
        return True

    def _spend_budget(self, error: GatewayError, now: float, *, counts: bool) -> bool:
        """Whether one more may be asked that had work with it, or has: then it is noted."""
        if isinstance(error, StreamBroken | DeadlineExceeded):
            self.workers_killed += 1
        if self.workers_killed >= _MAX_WORKERS_KILLED or (
            counts and self.retries >= self.settings.max
        ):
            return False
        if not self.budget.allows_retry(now):
            self.metrics.exhausted += 1
            return False
        self.budget.record_retry(now)
        self.retries += counts
        return True

    def record_failure(self, key: int, error: GatewayError) -> None:
        """The worker of this key answered with ``error``."""
        self.tried.add(key)
        if isinstance(error, RateLimitExceeded | Overloaded) and error.retry_after is not None:
            known = self.min_retry_after
            self.min_retry_after = (
                error.retry_after if known is None else min(known, error.retry_after)
            )

    def get_final_error(self, error: GatewayError, *, left: bool) -> GatewayError:
        """What the client hears after ``error``, if no other worker is asked.

        ``left``: there are workers that were not. Of those which were, one may have had more to say
        than the last.
        """
        match error:
            case WorkerUnreachable():
                return Overloaded("no worker is available", retry_after=self.min_retry_after or 1.0)
            case RateLimitExceeded() if left and "429" in self.settings.on:
                return Overloaded(error.message, retry_after=self.min_retry_after or 1.0)
            case RateLimitExceeded() | Overloaded():
                error.retry_after = self.min_retry_after
                return error
            case _:
                return error
