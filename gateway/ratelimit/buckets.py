"""Counters of one limit each: token buckets, daily budgets, concurrency limits. Pure.

Time is passed in: ``now`` is in seconds of a monotonic clock. Nothing here waits or locks: one
thread calls it, and each call is a few steps of arithmetic.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol

from protocols.core.interfaces import RateLimitStatus

LimitScope = Literal["requests", "tokens", "concurrency", "budget"]
TOKEN_SCOPES: Final[Sequence[LimitScope]] = ("tokens", "budget")
"""The scopes that count a request's tokens."""
SECONDS_PER_DAY: Final = 86400
MIN_RETRY_AFTER: Final = 1.0
"""Seconds until a retry, if no better number is known."""
NEVER_AVAILABLE: Final = math.inf
"""Instead of seconds to wait: the limit can't be checked."""


class LimitCounter(Protocol):
    """One limit and its usage."""

    scope: LimitScope
    amount: int
    """The limit, as a number."""
    description: str
    """The limit in words; the constructors' ``of`` is appended to it."""

    def reserve(self, weight: int, now: float) -> float:
        """Take what a request may use. Returns 0.0, or the seconds to wait if too little is left.

        ``weight`` is in tokens, at most ``amount``. If too little is left, nothing is taken.
        """

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """A request that reserved ``weight`` ``at`` this time has ended and ``used`` tokens."""

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """A request that reserved its part was rejected by another limit."""

    def get_status(self, now: float) -> RateLimitStatus:
        """How much is left."""


class BucketState:
    """The usage of a limit, which outlives the configuration.

    It holds what is used, not what is left, so that it stays valid for a changed limit.
    """

    __slots__ = ("__weakref__", "day", "slots_in_use", "spent_today", "used", "used_at")

    def __init__(self) -> None:
        self.used = 0.0
        """Used of a rate, at the time ``used_at``."""
        self.used_at = 0.0
        self.spent_today = 0
        """Tokens used on the ``day``, which is counted from 1970."""
        self.day = 0
        self.slots_in_use = 0
        """Requests running now."""


class TokenBucket:
    """A token bucket: ``amount`` per ``period`` in seconds, refilled continuously.

    ``by_token``: a request takes its tokens; otherwise it takes 1. Tokens used beyond the
    reservation are a debt that later requests have to wait for.
    """

    __slots__ = ("_by_token", "_per_second", "_state", "amount", "description", "scope")

    def __init__(
        self, amount: int, period: float, spent: BucketState, *, by_token: bool, of: str = ""
    ) -> None:
        self.scope: LimitScope = "tokens" if by_token else "requests"
        self.amount = amount
        self.description = f"{_format_amount(amount, self.scope)} in {period:g} s{of}"
        self._per_second = amount / period
        self._by_token = by_token
        self._state = spent

    def reserve(self, weight: int, now: float) -> float:
        """See ``LimitCounter``."""
        spent = self._state
        used = spent.used - (now - spent.used_at) * self._per_second
        used = (used if used > 0 else 0.0) + (weight if self._by_token else 1)
        if used > self.amount:
            return (used - self.amount) / self._per_second
        spent.used, spent.used_at = used, now
        return 0.0

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``LimitCounter``."""
        if self._by_token:
            self.return_unused(weight - used, at, now)

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """See ``LimitCounter``."""
        self.return_unused(weight if self._by_token else 1, at, now)

    def return_unused(self, amount: int, at: float, now: float) -> None:
        """Give back ``amount`` of what was taken ``at`` this time; below 0, take more."""
        del at
        spent = self._state
        used = spent.used - (now - spent.used_at) * self._per_second
        used = (used if used > 0 else 0.0) - amount
        spent.used, spent.used_at = used if used > 0 else 0.0, now

    def get_status(self, now: float) -> RateLimitStatus:
        """See ``LimitCounter``."""
        spent, per_second, amount = self._state, self._per_second, self.amount
        used = spent.used - (now - spent.used_at) * per_second
        if used <= 0.0:
            return RateLimitStatus(amount, amount, 0.0)
        return RateLimitStatus(
            amount, int(amount - used) if used < amount else 0, used / per_second
        )


class DailyBudget:
    """A number of tokens per day, from 00:00 UTC. ``unix`` returns Unix seconds."""

    __slots__ = ("_day_ends_at", "_state", "_unix_time", "amount", "description", "scope")

    def __init__(
        self, amount: int, spent: BucketState, unix: Callable[[], float], *, of: str = ""
    ) -> None:
        self.scope: LimitScope = "budget"
        self.amount = amount
        self.description = f"{_format_amount(amount, 'tokens')} a day{of}"
        self._state = spent
        self._unix_time = unix
        self._day_ends_at = 0.0
        """The end of the day of the last call, in Unix seconds."""

    @property
    def spent_today(self) -> int:
        """Tokens used today, with the reservations of running requests."""
        self._start_new_day()
        return self._state.spent_today

    def reserve(self, weight: int, now: float) -> float:
        """See ``LimitCounter``."""
        del now
        remaining = self._start_new_day()
        spent = self._state
        if spent.spent_today + weight > self.amount:
            return remaining
        spent.spent_today += weight
        return 0.0

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``LimitCounter``."""
        self.return_unused(weight - used, at, now)

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """See ``LimitCounter``."""
        self.return_unused(weight, at, now)

    def return_unused(self, amount: int, at: float, now: float) -> None:
        """As ``TokenBucket.return_unused``; what was taken yesterday is not given back today."""
        remaining = self._start_new_day()
        if now - at <= SECONDS_PER_DAY - remaining:
            self._state.spent_today = max(self._state.spent_today - amount, 0)

    def get_status(self, now: float) -> RateLimitStatus:
        """See ``LimitCounter``."""
        del now
        remaining = self._start_new_day()
        return RateLimitStatus(
            self.amount, max(self.amount - self._state.spent_today, 0), remaining
        )

    def _start_new_day(self) -> float:
        """Begin a new day if it is one. Returns the seconds left of the day."""
        now = self._unix_time()
        if not self._day_ends_at - SECONDS_PER_DAY <= now < self._day_ends_at:
            day = int(now // SECONDS_PER_DAY)
            self._day_ends_at = float((day + 1) * SECONDS_PER_DAY)
            if day != self._state.day:
                self._state.day, self._state.spent_today = day, 0
        return self._day_ends_at - now


class ConcurrencyLimit:
    """A number of requests at a time."""

    __slots__ = ("_state", "amount", "description", "scope")

    def __init__(self, amount: int, spent: BucketState, *, of: str = "") -> None:
        self.scope: LimitScope = "concurrency"
        self.amount = amount
        self.description = f"{_format_amount(amount, 'requests')} at a time{of}"
        self._state = spent

    def reserve(self, weight: int, now: float) -> float:
        """See ``LimitCounter``."""
        del weight, now
        if self._state.slots_in_use >= self.amount:
            return MIN_RETRY_AFTER
        self._state.slots_in_use += 1
        return 0.0

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``LimitCounter``."""
        del weight, used, at, now
        self._state.slots_in_use -= 1

    def reserve_slots(self, count: int, now: float) -> float:
        """Take more slots for a request that has one. Returns 0.0, or the seconds to wait."""
        del now
        if self._state.slots_in_use + count > self.amount:
            return MIN_RETRY_AFTER
        self._state.slots_in_use += count
        return 0.0

    def release_slots(self, count: int) -> None:
        """Give back slots of ``reserve_slots``."""
        self._state.slots_in_use -= count

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """See ``LimitCounter``."""
        self.settle(weight, 0, at, now)

    def get_status(self, now: float) -> RateLimitStatus:
        """See ``LimitCounter``."""
        del now
        return RateLimitStatus(self.amount, max(self.amount - self._state.slots_in_use, 0), 0.0)


def _format_amount(amount: int, unit: str) -> str:
    return f"{amount} {unit if amount > 1 else unit.removesuffix('s')}"
