"""Rate limits of API keys: reserves each request's part of them and settles it at its end."""

import functools
import itertools
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol, cast
from weakref import WeakSet, WeakValueDictionary

from msgspec import Struct

from gateway.config.schema import KeyRateLimitConfig, RateLimitConfig
from gateway.ratelimit.buckets import (
    MIN_RETRY_AFTER,
    NEVER_AVAILABLE,
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
    LeasedCounter,
    LeasedSlots,
    LeaseStore,
    LeaseTerms,
    SharedLimit,
)
from gateway.ratelimit.token_estimate import estimate_tokens
from protocols.core.catalog import ModelInfo
from protocols.core.errors import GatewayError, Overloaded, QuotaExceeded, RateLimitExceeded
from protocols.core.events import Usage
from protocols.core.interfaces import (
    ClientAdapter,
    Clock,
    Headers,
    RateLimitHeaders,
    RateLimitStatus,
)

# The limits of one key, and what one request took of them.


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


# The usage of all limits, which outlives a configuration.


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
        self.limiters = WeakSet["RateLimiter"]()
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
        for key in {key for limiter in registry.limiters for key in limiter._keys} & keys.keys():  # noqa: SLF001 - of the same class
            self._add_key(key, keys[key])
        registry.limiters.add(self)

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
