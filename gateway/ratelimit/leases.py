"""Limits shared by several gateways: each process leases parts of them from a store in Redis.

A request is admitted within the leases of this process, without waiting. A background task renews
leases before they are used up, at most every 250 ms. A limit that was not used for
a while is not leased; the first request after that may use up to one lease, which is requested at
once.

While the store fails, all leases are void and its policy applies: ``open`` admits everything,
``closed`` nothing, and ``local`` what this process's part of each limit allows. Usage of leases
before the failure counts against that part, and usage during the failure is reported to the store
afterwards: a key gets no new allowance when a failure begins or ends.

What must never happen:

- A request that waits for the store, or an error of the store that a client sees as its own.
- More admitted by all processes together than the limit and one lease of each: the store counts
  what is leased as used, until it is given back or expires.
- Usage that is reported twice or not at all: it is counted from the last grant that arrived.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Literal, Protocol

from msgspec import Struct

from gateway.config.schema import StoreFailurePolicy
from gateway.ratelimit.buckets import (
    MIN_RETRY_AFTER,
    NEVER_AVAILABLE,
    BucketState,
    ConcurrencyLimit,
    DailyBudget,
    LimitCounter,
    LimitScope,
    TokenBucket,
)
from protocols.core.interfaces import Clock, RateLimitStatus

LimitKind = Literal["rate", "day", "slots"]
"""``rate``: a token bucket. ``day``: an amount per day from 00:00 UTC. ``slots``: concurrency."""


class SharedLimit(Struct, frozen=True):
    """A limit of all processes. ``period`` is in seconds: 86400 for ``day``, 0 for ``slots``."""

    kind: LimitKind
    amount: int
    period: float


class LeaseRequest(Struct, frozen=True):
    """A process's request for a lease of the limit called ``name``.

    For ``rate`` and ``day``: ``requested`` is the most it wants in addition. ``retained`` is what
    it keeps, unused, of earlier leases. ``used`` is what it used since the last grant; a request's
    tokens are known at its end, so that this may be negative, or more than was leased. The store
    reclaims leased amounts that are neither retained nor used. So a process returns an amount by
    retaining less, a lost reply costs nothing, and the first request after a failure (retained 0)
    restores the correct state.

    For ``slots``: ``requested`` is how many this process is to have in all, never fewer than it
    uses; ``retained`` is how many it uses, ``used`` is 0.
    """

    name: str
    limit: SharedLimit
    requested: int
    retained: int = 0
    used: int = 0


class LeaseGrant(Struct, frozen=True):
    """The reply to a lease request.

    For ``rate`` and ``day``: ``amount`` is how much more may be used, from 0 to what was requested.
    For ``slots``: how many slots the process has in all; it keeps those that it had and requests.

    It is valid for ``seconds`` (at least 2) from the request, as are all earlier leases of this
    limit; the store takes back what is unused by then. ``retry_after``: the seconds until more may
    be available, if less was granted than requested.
    """

    amount: int
    seconds: float
    retry_after: float = 1.0


class LeaseStoreUnavailable(Exception):
    """The store can't be reached now, or did not reply in time.

    The usage since the last grant has to be reported again.
    """


class LeaseStore(Protocol):
    """Counts what all processes together have used."""

    policy: StoreFailurePolicy
    replicas: int
    """How many processes share the limits; each has its part while the store fails."""

    async def request_leases(self, requests: Sequence[LeaseRequest]) -> Sequence[LeaseGrant]:
        """One grant for each request, in their order.

        Raises LeaseStoreUnavailable, at the latest after 250 ms without a reply.
        """


RATE_LEASE_SHARE: Final = 0.5
"""A lease is this share of a process's part of a rate or of a concurrency limit."""
DAILY_LEASE_SHARE: Final = 0.01
"""A lease is this share of a daily budget."""
RENEW_BEFORE: Final = 1.0
"""A lease is renewed so many seconds before it expires."""
LEASE_IDLE_TIMEOUT: Final = 10.0
"""A lease is not renewed after so many seconds without a request. The size of a large request is
remembered as long."""


class Lease:
    """What a process has leased and used of one limit, which outlives the configuration."""

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
        "local_used_at_failure",
        "requested",
        "retry_after",
        "store_failed",
        "used_at",
    )

    def __init__(self) -> None:
        self.available = 0
        """What may be used; below 0 after overuse. For slots: how many there are."""
        self.leased = 0
        """``available`` as it would be without the usage since the last grant."""
        self.available_at_request = 0
        """``available`` at the last lease request."""
        self.requested = 0
        """What was requested then."""
        self.expires_at = -math.inf
        self.used_at = -math.inf
        """When a request last reserved something."""
        self.largest_request = 0
        """The largest recent reservation, if it was more than a lease."""
        self.largest_request_at = -math.inf
        self.retry_after = MIN_RETRY_AFTER
        self.store_failed = False
        """Whether the store failed at the last lease request."""
        self.changed_at = -math.inf
        """When ``store_failed`` last changed."""
        self.local_state = BucketState()
        """The usage of the process's own part, and its slots in use."""
        self.local_used_at_failure = 0.0
        """Used of the own part of a rate when the store began to fail."""

    def __repr__(self) -> str:
        store = ", store failed" if self.store_failed else ""
        return f"<Lease {self.available} of {self.leased} available{store}>"

    def apply_grant(self, grant: LeaseGrant, requested_at: float, now: float) -> None:
        """Apply a grant, which is valid from the time of its request."""
        self.expires_at = requested_at + grant.seconds
        self.retry_after = (
            max(grant.retry_after, MIN_RETRY_AFTER)
            if grant.amount < self.requested
            else MIN_RETRY_AFTER
        )
        if self.store_failed:
            self.store_failed, self.changed_at = False, now

    def record_store_failure(self, now: float) -> None:
        """The store failed."""
        if not self.store_failed:
            self.store_failed, self.changed_at = True, now
        self.expire()

    def expire(self) -> None:
        """Drop what is leased and unused; the usage is still to be reported."""
        self.expires_at = -math.inf
        self.leased -= max(self.available, 0)
        self.available = min(self.available, 0)


class LeasedCounter(LimitCounter, Protocol):
    """A counter of a shared limit."""

    def build_lease_request(self, now: float, *, last: bool = False) -> LeaseRequest | None:
        """The lease request to send; None if there is nothing to request.

        ``last`` gives everything back.
        """

    def apply_grant(self, grant: LeaseGrant, requested_at: float, now: float) -> None:
        """Apply the grant of the request that was sent at ``requested_at``."""

    def revoke_lease(self, now: float) -> None:
        """The store failed: all leases are void."""


class LeaseTerms(Struct, frozen=True):
    """The name and the shared limit of a counter. ``wake`` has leases requested at once."""

    name: str
    limit: SharedLimit
    description: str
    policy: StoreFailurePolicy
    wake: Callable[[], object]


class LeasedBucket:
    """A leased rate or daily budget. The local counter counts all usage of this process."""

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

    def __init__(
        self, terms: LeaseTerms, local_counter: TokenBucket | DailyBudget, lease: Lease
    ) -> None:
        """``local_counter`` is the counter of this process's part of the limit."""
        self.scope: LimitScope = local_counter.scope
        self.amount = local_counter.amount
        self.description = terms.description
        self.local_counter = local_counter
        limit = terms.limit
        self._by_token = local_counter.scope != "requests"
        self._is_daily = limit.kind == "day"
        size = (
            limit.amount * DAILY_LEASE_SHARE
            if self._is_daily
            else local_counter.amount * RATE_LEASE_SHARE
        )
        self._lease_size = min(math.ceil(size), local_counter.amount)
        self._lease = lease
        self._terms = terms

    def reserve(self, weight: int, now: float) -> float:
        """See ``LimitCounter``."""
        lease, amount = self._lease, weight if self._by_token else 1
        lease.used_at = now
        if lease.store_failed:
            return self._reserve_locally(weight, now)
        live = now < lease.expires_at
        if not live:
            lease.expire()
        remaining = lease.available - amount
        if amount > self._lease_size and amount >= lease.largest_request:
            lease.largest_request, lease.largest_request_at = amount, now
        if remaining < 0 or not live:
            self._terms.wake()
            if remaining < (0 if live else -self._lease_size):
                return lease.retry_after
        lease.available = remaining
        self._count_locally(amount, now)
        return 0.0

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``LimitCounter``."""
        if self._by_token:
            self._return_unused(weight - used, at, now)

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """See ``LimitCounter``."""
        self._return_unused(weight if self._by_token else 1, at, now)

    def get_status(self, now: float) -> RateLimitStatus:
        """See ``LimitCounter``. It shows what this process has leased."""
        lease = self._lease
        if lease.store_failed:
            return self.local_counter.get_status(now)
        return RateLimitStatus(self._terms.limit.amount, max(lease.available, 0), lease.retry_after)

    def build_lease_request(self, now: float, *, last: bool = False) -> LeaseRequest | None:
        """See ``LeasedCounter``."""
        lease = self._lease
        if now >= lease.expires_at:
            lease.expire()
        used, retained = lease.leased - lease.available, max(lease.available, 0)
        if now - lease.largest_request_at > LEASE_IDLE_TIMEOUT:
            lease.largest_request = 0
        most = 0 if last else max(self._lease_size, 2 * used, lease.largest_request)
        target = min(most, self.amount)
        requested = (
            target - retained
            if 2 * retained < target or retained < min(lease.largest_request, target)
            else 0
        )
        excess = max(retained - 2 * target, 0)
        idle = now - lease.used_at > LEASE_IDLE_TIMEOUT and not used
        if not last and (
            idle or (not requested and not excess and lease.expires_at - now > RENEW_BEFORE)
        ):
            return None
        lease.available -= excess
        lease.leased -= excess
        lease.available_at_request, lease.requested = lease.available, requested
        used += self._get_used_since_failure(now)
        return LeaseRequest(self._terms.name, self._terms.limit, requested, retained - excess, used)

    def apply_grant(self, grant: LeaseGrant, requested_at: float, now: float) -> None:
        """See ``LeasedCounter``."""
        lease = self._lease
        lease.apply_grant(grant, requested_at, now)
        lease.available += grant.amount - min(lease.available_at_request, 0)
        lease.leased = max(lease.available_at_request, 0) + grant.amount

    def revoke_lease(self, now: float) -> None:
        """See ``LeasedCounter``."""
        lease = self._lease
        if not lease.store_failed:
            state = lease.local_state
            lease.local_used_at_failure = self._compute_level(state.used, state.used_at, now)
        lease.record_store_failure(now)

    def _count_locally(self, amount: int, now: float) -> None:
        """Count what was used of a lease as used of the own part; that of a rate is then empty."""
        self.local_counter.return_unused(-amount, now, now)
        if not self._is_daily:
            state = self._lease.local_state
            state.used = min(state.used, self.amount)

    def _compute_level(self, used: float, since: float, now: float) -> float:
        """What is left ``now`` of what was ``used`` of the own part of a rate, refilled since."""
        return max(used - (now - since) * self.amount / self._terms.limit.period, 0.0)

    def _get_used_since_failure(self, now: float) -> int:
        """What was used of the own part of a rate while the store failed, and is not refilled."""
        lease = self._lease
        if self._is_daily or not lease.store_failed or self._terms.policy != "local":
            return 0
        level = self._compute_level(lease.local_state.used, lease.local_state.used_at, now)
        earlier = self._compute_level(lease.local_used_at_failure, lease.changed_at, now)
        return math.ceil(max(level - earlier, 0.0))

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
        """Give back to the counter from which it was taken.

        What a rate's local counter gave while the store failed is reported to the store at its
        return, by ``_get_used_since_failure``; with the other policies it never is.
        """
        lease = self._lease
        same = at >= lease.changed_at
        is_local = self._terms.policy == "local"
        if same and (self._is_daily or not lease.store_failed):
            lease.available += amount
        elif self._is_daily or (not same and (lease.store_failed or is_local)):
            lease.leased -= amount
            lease.local_used_at_failure -= amount  # taken before it
        if self._is_daily or is_local or (lease.store_failed and same):
            self.local_counter.return_unused(amount, at, now)


class LeasedSlots:
    """Leased slots of a concurrency limit. The local counter counts all slots in use here."""

    __slots__ = (
        "_lease",
        "_lease_size",
        "_local_counter",
        "_terms",
        "amount",
        "description",
        "scope",
    )

    def __init__(self, terms: LeaseTerms, local_counter: ConcurrencyLimit, lease: Lease) -> None:
        """``local_counter`` is the counter of this process's part of the limit."""
        self.scope: LimitScope = local_counter.scope
        self.amount = local_counter.amount
        self.description = terms.description
        self._local_counter = local_counter
        self._lease_size = math.ceil(local_counter.amount * RATE_LEASE_SHARE)
        self._lease = lease
        self._terms = terms

    def reserve(self, weight: int, now: float) -> float:
        """See ``LimitCounter``."""
        lease, spent = self._lease, self._lease.local_state
        lease.used_at = now
        if lease.store_failed:
            return self._reserve_locally(weight, now)
        live = now < lease.expires_at
        if not live or spent.slots_in_use >= lease.available:
            self._terms.wake()
            if spent.slots_in_use >= (lease.available if live else self._lease_size):
                return MIN_RETRY_AFTER
        spent.slots_in_use += 1
        return 0.0

    def reserve_slots(self, count: int, now: float) -> float:
        """See ``ConcurrencyLimit``. A request that runs alone in this process gets its slots."""
        lease, spent = self._lease, self._lease.local_state
        if lease.store_failed:
            if self._terms.policy == "local":
                return self._local_counter.reserve_slots(count, now)
        else:
            needed = spent.slots_in_use + count
            if needed > lease.available:
                lease.largest_request = max(lease.largest_request, count + 1)
                lease.largest_request_at = now
                self._terms.wake()
                if spent.slots_in_use > 1:
                    return MIN_RETRY_AFTER
        spent.slots_in_use += count
        return 0.0

    def release_slots(self, count: int) -> None:
        """See ``ConcurrencyLimit``."""
        self._local_counter.release_slots(count)

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``LimitCounter``."""
        self._local_counter.settle(weight, used, at, now)

    def cancel_reservation(self, weight: int, at: float, now: float) -> None:
        """See ``LimitCounter``."""
        self._local_counter.cancel_reservation(weight, at, now)

    def get_status(self, now: float) -> RateLimitStatus:
        """See ``LimitCounter``. It shows what this process has leased."""
        lease = self._lease
        if lease.store_failed:
            return self._local_counter.get_status(now)
        return RateLimitStatus(
            self._terms.limit.amount, max(lease.available - lease.local_state.slots_in_use, 0), 0.0
        )

    def build_lease_request(self, now: float, *, last: bool = False) -> LeaseRequest | None:
        """See ``LeasedCounter``."""
        lease, limit = self._lease, self._terms.limit
        if now >= lease.expires_at:
            lease.expire()
        if now - lease.largest_request_at > LEASE_IDLE_TIMEOUT:
            lease.largest_request = 0
        used = 0 if last else lease.local_state.slots_in_use
        size = max(self._lease_size, lease.largest_request)
        requested = 0 if last else min(used + size, max(limit.amount, used))
        idle = now - lease.used_at > LEASE_IDLE_TIMEOUT and not used
        if not last and (
            idle or (requested == lease.available and lease.expires_at - now > RENEW_BEFORE)
        ):
            return None
        return LeaseRequest(self._terms.name, limit, requested, used)

    def apply_grant(self, grant: LeaseGrant, requested_at: float, now: float) -> None:
        """See ``LeasedCounter``."""
        self._lease.apply_grant(grant, requested_at, now)
        self._lease.available = grant.amount

    def revoke_lease(self, now: float) -> None:
        """See ``LeasedCounter``."""
        self._lease.record_store_failure(now)

    def _reserve_locally(self, weight: int, now: float) -> float:
        policy = self._terms.policy
        if policy == "closed":
            return NEVER_AVAILABLE
        if policy == "local":
            return self._local_counter.reserve(weight, now)
        self._lease.local_state.slots_in_use += 1
        return 0.0


RENEW_INTERVAL: Final = 0.25
"""Seconds between two renewals, with a random jitter of a quarter, so that of several processes
not always the same one comes first."""
MIN_RENEW_INTERVAL: Final = 0.025
"""Minimum seconds between two renewals."""


class LeaseRenewer:
    """Renews the leases of the active configuration's counters."""

    def __init__(
        self,
        store: LeaseStore,
        counters: Callable[[], Sequence[LeasedCounter]],
        bell: asyncio.Event,
        clock: Clock,
        draw: Callable[[], float],
    ) -> None:
        """``bell`` is set by a counter that needs a lease at once."""
        self._store = store
        self._get_counters = counters
        self._wake_event = bell
        self._clock = clock
        self._draw = draw
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start renewing periodically."""
        self._task = asyncio.get_running_loop().create_task(self._renew_periodically())

    async def aclose(self) -> None:
        """Report the usage and give everything back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self.renew_leases(last=True)

    async def renew_leases(self, *, last: bool = False) -> None:
        """Request all leases that are needed now. ``last`` gives everything back."""
        requested_at, counters = self._clock(), self._get_counters()
        requests = [(one, one.build_lease_request(requested_at, last=last)) for one in counters]
        pairs = [(one, request) for one, request in requests if request is not None]
        if not pairs:
            return
        try:
            grants = await self._store.request_leases([request for _, request in pairs])
        except LeaseStoreUnavailable:
            now = self._clock()
            for one in counters:
                one.revoke_lease(now)
            return
        now = self._clock()
        for (one, _), grant in zip(pairs, grants, strict=True):
            one.apply_grant(grant, requested_at, now)

    async def _renew_periodically(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_INTERVAL * (0.75 + self._draw() / 2)):
                    await self._wake_event.wait()
            self._wake_event.clear()
            await self.renew_leases()
            await asyncio.sleep(MIN_RENEW_INTERVAL)
