"""Metrics of configuration reloads."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.observability.metrics.definition import MetricDefinition

CONFIG_RELOADS: Final = MetricDefinition(
    "interlingua_config_reloads",
    "counter",
    "Configuration reloads, by result.",
    ("result",),
    "supervisor",
)
LAST_RELOAD_SUCCESSFUL: Final = MetricDefinition(
    "interlingua_config_last_reload_successful",
    "gauge",
    "1 if the last reload succeeded.",
    merge_mode="supervisor",
)
LAST_RELOAD_TIMESTAMP: Final = MetricDefinition(
    "interlingua_config_last_reload_success_timestamp_seconds",
    "gauge",
    "Unix time of the last successful reload.",
    merge_mode="supervisor",
)
CONFIG_INFO: Final = MetricDefinition(
    "interlingua_config_info",
    "gauge",
    "Hash of the current configuration; always 1.",
    ("hash",),
    "supervisor",
)
RELOAD_METRICS: Final = (CONFIG_RELOADS, LAST_RELOAD_SUCCESSFUL, LAST_RELOAD_TIMESTAMP, CONFIG_INFO)


class ReloadOutcome(Protocol):
    """The result of a reload."""

    @property
    def hash(self) -> str:
        """The hash of the configuration in effect after it."""

    @property
    def is_ok(self) -> bool:
        """Whether the new configuration is in effect."""


class ReloadCollector(Collector):
    """Counts reloads. The start of the gateway counts as a success, but not in the total."""

    def __init__(self, config_hash: str, now: Callable[[], float]) -> None:
        """``config_hash`` is that of the first configuration; ``now`` gives Unix seconds."""
        self._now = now
        self._config_hash = config_hash
        self._last_ok = True
        self._succeeded_at = now()
        self._results = Counter({"success": 0, "failure": 0})

    def record_reload(self, outcome: ReloadOutcome) -> None:
        """Count a reload that has ended."""
        self._config_hash, self._last_ok = outcome.hash, outcome.is_ok
        self._results["success" if outcome.is_ok else "failure"] += 1
        if outcome.is_ok:
            self._succeeded_at = self._now()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield CONFIG_RELOADS.build_family(
            ((result,), count) for result, count in self._results.items()
        )
        yield LAST_RELOAD_SUCCESSFUL.build_family([((), float(self._last_ok))])
        yield LAST_RELOAD_TIMESTAMP.build_family([((), self._succeeded_at)])
        yield CONFIG_INFO.build_family([((self._config_hash,), 1)])
