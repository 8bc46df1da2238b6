"""What lends limits to several gateways that share them: each uses up what it was lent.

A request is admitted by what this process holds, and waits for nobody. One task beside all requests
asks the lender for more before that is used up (``gateway.limits.leasing``), every 250 ms at most.
Where the lender fails, what it lent is void at once, and its ``policy`` holds until it answers
again.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

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
