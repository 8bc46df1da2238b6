"""What came of reloads, counted for Prometheus."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway import told as gateway_told
from gateway.reload import ReloadResult

CONFIG_RELOADS: Final = gateway_told.MetricDefinition(
    "interlingua_config_reloads",
    "counter",
    "Reloads, by how they ended.",
    ("result",),
    "supervisor",
)
LAST_RELOAD_SUCCESSFUL: Final = gateway_told.MetricDefinition(
    "interlingua_config_last_reload_successful",
    "gauge",
    "Whether what was read last is served.",
    merge_mode="supervisor",
)
LAST_RELOAD_TIMESTAMP: Final = gateway_told.MetricDefinition(
    "interlingua_config_last_reload_success_timestamp_seconds",
    "gauge",
    "When what is served was read.",
    merge_mode="supervisor",
)
CONFIG_INFO: Final = gateway_told.MetricDefinition(
    "interlingua_config_info",
    "gauge",
    "The configuration that is served.",
    ("hash",),
    "supervisor",
)
RELOAD_METRICS: Final = (CONFIG_RELOADS, LAST_RELOAD_SUCCESSFUL, LAST_RELOAD_TIMESTAMP, CONFIG_INFO)


class ReloadCollector(Collector):
    """Counts them. The gateway's start counts as one that went well, and not in the total."""

    def __init__(self, digest: str, now: Callable[[], float]) -> None:
        """``digest`` is what is served at first; ``now`` gives Unix seconds."""
        self._now = now
        self._last_result = ReloadResult(digest)
        self._succeeded_at = now()
        self._results = Counter({"success": 0, "failure": 0})

    def record_reload(self, told: ReloadResult) -> None:
        """One has ended."""
        self._last_result = told
        self._results["success" if told.is_ok else "failure"] += 1
        if told.is_ok:
            self._succeeded_at = self._now()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield CONFIG_RELOADS.build_family(
            ((result,), count) for result, count in self._results.items()
        )
        yield LAST_RELOAD_SUCCESSFUL.build_family([((), float(self._last_result.is_ok))])
        yield LAST_RELOAD_TIMESTAMP.build_family([((), self._succeeded_at)])
        yield CONFIG_INFO.build_family([((self._last_result.hash,), 1)])
