"""What was to be kept of exchanges and is lost, counted for Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.told import MetricDefinition

_DROPPED_COUNTERS: Final = {
    name: MetricDefinition(f"interlingua_{name}_lost", "counter", help_)
    for name, help_ in (
        ("log_lines", "Lines of the log that were not written: nobody took them."),
        ("usage_rows", "Exchanges without a row of usage: it could not be written."),
        ("traces", "Exchanges that were to be traced and are not: no collector took them in time."),
    )
}
DROPPED_RECORD_METRICS: Final = (*_DROPPED_COUNTERS.values(),)


class DroppedRecordCollector(Collector):
    """Counts it."""

    def __init__(self, counts: Mapping[str, Callable[[], int]]) -> None:
        """What gives each count, by its name: ``log_lines``, ``usage_rows``, ``traces``."""
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for name, count in self._counts.items():
            yield _DROPPED_COUNTERS[name].build_family([((), count())])
