"""What is counted, one limit each: a rate, a day's budget, or how many at a time. Pure.

Time is passed in: ``now`` is in seconds that only grow. Nothing here waits or locks: one thread
calls it, and it does a few steps of arithmetic.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol

from protocols.core.interfaces import RateLimitStatus

LimitScope = Literal["requests", "tokens", "concurrency", "budget"]
TOKEN_SCOPES: Final[Sequence[LimitScope]] = ("tokens", "budget")
"""Those that a request's tokens are taken of."""
SECONDS_PER_DAY: Final = 86400
"""Seconds."""
MIN_RETRY_AFTER: Final = 1.0
"""Seconds after which a request should be sent again, where nobody knows better."""
NEVER_AVAILABLE: Final = math.inf
"""In the place of seconds to wait: nobody knows, since the limit can't be checked."""


class LimitCounter(Protocol):
    """One limit, and what is used of it."""

    scope: LimitScope
    amount: int
    """How much there is at most."""
    description: str
    """The limit, in words; the constructors' ``of`` says of what."""

    def reserve(self, weight: int, now: float) -> float:
        """Take a request's part: 0.0 where it was there; else in how many seconds it may be.

        ``weight`` is in tokens, at most ``amount``. Nothing is taken where it was not there.
        """

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """A request that took its part ``at`` that time is over; it used so many tokens."""

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """A request that took its part was not admitted after all."""

    def get_status(self, now: float) -> RateLimitStatus:
        """How much is left."""


class BucketState:
    """What is used of a rate or of a day: all that outlives a configuration.

    It is kept as what is used, and not as what is left, so that it stays true of another limit.
    """

    __slots__ = ("__weakref__", "day", "slots_in_use", "spent_today", "used", "used_at")

    def __init__(self) -> None:
        self.used = 0.0
        """Of a rate, as it was at ``used_at``."""
        self.used_at = 0.0
        self.spent_today = 0
        """On the ``day``, which is counted from 1970."""
        self.day = 0
        self.slots_in_use = 0
        """In use now."""


class TokenBucket:
    """So much in each period, and no more than that at once: it comes back bit by bit.

    ``by_token``: a request takes its tokens; else it takes 1. Tokens that were used beyond what was
    taken are owed, and held against those who come next.
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
        """See ``Counter``."""
        spent = self._state
        used = spent.used - (now - spent.used_at) * self._per_second
        used = (used if used > 0 else 0.0) + (weight if self._by_token else 1)
        if used > self.amount:
            return (used - self.amount) / self._per_second
        spent.used, spent.used_at = used, now
        return 0.0

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``Counter``."""
        if self._by_token:
            self.return_unused(weight - used, at, now)

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """See ``Counter``."""
        self.return_unused(weight if self._by_token else 1, at, now)

    def return_unused(self, amount: int, at: float, now: float) -> None:
        """So much of what was taken ``at`` that time was not used; below 0, more was."""
        del at
        spent = self._state
        used = spent.used - (now - spent.used_at) * self._per_second
        used = (used if used > 0 else 0.0) - amount
        spent.used, spent.used_at = used if used > 0 else 0.0, now

    def get_status(self, now: float) -> RateLimitStatus:
        """See ``Counter``."""
        spent = self._state
        used = max(spent.used - (now - spent.used_at) * self._per_second, 0.0)
        return RateLimitStatus(
            self.amount, max(int(self.amount - used), 0), used / self._per_second
        )


class DailyBudget:
    """So many tokens between 00:00 UTC and the next. ``unix`` gives Unix seconds."""

    __slots__ = ("_state", "_unix_time", "amount", "description", "scope")

    def __init__(
        self, amount: int, spent: BucketState, unix: Callable[[], float], *, of: str = ""
    ) -> None:
        self.scope: LimitScope = "budget"
        self.amount = amount
        self.description = f"{_format_amount(amount, 'tokens')} a day{of}"
        self._state = spent
        self._unix_time = unix

    @property
    def spent_today(self) -> int:
        """Today, with what running requests may use."""
        self._start_new_day()
        return self._state.spent_today

    def reserve(self, weight: int, now: float) -> float:
        """See ``Counter``."""
        del now
        left = self._start_new_day()
        spent = self._state
        if spent.spent_today + weight > self.amount:
            return left
        spent.spent_today += weight
        return 0.0

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``Counter``."""
        self.return_unused(weight - used, at, now)

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """See ``Counter``."""
        self.return_unused(weight, at, now)

    def return_unused(self, amount: int, at: float, now: float) -> None:
        """As that of a rate. What was taken yesterday is yesterday's."""
        left = self._start_new_day()
        if now - at <= SECONDS_PER_DAY - left:
            self._state.spent_today = max(self._state.spent_today - amount, 0)

    def get_status(self, now: float) -> RateLimitStatus:
        """See ``Counter``."""
        del now
        left = self._start_new_day()
        return RateLimitStatus(self.amount, max(self.amount - self._state.spent_today, 0), left)

    def _start_new_day(self) -> float:
        """Begin a new day if it is one; gives the seconds that are left of it."""
        day, seconds = divmod(self._unix_time(), SECONDS_PER_DAY)
        if day != self._state.day:
            self._state.day, self._state.spent_today = int(day), 0
        return SECONDS_PER_DAY - seconds


class ConcurrencyLimit:
    """So many at a time."""

    __slots__ = ("_state", "amount", "description", "scope")

    def __init__(self, amount: int, spent: BucketState, *, of: str = "") -> None:
        self.scope: LimitScope = "concurrency"
        self.amount = amount
        self.description = f"{_format_amount(amount, 'requests')} at a time{of}"
        self._state = spent

    def reserve(self, weight: int, now: float) -> float:
        """See ``Counter``."""
        del weight, now
        if self._state.slots_in_use >= self.amount:
            return MIN_RETRY_AFTER
        self._state.slots_in_use += 1
        return 0.0

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``Counter``."""
        del weight, used, at, now
        self._state.slots_in_use -= 1

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """See ``Counter``."""
        self.settle(weight, 0, at, now)

    def get_status(self, now: float) -> RateLimitStatus:
        """See ``Counter``."""
        del now
        return RateLimitStatus(self.amount, max(self.amount - self._state.slots_in_use, 0), 0.0)


def _format_amount(amount: int, what: str) -> str:
    return f"{amount} {what if amount > 1 else what.removesuffix('s')}"
