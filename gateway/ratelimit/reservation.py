"""The limits of one key, what one request takes of them, and an estimate of its tokens."""

import re
from collections import Counter as Tally
from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from gateway.ratelimit.buckets import (
    MIN_RETRY_AFTER,
    NEVER_AVAILABLE,
    TOKEN_SCOPES,
    ConcurrencyLimit,
    LimitCounter,
    LimitScope,
)
from gateway.ratelimit.leases import LeasedSlots
from protocols.core.catalog import ModelInfo
from protocols.core.errors import GatewayError, Overloaded, QuotaExceeded, RateLimitExceeded
from protocols.core.events import Usage
from protocols.core.interfaces import Clock, Headers, RateLimitStatus

BYTES_PER_TOKEN: Final = 4
"""For JSON in English; other languages and escapes have more bytes per token."""
MAX_ESTIMATED_PROMPT: Final = 32_768
"""In tokens, if the model's context length is unknown: the bytes of an image are no prompt."""
DEFAULT_COMPLETION_TOKENS: Final = 256
"""In tokens, if neither the client nor the model limits the response's length."""
_MAX_TOKENS_PATTERN: Final = re.compile(
    rb'"max_(?:[a-z]{1,10}_)?tokens"\s{0,9}:\s{0,9}([0-9]{1,9})'
)
"""Every protocol has a field of such a name. Quotes inside a string are escaped, so none matches.
"""


class FinishedRequest(Protocol):
    """A request that has ended; see ``gateway.observability.record.RequestRecord``."""

    @property
    def usage(self) -> Usage | None:
        """The worker's usage, or counted usage."""

    @property
    def tokens(self) -> int:
        """The tokens that were streamed."""

    @property
    def outcome(self) -> str:
        """The request's outcome."""


class ModelCounters(Struct, frozen=True, eq=False, gc=False):
    """The counters of a key's requests for one model."""

    all: Sequence[LimitCounter]
    largest_weight: int
    """The most tokens a request reserves, so that a long request fits the smallest limit."""
    admissions: list[int]
    """One number: how many requests were admitted."""
    requests: Sequence[LimitCounter]
    tokens: Sequence[LimitCounter]
    """The counters of these two scopes."""
    concurrency: Sequence[ConcurrencyLimit | LeasedSlots]
    rejections: Tally[LimitScope]
    """The number of rejected requests, by the scope of the limit."""

    def reserve(self, weight: int, now: float) -> tuple[LimitCounter, float] | None:
        """Take a request's part of each; else the exhausted counter and the seconds to wait."""
        for number, one in enumerate(self.all):
            if wait := one.reserve(weight, now):
                for reserved in self.all[:number]:
                    reserved.cancel_reservation(weight, now, now)
                self.rejections[one.scope] += 1
                return one, wait
        self.admissions[0] += 1
        return None


def get_tightest_status(counters: Sequence[LimitCounter], now: float) -> RateLimitStatus | None:
    """The status of the counter with the least left."""
    if len(counters) == 1:
        return counters[0].get_status(now)
    tightest = None
    for one in counters:
        status = one.get_status(now)
        if tightest is None or status.remaining < tightest.remaining:
            tightest = status
    return tightest


class Reservation:
    """What one request took of its key's limits; a rejected request took nothing.

    ``headers`` are the rate-limit headers of its response, whichever that is.
    """

    __slots__ = (
        "_choices",
        "_clock",
        "_counters",
        "_prompt_tokens",
        "_reserved_at",
        "_weight",
        "headers",
        "rejection",
    )

    def __init__(
        self, counters: ModelCounters, weight: int, prompt: int, at: float, clock: Clock
    ) -> None:
        """Take ``weight`` tokens, ``prompt`` of them for the prompt, ``at`` this time."""
        self.headers: Headers = ()
        self.rejection = counters.reserve(weight, at)
        """The limit that has too little left, and for how many seconds."""
        self._counters = counters
        self._weight = weight
        self._prompt_tokens = prompt
        self._reserved_at = at
        self._clock = clock
        self._choices = 1
        """The choices for which it has taken slots."""

    def __repr__(self) -> str:
        state = "" if self.rejection is None else ", rejected"
        return f"<Reservation {self._weight} tokens, {self._choices} choices{state}>"

    def check(self) -> None:
        """Raises RateLimitExceeded, QuotaExceeded or Overloaded if the request was rejected."""
        if self.rejection is not None:
            raise make_limit_error(*self.rejection, self._weight, self._reserved_at)

    def reserve_choices(self, count: int) -> None:
        """Take a slot for each choice, at most the whole limit, so that any request may run alone.

        If too few are left, the request is rejected: it gives back all that it took, and
        RateLimitExceeded or Overloaded is raised.
        """
        counters, now = self._counters, self._clock()
        for number, one in enumerate(counters.concurrency):
            missing = self._count_missing_slots(one, count)
            if missing and (wait := one.reserve_slots(missing, now)):
                for reserved in counters.concurrency[:number]:
                    reserved.release_slots(self._count_missing_slots(reserved, count))
                self._release_choices()
                for limit in counters.all:
                    limit.cancel_reservation(self._weight, self._reserved_at, now)
                counters.admissions[0] -= 1
                counters.rejections[one.scope] += 1
                self.rejection = one, wait
                self.check()
        self._choices = max(count, self._choices)

    def _count_missing_slots(self, counter: ConcurrencyLimit | LeasedSlots, count: int) -> int:
        amount = counter.amount
        return max(min(count, amount) - min(self._choices, amount), 0)

    def _release_choices(self) -> None:
        """Give back all slots but the first."""
        for one in self._counters.concurrency:
            one.release_slots(min(self._choices, one.amount) - 1)

    def settle(self, request: FinishedRequest) -> None:
        """Give back what the finished request did not use. Call it once."""
        if self.rejection is not None:
            return
        if self._choices > 1:
            self._release_choices()
        used, now = self._count_used_tokens(request), self._clock()
        for one in self._counters.all:
            one.settle(self._weight, used, self._reserved_at, now)

    def _count_used_tokens(self, request: FinishedRequest) -> int:
        """The tokens that it used; estimated without usage, and 0 for a request that failed."""
        if (usage := request.usage) is not None:
            return usage.prompt_tokens + max(usage.completion_tokens, request.tokens)
        return 0 if request.outcome.endswith("_error") else self._prompt_tokens + request.tokens


def make_limit_error(counter: LimitCounter, wait: float, weight: int, now: float) -> GatewayError:
    """The error for a request of this weight that a counter rejected."""
    description, scope = counter.description, counter.scope
    if wait == NEVER_AVAILABLE:
        return Overloaded("rate limits can't be checked now, since their shared store is down")
    if scope == "budget" and wait > MIN_RETRY_AFTER:
        remaining = counter.get_status(now).remaining
        return QuotaExceeded(
            f"the budget of {description} is spent: {remaining} are left, "
            f"and this request may take {weight}"
        )
    message = f"at most {description} are allowed"
    if scope in TOKEN_SCOPES:
        scope, message = "tokens", f"{message}, and this request may take {weight}"
    return RateLimitExceeded(message, retry_after=wait, scope=scope)


def estimate_tokens(body: bytes, model: ModelInfo) -> tuple[int, int]:
    """The estimated tokens of the prompt and of the response."""
    prompt, longest = len(body) // BYTES_PER_TOKEN, model.context_length or MAX_ESTIMATED_PROMPT
    if prompt > longest:  # noqa: PLR1730 - it would be a call for each request
        prompt = longest
    if model.task != "chat":
        return prompt, 0
    start = body.find(b'"max_')  # faster than the search for the whole pattern
    match = _MAX_TOKENS_PATTERN.search(body, start) if start >= 0 else None
    return prompt, (model.max_tokens or DEFAULT_COMPLETION_TOKENS) if match is None else int(
        match[1]
    )
