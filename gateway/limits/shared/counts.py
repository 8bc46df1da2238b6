"""How it goes with the store of shared limits, counted for Prometheus."""

from collections.abc import Iterator
from typing import Final, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.told import MetricDefinition

RATELIMIT_STORE_ERRORS: Final = MetricDefinition(
    "interlingua_ratelimit_store_errors",
    "counter",
    "Times that the Redis of shared limits was asked in vain.",
)
RATELIMIT_STORE_UP: Final = MetricDefinition(
    "interlingua_ratelimit_store_up",
    "gauge",
    "Whether limits are shared: 0 while the policy for failures holds.",
    merge_mode="smallest",
)
RATE_LIMIT_STORE_METRICS: Final = (RATELIMIT_STORE_ERRORS, RATELIMIT_STORE_UP)


class StoreStats(Protocol):
    """What is known of the store."""

    errors: int
    up: bool


class RateLimitStoreCollector(Collector):
    """Tells it."""

    def __init__(self, store: StoreStats) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield RATELIMIT_STORE_ERRORS.build_family([((), self._store.errors)])
        yield RATELIMIT_STORE_UP.build_family([((), float(self._store.up))])
