"""What came of shadows, counted for Prometheus by the target that they were sent to.

interlingua_shadow_requests_total{model,version,outcome}
interlingua_shadow_errors_total{model,version,error}
interlingua_shadow_compared_total{model,version}
interlingua_shadow_equal_total{model,version}
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.noting import Shadowed

_ARM: Final = ("model", "version")
_FAMILIES: Final = {
    "requests": ("Shadows, by how they ended.", (*_ARM, "outcome")),
    "errors": ("Shadows that failed, by the class of the error.", (*_ARM, "error")),
    "compared": ("Answers that had to be the same as their shadows'.", _ARM),
    "equal": ("Those that were.", _ARM),
}
_OTHER: Final = "_other"
"""Stands for whatever comes when a table is full: a model ``*`` takes any name."""
_MOST: Final = 1000
"""The entries of each table."""


class ShadowCounts(Collector):
    """Counts them."""

    def __init__(self) -> None:
        self._counted = {name: Counter[tuple[str, ...]]() for name in _FAMILIES}

    def tell(self, shadowed: Shadowed) -> None:
        """One has ended, and so has its original."""
        shadow = shadowed.shadow
        arm = shadow.model, shadow.version
        self._add("requests", (*arm, shadow.outcome))
        if shadow.error:
            self._add("errors", (*arm, shadow.error))
        if shadowed.equal is not None:
            self._add("compared", arm)
        if shadowed.equal:
            self._add("equal", arm)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for name, (told, labels) in _FAMILIES.items():
            family = CounterMetricFamily(f"interlingua_shadow_{name}", told, labels=labels)
            for key, count in self._counted[name].items():
                family.add_metric(key, count)
            yield family

    def _add(self, name: str, key: tuple[str, ...]) -> None:
        counted = self._counted[name]
        if key not in counted and len(counted) >= _MOST:
            key = (_OTHER,) * len(key)
        counted[key] += 1
