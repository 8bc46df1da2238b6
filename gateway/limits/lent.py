"""What is counted of limits that several gateways share: each uses what it was lent. Pure.

What was not used for a while is not asked for. The first request after that is admitted by what
one loan would be, and told of with the next asking, which comes at once.

While the lender fails, its policy holds: ``open`` admits everything, ``closed`` nothing, and
``local`` what this process's own part of the limit allows.
"""

import math
from collections.abc import Callable
from typing import Final, Protocol

from msgspec import Struct

from gateway.limits.counters import (
    MIN_RETRY_AFTER,
    NEVER_AVAILABLE,
    BucketState,
    ConcurrencyLimit,
    DailyBudget,
    LimitCounter,
    LimitScope,
    TokenBucket,
)
from gateway.limits.ports import LeaseGrant, LeaseRequest, SharedLimit, StoreFailurePolicy
from protocols.core.interfaces import RateLimitStatus

RATE_LEASE_SHARE: Final = 0.5
"""A loan is this much of a process's part of a rate, or of the requests at a time;"""
DAILY_LEASE_SHARE: Final = 0.01
"""and this much of a whole day's budget. What is wanted more is asked for as it is used."""
RENEW_BEFORE: Final = 1.0
"""A loan is asked for again so many seconds before it ends;"""
LEASE_IDLE_TIMEOUT: Final = 10.0
"""but not where nothing was asked of it for so many. A large request's wish is kept as long."""


class Lease:
    """What is held of one limit, and used of it: all that outlives a configuration."""

    __slots__ = (
        "__weakref__",
        "available",
        "available_at_request",
        "changed_at",
        "expires_at",
        "largest_request",
        "largest_request_at",
        "leased",
        "local_state",
        "requested",
        "retry_after",
        "store_failed",
        "used_at",
    )

    def __init__(self) -> None:
        self.available = 0
        """What may be used; below 0 more was. Of slots, how many there are."""
        self.leased = 0
        """What ``level`` would be if nothing had been used since the last answer."""
        self.available_at_request = 0
        """What ``level`` was when the lender was asked last,"""
        self.requested = 0
        """and what it was asked for."""
        self.expires_at = -math.inf
        """When it ends."""
        self.used_at = -math.inf
        """When a request last wanted something."""
        self.largest_request = 0
        """What one request wanted at most, where that is more than a loan,"""
        self.largest_request_at = -math.inf
        """and when."""
        self.retry_after = MIN_RETRY_AFTER
        self.store_failed = False
        """Whether the lender did, when it was asked last."""
        self.changed_at = -math.inf
        """Since when that is so."""
        self.local_state = BucketState()
        """What is used of the process's own part, and its slots in use."""

    def apply_grant(self, grant: LeaseGrant, asked: float, now: float) -> None:
        """It holds from when it was asked for."""
        self.expires_at = asked + grant.seconds
        self.retry_after = (
            max(grant.retry_after, MIN_RETRY_AFTER)
            if grant.amount < self.requested
            else MIN_RETRY_AFTER
        )
        if self.store_failed:
            self.store_failed, self.changed_at = False, now

    def record_store_failure(self, now: float) -> None:
        """The lender did."""
        if not self.store_failed:
            self.store_failed, self.changed_at = True, now
        self.expire()

    def expire(self) -> None:
        """What is held is void; what was used is still to be told."""
        self.expires_at = -math.inf
        self.leased -= max(self.available, 0)
        self.available = min(self.available, 0)


class LeasedCounter(LimitCounter, Protocol):
    """A counter of what was lent."""

    def build_lease_request(self, now: float, *, last: bool = False) -> LeaseRequest | None:
        """What to ask of the lender; None where that is nothing.

        With ``last`` nothing is to be held any more.
        """

    def apply_grant(self, grant: LeaseGrant, asked: float, now: float) -> None:
        """The answer to what was asked at that time."""

    def revoke_lease(self, now: float) -> None:
        """The lender failed: nothing is lent any more."""


class LeaseTerms(Struct, frozen=True):
    """What a counter is to know beside its limit. ``wake``: have the lender asked at once."""

    name: str
    limit: SharedLimit
    description: str
    policy: StoreFailurePolicy
    wake: Callable[[], object]


class LeasedBucket:
    """Of a rate, or of a day's budget. A budget's own part counts all that this process uses."""

    __slots__ = (
        "_by_token",
        "_is_daily",
        "_lease",
        "_lease_size",
        "_terms",
        "amount",
        "description",
        "local_counter",
        "scope",
    )

    def __init__(self, terms: LeaseTerms, own: TokenBucket | DailyBudget, loan: Lease) -> None:
        """``own`` is this process's part of the limit, as a counter."""
        self.scope: LimitScope = own.scope
        self.amount = own.amount
        self.description = terms.description
        self.local_counter = own
        limit = terms.limit
        self._by_token = own.scope != "requests"
        self._is_daily = limit.kind == "day"
        size = limit.amount * DAILY_LEASE_SHARE if self._is_daily else own.amount * RATE_LEASE_SHARE
        self._lease_size = min(math.ceil(size), own.amount)
        self._lease = loan
        self._terms = terms

    def reserve(self, weight: int, now: float) -> float:
        """See ``Counter``."""
        loan, amount = self._lease, weight if self._by_token else 1
        loan.used_at = now
        if loan.store_failed:
            return self._reserve_locally(weight, now)
        live = now < loan.expires_at
        if not live:
            loan.expire()
        left = loan.available - amount
        if amount > self._lease_size and amount >= loan.largest_request:
            loan.largest_request, loan.largest_request_at = amount, now
        if left < 0 or not live:
            self._terms.wake()
            if left < (0 if live else -self._lease_size):
                return loan.retry_after
        loan.available = left
        if self._is_daily:
            self.local_counter.return_unused(-amount, now, now)
        return 0.0

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``Counter``."""
        if self._by_token:
            self._return_unused(weight - used, at, now)

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """See ``Counter``."""
        self._return_unused(weight if self._by_token else 1, at, now)

    def get_status(self, now: float) -> RateLimitStatus:
        """See ``Counter``. Told is what this process holds."""
        loan = self._lease
        if loan.store_failed:
            return self.local_counter.get_status(now)
        return RateLimitStatus(self._terms.limit.amount, max(loan.available, 0), loan.retry_after)

    def build_lease_request(self, now: float, *, last: bool = False) -> LeaseRequest | None:
        """See ``Lent``."""
        loan = self._lease
        if now >= loan.expires_at:
            loan.expire()
        used, held = loan.leased - loan.available, max(loan.available, 0)
        if now - loan.largest_request_at > LEASE_IDLE_TIMEOUT:
            loan.largest_request = 0
        most = 0 if last else max(self._lease_size, 2 * used, loan.largest_request)
        target = min(most, self.amount)
        wanted = (
            target - held if 2 * held < target or held < min(loan.largest_request, target) else 0
        )
        excess = max(held - 2 * target, 0)
        idle = now - loan.used_at > LEASE_IDLE_TIMEOUT and not used
        if not last and (
            idle or (not wanted and not excess and loan.expires_at - now > RENEW_BEFORE)
        ):
            return None
        loan.available -= excess
        loan.leased -= excess
        loan.available_at_request, loan.requested = loan.available, wanted
        return LeaseRequest(self._terms.name, self._terms.limit, wanted, held - excess, used)

    def apply_grant(self, grant: LeaseGrant, asked: float, now: float) -> None:
        """See ``Lent``."""
        loan = self._lease
        loan.apply_grant(grant, asked, now)
        loan.available += grant.amount - min(loan.available_at_request, 0)
        loan.leased = max(loan.available_at_request, 0) + grant.amount

    def revoke_lease(self, now: float) -> None:
        """See ``Lent``."""
        self._lease.record_store_failure(now)

    def _reserve_locally(self, weight: int, now: float) -> float:
        policy = self._terms.policy
        if policy == "closed":
            return NEVER_AVAILABLE
        if policy == "local" and (wait := self.local_counter.reserve(weight, now)):
            return wait
        if self._is_daily:
            self._lease.available -= weight
            if policy == "open":
                self.local_counter.return_unused(-weight, now, now)
        return 0.0

    def _return_unused(self, amount: int, at: float, now: float) -> None:
        """Give back to where it was taken from.

        What a rate's part gave while the lender failed was never told of. All else is.
        """
        loan = self._lease
        same = at >= loan.changed_at
        if same and (self._is_daily or not loan.store_failed):
            loan.available += amount
        elif self._is_daily or (loan.store_failed and not same):
            loan.leased -= amount
        if self._is_daily or (loan.store_failed and same):
            self.local_counter.return_unused(amount, at, now)


class LeasedSlots:
    """So many requests at a time. The own part counts all that this process uses."""

    __slots__ = (
        "_lease",
        "_lease_size",
        "_local_counter",
        "_terms",
        "amount",
        "description",
        "scope",
    )

    def __init__(self, terms: LeaseTerms, own: ConcurrencyLimit, loan: Lease) -> None:
        """``own`` is this process's part of the limit, as a counter."""
        self.scope: LimitScope = own.scope
        self.amount = own.amount
        self.description = terms.description
        self._local_counter = own
        self._lease_size = math.ceil(own.amount * RATE_LEASE_SHARE)
        self._lease = loan
        self._terms = terms

    def reserve(self, weight: int, now: float) -> float:
        """See ``Counter``."""
        loan, spent = self._lease, self._lease.local_state
        loan.used_at = now
        if loan.store_failed:
            return self._reserve_locally(weight, now)
        live = now < loan.expires_at
        if not live or spent.slots_in_use >= loan.available:
            self._terms.wake()
            if spent.slots_in_use >= (loan.available if live else self._lease_size):
                return MIN_RETRY_AFTER
        spent.slots_in_use += 1
        return 0.0

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``Counter``."""
        self._local_counter.settle(weight, used, at, now)

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """See ``Counter``."""
        self._local_counter.cancel_reservation(weight, at, now)

    def get_status(self, now: float) -> RateLimitStatus:
        """See ``Counter``. Told is what this process holds."""
        loan = self._lease
        if loan.store_failed:
            return self._local_counter.get_status(now)
        return RateLimitStatus(
            self._terms.limit.amount, max(loan.available - loan.local_state.slots_in_use, 0), 0.0
        )

    def build_lease_request(self, now: float, *, last: bool = False) -> LeaseRequest | None:
        """See ``Lent``."""
        loan, limit = self._lease, self._terms.limit
        if now >= loan.expires_at:
            loan.expire()
        used = 0 if last else loan.local_state.slots_in_use
        wanted = 0 if last else min(used + self._lease_size, max(limit.amount, used))
        idle = now - loan.used_at > LEASE_IDLE_TIMEOUT and not used
        if not last and (
            idle or (wanted == loan.available and loan.expires_at - now > RENEW_BEFORE)
        ):
            return None
        return LeaseRequest(self._terms.name, limit, wanted, used)

    def apply_grant(self, grant: LeaseGrant, asked: float, now: float) -> None:
        """See ``Lent``."""
        self._lease.apply_grant(grant, asked, now)
        self._lease.available = grant.amount

    def revoke_lease(self, now: float) -> None:
        """See ``Lent``."""
        self._lease.record_store_failure(now)

    def _reserve_locally(self, weight: int, now: float) -> float:
        policy = self._terms.policy
        if policy == "closed":
            return NEVER_AVAILABLE
        if policy == "local":
            return self._local_counter.reserve(weight, now)
        self._lease.local_state.slots_in_use += 1
        return 0.0
