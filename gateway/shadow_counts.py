"""What came of shadows, counted for Prometheus by the target that they were sent to."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.noting import Shadowed
from gateway.told import Told

_ARM: Final = ("model", "version")
_FAMILIES: Final = {
    name: Told(f"interlingua_shadow_{name}", "counter", help_, labels)
    for name, help_, labels in (
        ("requests", "Shadows, by how they ended.", (*_ARM, "outcome")),
        ("errors", "Shadows that failed, by the class of the error.", (*_ARM, "error")),
        ("compared", "Answers that had to be the same as their shadows'.", _ARM),
        ("equal", "Those that were.", _ARM),
    )
}
TOLD: Final = (*_FAMILIES.values(),)
_OTHER: Final = "_other"
"""Stands for whatever comes when a table is full: a model ``*`` takes any name."""
_MOST: Final = 1000
"""The entries of each table."""


class ShadowCounts(Collector):
    """Counts them."""

    def __init__(self) -> None:
        self._counts = {name: Counter[tuple[str, ...]]() for name in _FAMILIES}

    def record_shadow(self, shadowed: Shadowed) -> None:
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
        for name, told in _FAMILIES.items():
            yield told.build_family(self._counts[name].items())

    def _increment(self, name: str, key: tuple[str, ...]) -> None:
        counted = self._counts[name]
        if key not in counted and len(counted) >= _MOST:
            key = (_OTHER,) * len(key)
        counted[key] += 1
