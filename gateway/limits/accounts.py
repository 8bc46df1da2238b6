"""What is used of every limit, for as long as the gateway runs, whatever its configuration."""

import itertools
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from weakref import WeakValueDictionary

from msgspec import Struct

from gateway.limits.allowance import KeyRateLimits, ModelCounters, RateLimits
from gateway.limits.counters import (
    SECONDS_PER_DAY,
    TOKEN_SCOPES,
    BucketState,
    ConcurrencyLimit,
    DailyBudget,
    LimitCounter,
    LimitScope,
    TokenBucket,
)
from gateway.limits.lent import Lease, LeasedBucket, LeasedSlots, LeaseTerms
from gateway.limits.ports import LeaseStore, SharedLimit
from protocols.core.interfaces import Clock


class KeyCounters(Struct, frozen=True):
    """What one key is held to."""

    by_model: Mapping[str, ModelCounters]
    """What a request is counted by, by its model; "" stands for any other."""
    limits_by_model: Mapping[str, Sequence[LimitCounter]]
    """The same without those of every model."""

    @property
    def counters(self) -> Iterator[LimitCounter]:
        """All of them."""
        return itertools.chain.from_iterable(self.limits_by_model.values())

    @property
    def daily_budgets(self) -> Mapping[str, DailyBudget]:
        """This process's part of the budgets, by the model."""
        found = {}
        for model, counters in self.limits_by_model.items():
            for one in counters:
                part = one.local_counter if isinstance(one, LeasedBucket) else one
                if isinstance(part, DailyBudget):
                    found[model] = part
        return found


class CounterRegistry:
    """Makes counters: two of one name share what is used, whichever limits they have."""

    def __init__(
        self,
        clock: Clock,
        unix: Callable[[], float],
        lender: LeaseStore | None = None,
        wake: Callable[[], object] = bool,
    ) -> None:
        """``unix`` gives Unix seconds. ``lender`` is who lends, where limits are shared.

        ``wake`` has it asked at once.
        """
        self.clock = clock
        self._unix_time = unix
        self._lease_store = lender
        self._wake = wake
        self._bucket_states = WeakValueDictionary[str, BucketState]()
        self._leases = WeakValueDictionary[str, Lease]()
        self._admission_counts: dict[tuple[LimitScope, ...], list[int]] = {}
        self.rejections = Tally[LimitScope]()
        """How many requests were, by what they lacked."""
        self.recent_holders = OrderedDict[str, tuple[object, KeyCounters]]()
        """Who has a token, by the name, and by which limiter; who asked last comes last."""

    def build_key_counters(self, key: str, rates: KeyRateLimits) -> KeyCounters:
        """What the holder of a key is held to."""
        own: dict[str, list[LimitCounter]] = {}
        models: dict[str, ModelCounters] = {}
        for model, told in {"": rates.overall, **rates.models}.items():
            own[model] = made = list(self.build_counters(key, model, told))
            every = [*own[""], *made] if model else made
            tally = self._admission_counts.setdefault(tuple({one.scope: 0 for one in every}), [0])
            models[model] = ModelCounters(
                tuple(every),
                min((one.amount for one in every if one.scope in TOKEN_SCOPES), default=0),
                tally,
                tuple(one for one in every if one.scope == "requests"),
                tuple(one for one in every if one.scope == "tokens"),
            )
        return KeyCounters(models, own)

    def build_counters(self, key: str, model: str, rates: RateLimits) -> Iterator[LimitCounter]:
        """What a key's requests for one model are counted by; "" stands for every model."""
        for scope, limit in _list_limits(rates):
            yield self._build_counter(f"{key}/{scope}/{model}", scope, limit, model)

    def count_admitted(self) -> Mapping[LimitScope, int]:
        """How many requests were, by what they were counted by."""
        found = Tally[LimitScope]()
        for scopes, [count] in self._admission_counts.items():
            found.update(dict.fromkeys(scopes, count))
        return found

    def _build_counter(
        self, name: str, scope: LimitScope, limit: SharedLimit, model: str
    ) -> LimitCounter:
        of = f" of the model {model!r}" if model else ""
        lender = self._lease_store
        if lender is None:
            return self._build_local_counter(
                scope, limit, self._bucket_states.setdefault(name, BucketState()), of
            )
        loan = self._leases.setdefault(name, Lease())
        part = -(-limit.amount // lender.replicas)
        own = self._build_local_counter(
            scope, SharedLimit(limit.kind, part, limit.period), loan.local_state, of
        )
        told = self._build_local_counter(scope, limit, BucketState(), of).description
        terms = LeaseTerms(name, limit, told, lender.policy, self._wake)
        return (
            LeasedSlots(terms, own, loan)
            if isinstance(own, ConcurrencyLimit)
            else LeasedBucket(terms, own, loan)
        )

    def _build_local_counter(
        self, scope: LimitScope, limit: SharedLimit, spent: BucketState, of: str
    ) -> TokenBucket | DailyBudget | ConcurrencyLimit:
        if limit.kind == "slots":
            return ConcurrencyLimit(limit.amount, spent, of=of)
        if limit.kind == "day":
            return DailyBudget(limit.amount, spent, self._unix_time, of=of)
        return TokenBucket(limit.amount, limit.period, spent, by_token=scope == "tokens", of=of)


def _list_limits(rates: RateLimits) -> Iterator[tuple[LimitScope, SharedLimit]]:
    """In the order in which they are looked at."""
    if rates.max_concurrency is not None:
        yield "concurrency", SharedLimit("slots", rates.max_concurrency, 0)
    if rates.requests is not None:
        yield "requests", SharedLimit("rate", *rates.requests)
    if rates.tokens is not None:
        yield "tokens", SharedLimit("rate", *rates.tokens)
    if rates.daily_budget is not None:
        yield "budget", SharedLimit("day", rates.daily_budget, SECONDS_PER_DAY)
