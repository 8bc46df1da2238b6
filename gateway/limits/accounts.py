"""What is used of every limit, for as long as the gateway runs, whatever its configuration."""

import itertools
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from weakref import WeakValueDictionary

from msgspec import Struct

from gateway.core.context import Clock
from gateway.limits.allowance import Counters, KeyRates, Rates
from gateway.limits.counters import DAY, WEIGHING, Counter, Day, Rate, Scope, Slots, Spent
from gateway.limits.lent import Amounts, Loan, Seats, Terms
from gateway.limits.ports import Lender, Limit


class Held(Struct, frozen=True):
    """What one key is held to."""

    by_model: Mapping[str, Counters]
    """What a request is counted by, by its model; "" stands for any other."""
    limits_by_model: Mapping[str, Sequence[Counter]]
    """The same without those of every model."""

    @property
    def counters(self) -> Iterator[Counter]:
        """All of them."""
        return itertools.chain.from_iterable(self.limits_by_model.values())

    @property
    def daily_budgets(self) -> Mapping[str, Day]:
        """This process's part of the budgets, by the model."""
        found = {}
        for model, counters in self.limits_by_model.items():
            for one in counters:
                part = one.local_counter if isinstance(one, Amounts) else one
                if isinstance(part, Day):
                    found[model] = part
        return found


class Accounts:
    """Makes counters: two of one name share what is used, whichever limits they have."""

    def __init__(
        self,
        clock: Clock,
        unix: Callable[[], float],
        lender: Lender | None = None,
        wake: Callable[[], object] = bool,
    ) -> None:
        """``unix`` gives Unix seconds. ``lender`` is who lends, where limits are shared.

        ``wake`` has it asked at once.
        """
        self.clock = clock
        self._unix_time = unix
        self._lease_store = lender
        self._wake = wake
        self._bucket_states = WeakValueDictionary[str, Spent]()
        self._leases = WeakValueDictionary[str, Loan]()
        self._admission_counts: dict[tuple[Scope, ...], list[int]] = {}
        self.rejections = Tally[Scope]()
        """How many requests were, by what they lacked."""
        self.recent_holders = OrderedDict[str, tuple[object, Held]]()
        """Who has a token, by the name, and by which limiter; who asked last comes last."""

    def build_key_counters(self, key: str, rates: KeyRates) -> Held:
        """What the holder of a key is held to."""
        own: dict[str, list[Counter]] = {}
        models: dict[str, Counters] = {}
        for model, told in {"": rates.overall, **rates.models}.items():
            own[model] = made = list(self.build_counters(key, model, told))
            every = [*own[""], *made] if model else made
            tally = self._admission_counts.setdefault(tuple({one.scope: 0 for one in every}), [0])
            models[model] = Counters(
                tuple(every),
                min((one.amount for one in every if one.scope in WEIGHING), default=0),
                tally,
                tuple(one for one in every if one.scope == "requests"),
                tuple(one for one in every if one.scope == "tokens"),
            )
        return Held(models, own)

    def build_counters(self, key: str, model: str, rates: Rates) -> Iterator[Counter]:
        """What a key's requests for one model are counted by; "" stands for every model."""
        for scope, limit in _limits(rates):
            yield self._build_counter(f"{key}/{scope}/{model}", scope, limit, model)

    def count_admitted(self) -> Mapping[Scope, int]:
        """How many requests were, by what they were counted by."""
        found = Tally[Scope]()
        for scopes, [count] in self._admission_counts.items():
            found.update(dict.fromkeys(scopes, count))
        return found

    def _build_counter(self, name: str, scope: Scope, limit: Limit, model: str) -> Counter:
        of = f" of the model {model!r}" if model else ""
        lender = self._lease_store
        if lender is None:
            return self._build_local_counter(
                scope, limit, self._bucket_states.setdefault(name, Spent()), of
            )
        loan = self._leases.setdefault(name, Loan())
        part = -(-limit.amount // lender.replicas)
        own = self._build_local_counter(
            scope, Limit(limit.kind, part, limit.period), loan.local_state, of
        )
        told = self._build_local_counter(scope, limit, Spent(), of).description
        terms = Terms(name, limit, told, lender.policy, self._wake)
        return Seats(terms, own, loan) if isinstance(own, Slots) else Amounts(terms, own, loan)

    def _build_local_counter(
        self, scope: Scope, limit: Limit, spent: Spent, of: str
    ) -> Rate | Day | Slots:
        if limit.kind == "slots":
            return Slots(limit.amount, spent, of=of)
        if limit.kind == "day":
            return Day(limit.amount, spent, self._unix_time, of=of)
        return Rate(limit.amount, limit.period, spent, by_token=scope == "tokens", of=of)


def _limits(rates: Rates) -> Iterator[tuple[Scope, Limit]]:
    """In the order in which they are looked at."""
    if rates.max_concurrency is not None:
        yield "concurrency", Limit("slots", rates.max_concurrency, 0)
    if rates.requests is not None:
        yield "requests", Limit("rate", *rates.requests)
    if rates.tokens is not None:
        yield "tokens", Limit("rate", *rates.tokens)
    if rates.daily_budget is not None:
        yield "budget", Limit("day", rates.daily_budget, DAY)
