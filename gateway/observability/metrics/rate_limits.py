"""Metrics of rate limits, and of the store that several gateways share.

Each process reports its part of a budget.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.observability.metrics.definition import MetricDefinition

RATELIMIT_DECISIONS: Final = MetricDefinition(
    "interlingua_ratelimit_decisions",
    "counter",
    "Requests checked against a limit, by scope and decision.",
    ("scope", "decision"),
)
BUDGET_TOKENS: Final = MetricDefinition(
    "interlingua_budget_tokens", "gauge", "Daily token budget of a key.", ("key", "model")
)
BUDGET_SPENT_TOKENS: Final = MetricDefinition(
    "interlingua_budget_spent_tokens",
    "gauge",
    "Tokens used of the daily budget, including reservations of running requests.",
    ("key", "model"),
)
RATE_LIMIT_METRICS: Final = (RATELIMIT_DECISIONS, BUDGET_TOKENS, BUDGET_SPENT_TOKENS)


class BudgetStats(Protocol):
    """The daily token budget of a key."""

    @property
    def amount(self) -> int:
        """Tokens per day."""

    @property
    def spent_today(self) -> int:
        """Tokens used or reserved today."""


class ScopeCounts(Protocol):
    """Numbers of requests by the scope of a limit."""

    def items(self) -> Iterable[tuple[str, int]]:
        """Each scope with its number."""


class DecisionStats(Protocol):
    """Counts of the requests that were checked against limits."""

    @property
    def rejections(self) -> ScopeCounts:
        """Rejected requests."""

    def count_admitted(self) -> ScopeCounts:
        """Admitted requests."""


class RateLimitStats(Protocol):
    """The rate limiter of a configuration."""

    @property
    def registry(self) -> DecisionStats:
        """The decisions."""

    @property
    def daily_budgets(self) -> Mapping[tuple[str, str], BudgetStats]:
        """The daily budgets by key and model."""


class RateLimitCollector(Collector):
    """Reads the rate limiter of the current configuration, which may have none."""

    def __init__(self, get_limiter: Callable[[], RateLimitStats | None]) -> None:
        self._get_limiter = get_limiter

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        limiter = self._get_limiter()
        admitted: ScopeCounts = {} if limiter is None else limiter.registry.count_admitted()
        refused: ScopeCounts = {} if limiter is None else limiter.registry.rejections
        days = {} if limiter is None else limiter.daily_budgets
        yield RATELIMIT_DECISIONS.build_family(
            ((scope, decision), count)
            for decision, counts in (("admitted", admitted), ("refused", refused))
            for scope, count in counts.items()
        )
        yield BUDGET_TOKENS.build_family((named, day.amount) for named, day in days.items())
        yield BUDGET_SPENT_TOKENS.build_family(
            (named, day.spent_today) for named, day in days.items()
        )


RATELIMIT_STORE_ERRORS: Final = MetricDefinition(
    "interlingua_ratelimit_store_errors",
    "counter",
    "Failed calls to the Redis server of shared limits.",
)
RATELIMIT_STORE_UP: Final = MetricDefinition(
    "interlingua_ratelimit_store_up",
    "gauge",
    "1 if limits are shared, 0 while the failure policy applies.",
    merge_mode="smallest",
)
RATE_LIMIT_STORE_METRICS: Final = (RATELIMIT_STORE_ERRORS, RATELIMIT_STORE_UP)


class StoreStats(Protocol):
    """The state of the store."""

    errors: int
    up: bool


class RateLimitStoreCollector(Collector):
    """Reports the state of the store."""

    def __init__(self, store: StoreStats) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield RATELIMIT_STORE_ERRORS.build_family([((), self._store.errors)])
        yield RATELIMIT_STORE_UP.build_family([((), float(self._store.up))])
