"""What came of reloads, counted for Prometheus.

interlingua_config_reloads_total{result}
interlingua_config_last_reload_successful
interlingua_config_last_reload_success_timestamp_seconds
interlingua_config_info{hash}
"""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.reload import Told


class Reloads(Collector):
    """Counts them. The gateway's start counts as one that went well, and not in the total."""

    def __init__(self, digest: str, now: Callable[[], float]) -> None:
        """``digest`` is what is served at first; ``now`` gives Unix seconds."""
        self._now = now
        self._told = Told(digest)
        self._at = now()
        self._results = Counter({"success": 0, "failure": 0})

    def tell(self, told: Told) -> None:
        """One has ended."""
        self._told = told
        self._results["success" if told.well else "failure"] += 1
        if told.well:
            self._at = self._now()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        name = "interlingua_config"
        results = CounterMetricFamily(
            f"{name}_reloads", "Reloads, by how they ended.", labels=("result",)
        )
        for result, count in self._results.items():
            results.add_metric([result], count)
        info = GaugeMetricFamily(
            f"{name}_info", "The configuration that is served.", labels=("hash",)
        )
        info.add_metric([self._told.hash], 1)
        yield results
        yield GaugeMetricFamily(
            f"{name}_last_reload_successful",
            "Whether what was read last is served.",
            value=float(self._told.well),
        )
        yield GaugeMetricFamily(
            f"{name}_last_reload_success_timestamp_seconds",
            "When what is served was read.",
            value=self._at,
        )
        yield info
