"""The usage of all limits, which outlives a configuration."""

import itertools
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

from msgspec import Struct

from gateway.config.schema import KeyRateLimitConfig, RateLimitConfig
from gateway.ratelimit.buckets import (
    SECONDS_PER_DAY,
    TOKEN_SCOPES,
    BucketState,
    ConcurrencyLimit,
    DailyBudget,
    LimitCounter,
    LimitScope,
    TokenBucket,
)
from gateway.ratelimit.leases import (
    Lease,
    LeasedBucket,
    LeasedSlots,
    LeaseStore,
    LeaseTerms,
    SharedLimit,
)
from gateway.ratelimit.reservation import ModelCounters
from protocols.core.interfaces import Clock


class KeyCounters(Struct, frozen=True, gc=False):
    """The counters of one key."""

    by_model: Mapping[str, ModelCounters]
    """The counters of a request, by its model; "" is any other model."""
    limits_by_model: Mapping[str, Sequence[LimitCounter]]
    """The counters of a model's own limits; "" are those over all models."""

    @property
    def counters(self) -> Iterator[LimitCounter]:
        """All counters of the key."""
        return itertools.chain.from_iterable(self.limits_by_model.values())

    @property
    def daily_budgets(self) -> Mapping[str, DailyBudget]:
        """This process's part of the daily budgets, by model."""
        budgets = {}
        for model, counters in self.limits_by_model.items():
            for one in counters:
                counter = one.local_counter if isinstance(one, LeasedBucket) else one
                if isinstance(counter, DailyBudget):
                    budgets[model] = counter
        return budgets


class KeyLimiter(Protocol):
    """A ``RateLimiter``, as far as the next configuration's reads it."""

    @property
    def used_keys(self) -> Collection[str]:
        """The keys that have been used."""


class CounterRegistry:
    """Makes counters. Counters of the same name share their usage, whatever their limits are."""

    def __init__(
        self,
        clock: Clock,
        unix_time: Callable[[], float],
        lease_store: LeaseStore | None = None,
        wake: Callable[[], object] = bool,
    ) -> None:
        """``unix_time`` returns Unix seconds. ``lease_store`` is that of shared limits.

        ``wake`` has new leases requested at once.
        """
        self.clock = clock
        self._unix_time = unix_time
        self._lease_store = lease_store
        self._wake = wake
        self._bucket_states = WeakValueDictionary[str, BucketState]()
        self._leases = WeakValueDictionary[str, Lease]()
        self._admission_counts: dict[tuple[LimitScope, ...], list[int]] = {}
        self.rejections = Tally[LimitScope]()
        """The number of rejected requests, by the scope of the limit."""
        self.limiters = WeakSet[KeyLimiter]()
        """The limiters that are in use."""
        self.recent_principals = OrderedDict[str, tuple[object, KeyCounters]]()
        """The limiter and the counters of each JWT principal, by name; the latest comes last."""

    def build_key_counters(self, key: str, limits: KeyRateLimitConfig) -> KeyCounters:
        """The counters of a key with these limits."""
        by_model: dict[str, list[LimitCounter]] = {}
        model_counters: dict[str, ModelCounters] = {}
        for model, model_limits in {"": limits, **(limits.models or {})}.items():
            by_model[model] = counters = list(self.build_counters(key, model, model_limits))
            all_counters = [*by_model[""], *counters] if model else counters
            admissions = self._admission_counts.setdefault(
                tuple({one.scope: 0 for one in all_counters}), [0]
            )
            model_counters[model] = ModelCounters(
                all=tuple(all_counters),
                largest_weight=min(
                    (one.amount for one in all_counters if one.scope in TOKEN_SCOPES), default=0
                ),
                admissions=admissions,
                requests=tuple(one for one in all_counters if one.scope == "requests"),
                tokens=tuple(one for one in all_counters if one.scope == "tokens"),
                concurrency=tuple(
                    one for one in all_counters if isinstance(one, ConcurrencyLimit | LeasedSlots)
                ),
                rejections=self.rejections,
            )
        return KeyCounters(model_counters, by_model)

    def build_counters(
        self, key: str, model: str, limits: RateLimitConfig
    ) -> Iterator[LimitCounter]:
        """The counters of a key's limits for one model; "" is all models together."""
        for scope, limit in _list_limits(limits):
            yield self._build_counter(f"{key}/{scope}/{model}", scope, limit, model)

    def count_admitted(self) -> Mapping[LimitScope, int]:
        """The number of admitted requests, by the scopes of their limits."""
        counts = Tally[LimitScope]()
        for scopes, [count] in self._admission_counts.items():
            counts.update(dict.fromkeys(scopes, count))
        return counts

    def _build_counter(
        self, name: str, scope: LimitScope, limit: SharedLimit, model: str
    ) -> LimitCounter:
        suffix = f" of the model {model!r}" if model else ""
        lease_store = self._lease_store
        if lease_store is None:
            return self._build_local_counter(
                scope, limit, self._bucket_states.setdefault(name, BucketState()), suffix
            )
        lease = self._leases.setdefault(name, Lease())
        amount = -(-limit.amount // lease_store.replicas)
        local_counter = self._build_local_counter(
            scope, SharedLimit(limit.kind, amount, limit.period), lease.local_state, suffix
        )
        description = self._build_local_counter(scope, limit, BucketState(), suffix).description
        terms = LeaseTerms(name, limit, description, lease_store.policy, self._wake)
        return (
            LeasedSlots(terms, local_counter, lease)
            if isinstance(local_counter, ConcurrencyLimit)
            else LeasedBucket(terms, local_counter, lease)
        )

    def _build_local_counter(
        self, scope: LimitScope, limit: SharedLimit, state: BucketState, suffix: str
    ) -> TokenBucket | DailyBudget | ConcurrencyLimit:
        if limit.kind == "slots":
            return ConcurrencyLimit(limit.amount, state, of=suffix)
        if limit.kind == "day":
            return DailyBudget(limit.amount, state, self._unix_time, of=suffix)
        return TokenBucket(limit.amount, limit.period, state, by_token=scope == "tokens", of=suffix)


def _list_limits(limits: RateLimitConfig) -> Iterator[tuple[LimitScope, SharedLimit]]:
    """The limits in the order in which they are checked."""
    if limits.concurrent is not None:
        yield "concurrency", SharedLimit("slots", limits.concurrent, 0)
    if limits.requests is not None:
        yield "requests", SharedLimit("rate", *limits.requests)
    if limits.tokens is not None:
        yield "tokens", SharedLimit("rate", *limits.tokens)
    if limits.budget is not None:
        yield "budget", SharedLimit("day", limits.budget, SECONDS_PER_DAY)
