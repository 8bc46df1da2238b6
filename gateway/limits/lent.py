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

from gateway.core.ports import Standing
from gateway.limits.counters import SHUT, SOON, Counter, Day, Rate, Scope, Slots, Spent
from gateway.limits.ports import Grant, Limit, Policy, Wish

RATE_PART: Final = 0.5
"""A loan is this much of a process's part of a rate, or of the requests at a time;"""
DAY_PART: Final = 0.01
"""and this much of a whole day's budget. What is wanted more is asked for as it is used."""
RENEW: Final = 1.0
"""A loan is asked for again so many seconds before it ends;"""
IDLE: Final = 10.0
"""but not where nothing was asked of it for so many. A large request's wish is kept as long."""


class Loan:
    """What is held of one limit, and used of it: all that outlives a configuration."""

    __slots__ = (
        "__weakref__",
        "base",
        "failed",
        "largest",
        "largest_at",
        "level",
        "mark",
        "since",
        "spent",
        "until",
        "used_at",
        "wait",
        "wanted",
    )

    def __init__(self) -> None:
        self.level = 0
        """What may be used; below 0 more was. Of slots, how many there are."""
        self.base = 0
        """What ``level`` would be if nothing had been used since the last answer."""
        self.mark = 0
        """What ``level`` was when the lender was asked last,"""
        self.wanted = 0
        """and what it was asked for."""
        self.until = -math.inf
        """When it ends."""
        self.used_at = -math.inf
        """When a request last wanted something."""
        self.largest = 0
        """What one request wanted at most, where that is more than a loan,"""
        self.largest_at = -math.inf
        """and when."""
        self.wait = SOON
        self.failed = False
        """Whether the lender did, when it was asked last."""
        self.since = -math.inf
        """Since when that is so."""
        self.spent = Spent()
        """What is used of the process's own part, and its slots in use."""

    def begin(self, grant: Grant, asked: float, now: float) -> None:
        """It holds from when it was asked for."""
        self.until = asked + grant.seconds
        self.wait = max(grant.retry_after, SOON) if grant.amount < self.wanted else SOON
        if self.failed:
            self.failed, self.since = False, now

    def fail(self, now: float) -> None:
        """The lender did."""
        if not self.failed:
            self.failed, self.since = True, now
        self.drop()

    def drop(self) -> None:
        """What is held is void; what was used is still to be told."""
        self.until = -math.inf
        self.base -= max(self.level, 0)
        self.level = min(self.level, 0)


class Lent(Counter, Protocol):
    """A counter of what was lent."""

    def wish(self, now: float, *, last: bool = False) -> Wish | None:
        """What to ask of the lender; None where that is nothing.

        With ``last`` nothing is to be held any more.
        """

    def granted(self, grant: Grant, asked: float, now: float) -> None:
        """The answer to what was asked at that time."""

    def void(self, now: float) -> None:
        """The lender failed: nothing is lent any more."""


class Terms(Struct, frozen=True):
    """What a counter is to know beside its limit. ``wake``: have the lender asked at once."""

    name: str
    limit: Limit
    told: str
    policy: Policy
    wake: Callable[[], object]


class Amounts:
    """Of a rate, or of a day's budget. A budget's own part counts all that this process uses."""

    __slots__ = (
        "_by_day",
        "_by_token",
        "_loan",
        "_size",
        "_terms",
        "amount",
        "own",
        "scope",
        "told",
    )

    def __init__(self, terms: Terms, own: Rate | Day, loan: Loan) -> None:
        """``own`` is this process's part of the limit, as a counter."""
        self.scope: Scope = own.scope
        self.amount = own.amount
        self.told = terms.told
        self.own = own
        limit = terms.limit
        self._by_token = own.scope != "requests"
        self._by_day = limit.kind == "day"
        size = limit.amount * DAY_PART if self._by_day else own.amount * RATE_PART
        self._size = min(math.ceil(size), own.amount)
        self._loan = loan
        self._terms = terms

    def take(self, weight: int, now: float) -> float:
        """See ``Counter``."""
        loan, amount = self._loan, weight if self._by_token else 1
        loan.used_at = now
        if loan.failed:
            return self._take_own(weight, now)
        live = now < loan.until
        if not live:
            loan.drop()
        left = loan.level - amount
        if amount > self._size and amount >= loan.largest:
            loan.largest, loan.largest_at = amount, now
        if left < 0 or not live:
            self._terms.wake()
            if left < (0 if live else -self._size):
                return loan.wait
        loan.level = left
        if self._by_day:
            self.own.give(-amount, now, now)
        return 0.0

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``Counter``."""
        if self._by_token:
            self._give(weight - used, at, now)

    def undo(self, weight: int, at: float, now: float) -> None:
        """See ``Counter``."""
        self._give(weight if self._by_token else 1, at, now)

    def standing(self, now: float) -> Standing:
        """See ``Counter``. Told is what this process holds."""
        loan = self._loan
        if loan.failed:
            return self.own.standing(now)
        return Standing(self._terms.limit.amount, max(loan.level, 0), loan.wait)

    def wish(self, now: float, *, last: bool = False) -> Wish | None:
        """See ``Lent``."""
        loan = self._loan
        if now >= loan.until:
            loan.drop()
        used, held = loan.base - loan.level, max(loan.level, 0)
        if now - loan.largest_at > IDLE:
            loan.largest = 0
        most = 0 if last else max(self._size, 2 * used, loan.largest)
        target = min(most, self.amount)
        wanted = target - held if 2 * held < target or held < min(loan.largest, target) else 0
        excess = max(held - 2 * target, 0)
        idle = now - loan.used_at > IDLE and not used
        if not last and (idle or (not wanted and not excess and loan.until - now > RENEW)):
            return None
        loan.level -= excess
        loan.base -= excess
        loan.mark, loan.wanted = loan.level, wanted
        return Wish(self._terms.name, self._terms.limit, wanted, held - excess, used)

    def granted(self, grant: Grant, asked: float, now: float) -> None:
        """See ``Lent``."""
        loan = self._loan
        loan.begin(grant, asked, now)
        loan.level += grant.amount - min(loan.mark, 0)
        loan.base = max(loan.mark, 0) + grant.amount

    def void(self, now: float) -> None:
        """See ``Lent``."""
        self._loan.fail(now)

    def _take_own(self, weight: int, now: float) -> float:
        policy = self._terms.policy
        if policy == "closed":
            return SHUT
        if policy == "local" and (wait := self.own.take(weight, now)):
            return wait
        if self._by_day:
            self._loan.level -= weight
            if policy == "open":
                self.own.give(-weight, now, now)
        return 0.0

    def _give(self, amount: int, at: float, now: float) -> None:
        """Give back to where it was taken from.

        What a rate's part gave while the lender failed was never told of. All else is.
        """
        loan = self._loan
        same = at >= loan.since
        if same and (self._by_day or not loan.failed):
            loan.level += amount
        elif self._by_day or (loan.failed and not same):
            loan.base -= amount
        if self._by_day or (loan.failed and same):
            self.own.give(amount, at, now)


class Seats:
    """So many requests at a time. The own part counts all that this process uses."""

    __slots__ = ("_loan", "_own", "_size", "_terms", "amount", "scope", "told")

    def __init__(self, terms: Terms, own: Slots, loan: Loan) -> None:
        """``own`` is this process's part of the limit, as a counter."""
        self.scope: Scope = own.scope
        self.amount = own.amount
        self.told = terms.told
        self._own = own
        self._size = math.ceil(own.amount * RATE_PART)
        self._loan = loan
        self._terms = terms

    def take(self, weight: int, now: float) -> float:
        """See ``Counter``."""
        loan, spent = self._loan, self._loan.spent
        loan.used_at = now
        if loan.failed:
            return self._take_own(weight, now)
        live = now < loan.until
        if not live or spent.slots >= loan.level:
            self._terms.wake()
            if spent.slots >= (loan.level if live else self._size):
                return SOON
        spent.slots += 1
        return 0.0

    def settle(self, weight: int, used: int, at: float, now: float) -> None:
        """See ``Counter``."""
        self._own.settle(weight, used, at, now)

    def undo(self, weight: int, at: float, now: float) -> None:
        """See ``Counter``."""
        self._own.undo(weight, at, now)

    def standing(self, now: float) -> Standing:
        """See ``Counter``. Told is what this process holds."""
        loan = self._loan
        if loan.failed:
            return self._own.standing(now)
        return Standing(self._terms.limit.amount, max(loan.level - loan.spent.slots, 0), 0.0)

    def wish(self, now: float, *, last: bool = False) -> Wish | None:
        """See ``Lent``."""
        loan, limit = self._loan, self._terms.limit
        if now >= loan.until:
            loan.drop()
        used = 0 if last else loan.spent.slots
        wanted = 0 if last else min(used + self._size, max(limit.amount, used))
        idle = now - loan.used_at > IDLE and not used
        if not last and (idle or (wanted == loan.level and loan.until - now > RENEW)):
            return None
        return Wish(self._terms.name, limit, wanted, used)

    def granted(self, grant: Grant, asked: float, now: float) -> None:
        """See ``Lent``."""
        self._loan.begin(grant, asked, now)
        self._loan.level = grant.amount

    def void(self, now: float) -> None:
        """See ``Lent``."""
        self._loan.fail(now)

    def _take_own(self, weight: int, now: float) -> float:
        policy = self._terms.policy
        if policy == "closed":
            return SHUT
        if policy == "local":
            return self._own.take(weight, now)
        self._loan.spent.slots += 1
        return 0.0
