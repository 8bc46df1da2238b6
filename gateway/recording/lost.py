"""What was to be kept of exchanges and is lost, counted for Prometheus.

interlingua_log_lines_lost_total
interlingua_usage_rows_lost_total
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_TOLD: Final = {
    "log_lines": "Lines of the log that were not written: nobody took them.",
    "usage_rows": "Exchanges without a row of usage: it could not be written.",
}


class Lost(Collector):
    """Counts it."""

    def __init__(self, counts: Mapping[str, Callable[[], int]]) -> None:
        """What gives each count, by its name: ``log_lines``, ``usage_rows``."""
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for name, count in self._counts.items():
            yield CounterMetricFamily(f"interlingua_{name}_lost", _TOLD[name], value=count())
