"""What one key may take, and what it was let take for one request."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from gateway.limits.counters import MIN_RETRY_AFTER, NEVER_AVAILABLE, TOKEN_SCOPES, LimitCounter
from protocols.core.errors import GatewayError, Overloaded, QuotaExceeded, RateLimitExceeded
from protocols.core.events import Usage
from protocols.core.interfaces import Clock, RateLimitStatus


class RateLimits(Struct, frozen=True):
    """So much may be taken; None is as much as there is.

    Requests and tokens in so many seconds, requests at a time, and tokens a day.
    """

    requests: tuple[int, float] | None = None
    tokens: tuple[int, float] | None = None
    max_concurrency: int | None = None
    daily_budget: int | None = None


class KeyRateLimits(Struct, frozen=True):
    """What a key may take of everything, and beside that of some models."""

    overall: RateLimits
    models: Mapping[str, RateLimits] = {}


class FinishedRequest(Protocol):
    """What is known of an exchange that is over: see ``gateway.telemetry.RequestRecord``."""

    @property
    def usage(self) -> Usage | None:
        """What the worker says, or was counted."""

    @property
    def tokens(self) -> int:
        """Of the answer, as far as they were passed on."""

    @property
    def outcome(self) -> str:
        """How it ended."""


class ModelCounters(Struct, frozen=True, eq=False):
    """All that a request for one model is counted by."""

    all: Sequence[LimitCounter]
    largest_weight: int
    """The tokens that may be taken at most, so that no request is too long for ever."""
    admissions: list[int]
    """How many requests were admitted: its one item."""
    requests: Sequence[LimitCounter]
    tokens: Sequence[LimitCounter]
    """Those of these two scopes."""

    def reserve(self, weight: int, now: float) -> tuple[LimitCounter, float] | None:
        """Take a request's part of each; else which has none left, and for how many seconds."""
        for number, one in enumerate(self.all):
            if wait := one.reserve(weight, now):
                for taken in self.all[:number]:
                    taken.cancel_reservation(weight, now, now)
                return one, wait
        self.admissions[0] += 1
        return None


def get_tightest_status(counters: Sequence[LimitCounter], now: float) -> RateLimitStatus | None:
    """What is left of these: of that which has the least."""
    found = None
    for one in counters:
        standing = one.get_status(now)
        if found is None or standing.remaining < found.remaining:
            found = standing
    return found


class Reservation:
    """A request that was let in. What it took is settled once, however it ends."""

    __slots__ = ("_clock", "_counters", "_prompt_tokens", "_reserved_at", "_weight")

    def __init__(
        self, counters: ModelCounters, weight: int, prompt: int, at: float, clock: Clock
    ) -> None:
        """``weight`` tokens were taken ``at`` that time, ``prompt`` of them for the prompt."""
        self._counters = counters
        self._weight = weight
        self._prompt_tokens = prompt
        self._reserved_at = at
        self._clock = clock

    def settle(self, ended: FinishedRequest) -> None:
        """It is over."""
        used, now = self._count_used_tokens(ended), self._clock()
        for one in self._counters.all:
            one.settle(self._weight, used, self._reserved_at, now)

    def _count_used_tokens(self, ended: FinishedRequest) -> int:
        """The tokens that it took. What nobody told is guessed, but for what came to nothing."""
        if (usage := ended.usage) is not None:
            return usage.prompt_tokens + max(usage.completion_tokens, ended.tokens)
        return 0 if ended.outcome.endswith("_error") else self._prompt_tokens + ended.tokens


def make_limit_error(counter: LimitCounter, wait: float, weight: int, now: float) -> GatewayError:
    """Why a request of this weight is not admitted."""
    told, scope = counter.description, counter.scope
    if wait == NEVER_AVAILABLE:
        return Overloaded("the limits can't be checked now")
    if scope == "budget" and wait > MIN_RETRY_AFTER:
        left = counter.get_status(now).remaining
        return QuotaExceeded(
            f"the budget of {told} is spent: {left} are left, and this request may take {weight}"
        )
    message = f"at most {told} are allowed"
    if scope in TOKEN_SCOPES:
        scope, message = "tokens", f"{message}, and this request may take {weight}"
    return RateLimitExceeded(message, retry_after=wait, scope=scope)
