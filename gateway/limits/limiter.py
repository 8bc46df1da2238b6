"""Whether a request may be served, by all that its key may take."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, cast

from gateway.limits.accounts import CounterRegistry
from gateway.limits.allowance import (
    FinishedRequest,
    KeyRateLimits,
    ModelCounters,
    Reservation,
    get_tightest_status,
    make_limit_error,
)
from gateway.limits.counters import DailyBudget
from gateway.limits.estimate import estimate_tokens
from gateway.limits.lent import LeasedBucket, LeasedCounter, LeasedSlots
from protocols.core.catalog import ModelInfo
from protocols.core.interfaces import ClientAdapter, Headers, RateLimitHeaders

ANONYMOUS_KEY: Final = ""
"""Stands for the key of all clients together, where there are no keys."""
MAX_TOKEN_HOLDERS: Final = 10_000
"""Of tokens are known at a time: who has not asked for the longest time begins anew."""


class LimitedRequest(FinishedRequest, Protocol):
    """Where it is noted what a request was let take: see ``gateway.telemetry.RequestRecord``."""

    key: str
    reservation: Reservation | None
    rate_limit_headers: Headers


class RateLimiter:
    """The limits of one configuration, by the keys' names. What is used of them outlives it."""

    def __init__(
        self,
        keys: Mapping[str, KeyRateLimits],
        accounts: CounterRegistry,
        others: KeyRateLimits | None = None,
    ) -> None:
        """``others`` are the limits of each who has no key of the configuration's, but a token."""
        self.registry = accounts
        self._clock = accounts.clock
        self._token_limits = others
        self._keys = {key: accounts.build_key_counters(key, rates) for key, rates in keys.items()}
        self._counters_by_key = {key: held.by_model for key, held in self._keys.items()}

    def reserve(
        self,
        entry: LimitedRequest,
        asked: str,
        model: ModelInfo,
        body: bytes | None,
        dialect: ClientAdapter,
    ) -> None:
        """Take what a request may use. Raises RateLimited or QuotaExceeded, having taken nothing.

        ``asked`` is the public model by whose limits it goes, ``model`` the one that answers.
        ``body`` is None where no tokens are asked for.
        """
        models = self._counters_by_key.get(entry.key) or self._get_holder_counters(entry.key)
        if models is None:
            return
        counters = models.get(asked) or models[""]
        prompt = weight = 0
        if counters.largest_weight and body is not None:
            prompt, answer = estimate_tokens(body, model)
            weight = min(prompt + answer, counters.largest_weight)
        now = self._clock()
        lacking = counters.reserve(weight, now)
        if _reports_limits(type(dialect)):
            left = (
                get_tightest_status(counters.requests, now),
                get_tightest_status(counters.tokens, now),
            )
            entry.rate_limit_headers = cast("RateLimitHeaders", dialect).rate_limit_headers(*left)
        if lacking is not None:
            counter, wait = lacking
            self.registry.rejections[counter.scope] += 1
            raise make_limit_error(counter, wait, weight, now)
        entry.reservation = Reservation(counters, weight, min(prompt, weight), now, self._clock)

    @property
    def leased_counters(self) -> Sequence[LeasedCounter]:
        """The counters of what was lent, where limits are shared."""
        holders = (held for by, held in self.registry.recent_holders.values() if by is self)
        every = itertools.chain(self._keys.values(), holders)
        counters = itertools.chain.from_iterable(one.counters for one in every)
        return [one for one in counters if isinstance(one, LeasedBucket | LeasedSlots)]

    @property
    def daily_budgets(self) -> Mapping[tuple[str, str], DailyBudget]:
        """This process's part of each key's budgets, by the key and the model."""
        return {
            (key, model): day
            for key, held in self._keys.items()
            for model, day in held.daily_budgets.items()
        }

    def _get_holder_counters(self, key: str) -> Mapping[str, ModelCounters] | None:
        """What is counted of somebody who has no key of the configuration's, but a token."""
        if self._token_limits is None:
            return None
        recent = self.registry.recent_holders
        by, held = recent.pop(key, (None, None))
        if held is None or by is not self:
            held = self.registry.build_key_counters(key, self._token_limits)
        recent[key] = self, held
        if len(recent) > MAX_TOKEN_HOLDERS:
            recent.popitem(last=False)
        return held.by_model

    @staticmethod
    def settle_request(entry: LimitedRequest) -> None:
        """A request is over, admitted or not: what it did not use is given back."""
        entry.rate_limit_headers = ()
        if entry.reservation is not None:
            entry.reservation.settle(entry)
            entry.reservation = None


@functools.cache
def _reports_limits(kind: type) -> bool:
    """Whether such dialects tell what is left. Asked once of each: a port is long to compare."""
    return issubclass(kind, RateLimitHeaders)
