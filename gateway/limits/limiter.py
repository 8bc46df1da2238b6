"""Whether a request may be served, by all that its key may take."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, cast

from gateway.core.catalog import ModelInfo
from gateway.core.ports import Dialect, Headers, Metering
from gateway.limits.accounts import Accounts
from gateway.limits.allowance import Admitted, Counters, Ended, KeyRates, least, refusal
from gateway.limits.counters import Day
from gateway.limits.estimate import estimate
from gateway.limits.lent import Amounts, Lent, Seats

UNKEYED: Final = ""
"""Stands for the key of all clients together, where there are no keys."""
MOST_HOLDERS: Final = 10_000
"""Of tokens are known at a time: who has not asked for the longest time begins anew."""


class Entry(Ended, Protocol):
    """Where it is noted what a request was let take: see ``gateway.telemetry.Record``."""

    key: str
    reservation: Admitted | None
    rate_limit_headers: Headers


class Limiter:
    """The limits of one configuration, by the keys' names. What is used of them outlives it."""

    def __init__(
        self, keys: Mapping[str, KeyRates], accounts: Accounts, others: KeyRates | None = None
    ) -> None:
        """``others`` are the limits of each who has no key of the configuration's, but a token."""
        self.registry = accounts
        self._clock = accounts.clock
        self._token_limits = others
        self._keys = {key: accounts.build_key_counters(key, rates) for key, rates in keys.items()}
        self._counters_by_key = {key: held.by_model for key, held in self._keys.items()}

    def reserve(
        self, entry: Entry, asked: str, model: ModelInfo, body: bytes | None, dialect: Dialect
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
            prompt, answer = estimate(body, model)
            weight = min(prompt + answer, counters.largest_weight)
        now = self._clock()
        lacking = counters.reserve(weight, now)
        if _tells(type(dialect)):
            left = least(counters.requests, now), least(counters.tokens, now)
            entry.rate_limit_headers = cast("Metering", dialect).rate_limit_headers(*left)
        if lacking is not None:
            counter, wait = lacking
            self.registry.rejections[counter.scope] += 1
            raise refusal(counter, wait, weight, now)
        entry.reservation = Admitted(counters, weight, min(prompt, weight), now, self._clock)

    @property
    def leased_counters(self) -> Sequence[Lent]:
        """The counters of what was lent, where limits are shared."""
        holders = (held for by, held in self.registry.recent_holders.values() if by is self)
        every = itertools.chain(self._keys.values(), holders)
        counters = itertools.chain.from_iterable(one.counters for one in every)
        return [one for one in counters if isinstance(one, Amounts | Seats)]

    @property
    def daily_budgets(self) -> Mapping[tuple[str, str], Day]:
        """This process's part of each key's budgets, by the key and the model."""
        return {
            (key, model): day
            for key, held in self._keys.items()
            for model, day in held.daily_budgets.items()
        }

    def _get_holder_counters(self, key: str) -> Mapping[str, Counters] | None:
        """What is counted of somebody who has no key of the configuration's, but a token."""
        if self._token_limits is None:
            return None
        recent = self.registry.recent_holders
        by, held = recent.pop(key, (None, None))
        if held is None or by is not self:
            held = self.registry.build_key_counters(key, self._token_limits)
        recent[key] = self, held
        if len(recent) > MOST_HOLDERS:
            recent.popitem(last=False)
        return held.by_model

    @staticmethod
    def settle_request(entry: Entry) -> None:
        """A request is over, admitted or not: what it did not use is given back."""
        entry.rate_limit_headers = ()
        if entry.reservation is not None:
            entry.reservation.settle(entry)
            entry.reservation = None


@functools.cache
def _tells(kind: type) -> bool:
    """Whether such dialects tell what is left. Asked once of each: a port is long to compare."""
    return issubclass(kind, Metering)
