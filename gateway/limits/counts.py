"""What came of the keys' limits, counted for Prometheus.

Of a budget, each process tells its own part.
"""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.limits.limiter import RateLimiter
from gateway.told import MetricDefinition

RATELIMIT_DECISIONS: Final = MetricDefinition(
    "interlingua_ratelimit_decisions",
    "counter",
    "Requests that were held to a limit, by the limit's scope.",
    ("scope", "decision"),
)
BUDGET_TOKENS: Final = MetricDefinition(
    "interlingua_budget_tokens", "gauge", "What a key may use a day.", ("key", "model")
)
BUDGET_SPENT_TOKENS: Final = MetricDefinition(
    "interlingua_budget_spent_tokens",
    "gauge",
    "What is used of it today, with what running requests may use.",
    ("key", "model"),
)
RATE_LIMIT_METRICS: Final = (RATELIMIT_DECISIONS, BUDGET_TOKENS, BUDGET_SPENT_TOKENS)


class RateLimitCollector(Collector):
    """Counts them. ``limiter`` gives that of the configuration which is served, if it has one."""

    def __init__(self, limiter: Callable[[], RateLimiter | None]) -> None:
        self._get_limiter = limiter

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        limiter = self._get_limiter()
        admitted = {} if limiter is None else limiter.registry.count_admitted()
        refused = {} if limiter is None else limiter.registry.rejections
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
