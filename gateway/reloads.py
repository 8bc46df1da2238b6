"""What came of reloads, counted for Prometheus."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway import told
from gateway.reload import Told

_RELOADS: Final = told.Told(
    "interlingua_config_reloads",
    "counter",
    "Reloads, by how they ended.",
    ("result",),
    "supervisor",
)
_WELL: Final = told.Told(
    "interlingua_config_last_reload_successful",
    "gauge",
    "Whether what was read last is served.",
    merged="supervisor",
)
_AT: Final = told.Told(
    "interlingua_config_last_reload_success_timestamp_seconds",
    "gauge",
    "When what is served was read.",
    merged="supervisor",
)
_INFO: Final = told.Told(
    "interlingua_config_info",
    "gauge",
    "The configuration that is served.",
    ("hash",),
    "supervisor",
)
TOLD: Final = (_RELOADS, _WELL, _AT, _INFO)


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
        yield _RELOADS.family(((result,), count) for result, count in self._results.items())
        yield _WELL.family([((), float(self._told.well))])
        yield _AT.family([((), self._at)])
        yield _INFO.family([((self._told.hash,), 1)])
