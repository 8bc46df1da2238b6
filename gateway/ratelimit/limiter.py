"""Rate limits of API keys: reserves each request's part of them and settles it at its end."""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Final, cast

from gateway.config.schema import KeyRateLimitConfig
from gateway.ratelimit.buckets import DailyBudget
from gateway.ratelimit.counters import CounterRegistry, KeyCounters
from gateway.ratelimit.leases import LeasedBucket, LeasedCounter, LeasedSlots
from gateway.ratelimit.reservation import (
    ModelCounters,
    Reservation,
    estimate_tokens,
    get_tightest_status,
)
from protocols.core.catalog import ModelInfo
from protocols.core.interfaces import ClientAdapter, RateLimitHeaders

ANONYMOUS_KEY: Final = ""
"""The key of all clients together, if no keys are configured."""
MAX_JWT_PRINCIPALS: Final = 10_000
"""JWT principals that are counted at a time; the least recent one is forgotten."""


class RateLimiter:
    """The limits of one configuration, by the keys' names. Their usage outlives it.

    A key gets its counters at its first request, since there may be many keys.
    """

    def __init__(
        self,
        keys: Mapping[str, KeyRateLimitConfig],
        registry: CounterRegistry,
        token_limits: KeyRateLimitConfig | None = None,
    ) -> None:
        """The limits of models are by model, not by alias.

        ``token_limits`` are the limits of each principal with a JWT instead of an API key.
        """
        self.registry = registry
        self._clock = registry.clock
        self._token_limits = token_limits
        self._limits = keys
        self._keys: dict[str, KeyCounters] = {}
        """The counters of the keys that have been used."""
        self._counters_by_key: dict[str, Mapping[str, ModelCounters]] = {}
        for key in {key for one in registry.limiters for key in one.used_keys} & keys.keys():
            self._add_key(key, keys[key])
        registry.limiters.add(self)

    @property
    def used_keys(self) -> Collection[str]:
        """See ``KeyLimiter``."""
        return self._keys.keys()

    def __repr__(self) -> str:
        return f"<RateLimiter {len(self._limits)} keys, {len(self._keys)} of them used>"

    def reserve(
        self, key: str, model: str, target: ModelInfo, body: bytes | None, adapter: ClientAdapter
    ) -> Reservation | None:
        """Take what a request may use; None for a key without limits.

        ``model`` is the public model whose limits apply, ``target`` the model that answers.
        ``body`` is None where the request asks for no tokens.
        """
        models = self._counters_by_key.get(key) or self._get_new_counters(key)
        if models is None:
            return None
        counters = models.get(model) or models[""]
        prompt = weight = 0
        if counters.largest_weight and body is not None:
            prompt, completion = estimate_tokens(body, target)
            weight = min(prompt + completion, counters.largest_weight)
        now = self._clock()
        reservation = Reservation(counters, weight, min(prompt, weight), now, self._clock)
        if _reports_limits(type(adapter)):
            reservation.headers = cast("RateLimitHeaders", adapter).rate_limit_headers(
                get_tightest_status(counters.requests, now),
                get_tightest_status(counters.tokens, now),
            )
        return reservation

    @property
    def leased_counters(self) -> Sequence[LeasedCounter]:
        """The counters of shared limits."""
        principals = (
            key_counters
            for limiter, key_counters in self.registry.recent_principals.values()
            if limiter is self
        )
        all_keys = itertools.chain(self._keys.values(), principals)
        counters = itertools.chain.from_iterable(one.counters for one in all_keys)
        return [one for one in counters if isinstance(one, LeasedBucket | LeasedSlots)]

    @property
    def daily_budgets(self) -> Mapping[tuple[str, str], DailyBudget]:
        """This process's part of the daily budgets, by key and model."""
        return {
            (key, model): budget
            for key, key_counters in self._keys.items()
            for model, budget in key_counters.daily_budgets.items()
        }

    def _add_key(self, key: str, limits: KeyRateLimitConfig) -> Mapping[str, ModelCounters]:
        self._keys[key] = counters = self.registry.build_key_counters(key, limits)
        self._counters_by_key[key] = counters.by_model
        return counters.by_model

    def _get_new_counters(self, key: str) -> Mapping[str, ModelCounters] | None:
        """The counters of a key at its first request, or of a principal with a JWT."""
        limits = self._limits.get(key)
        return self._get_jwt_counters(key) if limits is None else self._add_key(key, limits)

    def _get_jwt_counters(self, key: str) -> Mapping[str, ModelCounters] | None:
        """The counters of a principal with a JWT."""
        if self._token_limits is None:
            return None
        principals = self.registry.recent_principals
        limiter, key_counters = principals.pop(key, (None, None))
        if key_counters is None or limiter is not self:
            key_counters = self.registry.build_key_counters(key, self._token_limits)
        principals[key] = self, key_counters
        if len(principals) > MAX_JWT_PRINCIPALS:
            principals.popitem(last=False)
        return key_counters.by_model


@functools.cache
def _reports_limits(kind: type) -> bool:
    """Whether a protocol has rate-limit headers. Cached, since ``issubclass`` is slow here."""
    return issubclass(kind, RateLimitHeaders)
