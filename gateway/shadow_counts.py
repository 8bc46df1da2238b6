"""What came of shadows, counted for Prometheus by the target that they were sent to."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.noting import ShadowComparison
from gateway.told import MetricDefinition

_SHADOW_LABELS: Final = ("model", "version")
_SHADOW_COUNTERS: Final = {
    name: MetricDefinition(f"interlingua_shadow_{name}", "counter", help_, labels)
    for name, help_, labels in (
        ("requests", "Shadows, by how they ended.", (*_SHADOW_LABELS, "outcome")),
        ("errors", "Shadows that failed, by the class of the error.", (*_SHADOW_LABELS, "error")),
        ("compared", "Answers that had to be the same as their shadows'.", _SHADOW_LABELS),
        ("equal", "Those that were.", _SHADOW_LABELS),
    )
}
SHADOW_METRICS: Final = (*_SHADOW_COUNTERS.values(),)
_OVERFLOW_LABEL: Final = "_other"
"""Stands for whatever comes when a table is full: a model ``*`` takes any name."""
_MAX_LABEL_SETS: Final = 1000
"""The entries of each table."""


class ShadowCollector(Collector):
    """Counts them."""

    def __init__(self) -> None:
        self._counts = {name: Counter[tuple[str, ...]]() for name in _SHADOW_COUNTERS}

    def record_shadow(self, shadowed: ShadowComparison) -> None:
        """One has ended, and so has its original."""
        shadow = shadowed.shadow
        arm = shadow.model, shadow.version
        self._increment("requests", (*arm, shadow.outcome))
        if shadow.error:
            self._increment("errors", (*arm, shadow.error))
        if shadowed.equal is not None:
            self._increment("compared", arm)
        if shadowed.equal:
            self._increment("equal", arm)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for name, told in _SHADOW_COUNTERS.items():
            yield told.build_family(self._counts[name].items())

    def _increment(self, name: str, key: tuple[str, ...]) -> None:
        counted = self._counts[name]
        if key not in counted and len(counted) >= _MAX_LABEL_SETS:
            key = (_OVERFLOW_LABEL,) * len(key)
        counted[key] += 1
