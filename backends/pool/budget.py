"""How many requests a pool may try again. Pure: the moment is a parameter, in seconds.

When every worker fails, trying again is what keeps them down: each request would come twice. So
what is tried again stays a small part of what is asked.
"""

from backends.pool.smooth import SlidingWindowCounter


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
