"""How it goes with the store of shared limits, counted for Prometheus."""

from collections.abc import Iterator
from typing import Final, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.told import Told

_ERRORS: Final = Told(
    "interlingua_ratelimit_store_errors",
    "counter",
    "Times that the Redis of shared limits was asked in vain.",
)
_UP: Final = Told(
    "interlingua_ratelimit_store_up",
    "gauge",
    "Whether limits are shared: 0 while the policy for failures holds.",
    merge_mode="smallest",
)
TOLD: Final = (_ERRORS, _UP)


class Asked(Protocol):
    """What is known of the store."""

    errors: int
    up: bool


class StoreCounts(Collector):
    """Tells it."""

    def __init__(self, store: Asked) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield _ERRORS.build_family([((), self._store.errors)])
        yield _UP.build_family([((), float(self._store.up))])
