"""What is counted of limits that several gateways share: each uses what it was lent. Pure.

What was not used for a while is not asked for. The first request after that is admitted by what
one loan would be, and told of with the next asking, which comes at once.

While the lender fails, its policy holds: ``open`` admits everything, ``closed`` nothing, and
``local`` what this process's own part of the limit allows.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha1
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from msgspec import Struct

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

# What lends limits to several gateways that share them: each uses up what it was lent.
#
# A request is admitted by what this process holds, and waits for nobody. One task beside all requests
# asks the lender for more before that is used up (``gateway.ratelimit.redis_limiter``), every 250 ms at most.
# Where the lender fails, what it lent is void at once, and its ``policy`` holds until it answers
# again.

LimitKind = Literal["rate", "day", "slots"]
"""``rate``: so much in each period, and no more than that at once; it comes back bit by bit.
``day``: so much between 00:00 UTC and the next. ``slots``: so many at a time."""
StoreFailurePolicy = Literal["local", "open", "closed"]
"""While the lender fails: each process takes its part of every limit (``local``), everything is
admitted (``open``), or nothing is (``closed``)."""


class SharedLimit(Struct, frozen=True):
    """How much there is. ``period`` is in seconds: 86400 for ``day``, 0 for ``slots``."""

    kind: LimitKind
    amount: int
    period: float


class LeaseRequest(Struct, frozen=True):
    """What a process asks of one counter, by the counter's ``name``.

    Of ``rate`` and ``day``: ``wanted`` is how much more, at most. ``held`` is what it keeps of what
    was lent before, unused and not given back. ``used`` is what it used since the last answer: a
    request's tokens are known when it is over, so that this may be below 0, where less was used
    than was said, or above all that was lent. What was lent and is in neither is the lender's
    again: so giving back is holding less, an answer that is lost costs nothing, and after a failure
    all is right again with the first wish (held 0, and used what was, since the last answer).

    Of ``slots``: ``wanted`` is how many this process is to have in all, never fewer than it uses;
    ``held`` is how many it uses, ``used`` is 0.
    """

    name: str
    limit: SharedLimit
    requested: int
    retained: int = 0
    used: int = 0


class LeaseGrant(Struct, frozen=True):
    """The answer to a wish.

    Of ``rate`` and ``day``: ``amount`` is how much more there is to use, from 0 to what was wanted.
    Of ``slots``: how many the process has now in all; what it had before, and wants, stays its own.

    It holds for ``seconds`` from when the lender was asked, with all that was lent of this counter
    before; what is unused by then is the lender's again. It is to be at least 2. ``retry_after``:
    in how many seconds there may be more, where less was lent than wanted.
    """

    amount: int
    seconds: float
    retry_after: float = 1.0


class LeaseStoreUnavailable(Exception):
    """It can't be asked now, or did not answer in time.

    What was used since the last answer is to be told again.
    """


class LeaseStore(Protocol):
    """Knows what all processes together have used."""

    policy: StoreFailurePolicy
    replicas: int
    """How many processes share the limits: each one's part, where they can't ask."""

    async def request_leases(self, wishes: Sequence[LeaseRequest]) -> Sequence[LeaseGrant]:
        """One grant for each wish, in their order.

        Raises LenderFailed, at the latest when there was no answer for 250 ms.
        """


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


# Asks for more of what is shared before it is used up, beside all requests.

RENEW_INTERVAL: Final = 0.25
"""Seconds between two askings, where nothing is wanted at once; a quarter more or less by luck, so
that of several processes not always the same one comes first."""
MIN_RENEW_INTERVAL: Final = 0.025
"""Seconds between two at least."""


class LeaseRenewer:
    """Keeps the counters of the configuration that is served supplied."""

    def __init__(
        self,
        lender: LeaseStore,
        counters: Callable[[], Sequence[LeasedCounter]],
        bell: asyncio.Event,
        clock: Clock,
        draw: Callable[[], float],
    ) -> None:
        """The ``bell`` is rung by a counter that can't wait."""
        self._store = lender
        self._get_counters = counters
        self._wake_event = bell
        self._clock = clock
        self._draw = draw
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Ask again and again."""
        self._task = asyncio.get_running_loop().create_task(self._renew_periodically())

    async def aclose(self) -> None:
        """Tell what was used, and let go of what is held."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self.renew_leases(last=True)

    async def renew_leases(self, *, last: bool = False) -> None:
        """Ask for all that is wanted now. With ``last`` everything is let go."""
        asked, counters = self._clock(), self._get_counters()
        wishes = [(one, one.build_lease_request(asked, last=last)) for one in counters]
        pairs = [(one, wish) for one, wish in wishes if wish is not None]
        if not pairs:
            return
        try:
            grants = await self._store.request_leases([wish for _, wish in pairs])
        except LeaseStoreUnavailable:
            now = self._clock()
            for one in counters:
                one.revoke_lease(now)
            return
        now = self._clock()
        for (one, _), grant in zip(pairs, grants, strict=True):
            one.apply_grant(grant, asked, now)

    async def _renew_periodically(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_INTERVAL * (0.75 + self._draw() / 2)):
                    await self._wake_event.wait()
            self._wake_event.clear()
            await self.renew_leases()
            await asyncio.sleep(MIN_RENEW_INTERVAL)


# What limits have left, in a Redis that several gateways share.
#
# One script does it all, so that nothing comes between reading and writing; it goes by the server's
# clock, so that the gateways' need not agree.

LEASE_SECONDS: Final = 2.0
"""Seconds that a loan lasts: what a process that died held is lent to others after them."""
STORE_TIMEOUT: Final = 0.25
"""Seconds in which one call ends, well or not; after one that did not end well none follows."""
STORE_RETRY_DELAY: Final = 4.0
"""Seconds for which none is made after one that failed, at most; at least half as long."""
MAX_LEASES_PER_CALL: Final = 50
"""The counters of one call: until it is made and read, this process does nothing else."""
_SCRIPT: Final = Path(__file__).with_name("redis_leases.lua").read_text("utf-8")
_SCRIPT_SHA1: Final = sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_MAX_ERROR_TEXT: Final = 200

log = logging.getLogger("interlingua")


class RedisLimitSettings(Struct, frozen=True):
    """Where limits are shared, and by whom."""

    url: str
    """With the password: it is shown to nobody."""
    policy: StoreFailurePolicy = "local"
    replicas: int = 1
    """Processes."""
    prefix: str = "interlingua"
    """What the names of all keys begin with."""
    ca: str | None = None
    """A file with who signed the server's certificate; None for whom the system trusts."""


class RedisLeaseStore:
    """Lends what a Redis says is left; see ``gateway.ratelimit.redis_limiter.LeaseStore``."""

    def __init__(
        self, shared: RedisLimitSettings, borrower: str, *, clock: Clock, draw: Clock
    ) -> None:
        """``borrower`` is this process and no other. ``draw`` gives a number in [0, 1)."""
        from redis.asyncio import Redis  # noqa: PLC0415 - it need not be installed
        from redis.asyncio.retry import Retry  # noqa: PLC0415 - as above
        from redis.backoff import NoBackoff  # noqa: PLC0415 - as above

        more: Any = {} if shared.ca is None else {"ssl_ca_certs": shared.ca}
        self._redis: Any = Redis.from_url(
            shared.url,
            protocol=2,
            socket_timeout=STORE_TIMEOUT,
            socket_connect_timeout=STORE_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            **more,
        )
        self.policy = shared.policy
        self.replicas = shared.replicas
        self._prefix = shared.prefix
        self._borrower_id = borrower
        self._clock = clock
        self._draw = draw
        self._next_attempt_at = clock()
        self.errors = 0
        """Askings that failed; those that were not made are not counted."""
        self.up = True
        """Whether the last one went well."""

    async def request_leases(self, wishes: Sequence[LeaseRequest]) -> Sequence[LeaseGrant]:
        """Ask for all of them."""
        if self._clock() < self._next_attempt_at:
            raise LeaseStoreUnavailable
        grants: list[LeaseGrant] = []
        try:
            for first in range(0, len(wishes), MAX_LEASES_PER_CALL):
                async with asyncio.timeout(STORE_TIMEOUT):
                    grants += _parse_grants(
                        await self._call_script(wishes[first : first + MAX_LEASES_PER_CALL])
                    )
        except Exception as error:  # noqa: BLE001 - whatever its client raises, limits go on
            self._record_failure(error)
            raise LeaseStoreUnavailable from None
        if not self.up:
            log.info("limits are shared again")
        self.up = True
        return grants

    async def aclose(self) -> None:
        """Let the connection go, also of one that does not answer."""
        from redis.exceptions import RedisError  # noqa: PLC0415 - as above

        with suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _call_script(self, wishes: Sequence[LeaseRequest]) -> Sequence[Any]:
        keys = [f"{self._prefix}:{wish.name}" for wish in wishes]
        told = [part for wish in wishes for part in _build_script_arguments(wish)]
        call = (len(keys), *keys, self._borrower_id, LEASE_SECONDS, *told)
        from redis.exceptions import NoScriptError  # noqa: PLC0415 - as above

        reply: Sequence[Any]
        try:
            reply = await self._redis.evalsha(_SCRIPT_SHA1, *call)
        except NoScriptError:
            reply = await self._redis.eval(_SCRIPT, *call)
        return reply

    def _record_failure(self, error: Exception) -> None:
        self.errors += 1
        self._next_attempt_at = self._clock() + STORE_RETRY_DELAY * (1 + self._draw()) / 2
        if self.up:
            why = (
                str(error)[:_MAX_ERROR_TEXT]
                or f"it did not answer within {STORE_TIMEOUT * 1000:g} ms"
            )
            log.warning("limits are not shared, since the Redis can't be asked: %s", why)
        self.up = False


def _build_script_arguments(wish: LeaseRequest) -> tuple[str | float, ...]:
    limit = wish.limit
    return limit.kind, limit.amount, limit.period, wish.requested, wish.retained, wish.used


def _parse_grants(reply: Sequence[Any]) -> list[LeaseGrant]:
    pairs = zip(reply[::2], reply[1::2], strict=True)
    return [LeaseGrant(granted, LEASE_SECONDS, float(wait)) for granted, wait in pairs]
