"""Metrics of shadow traffic, by the target of the copy."""

from collections import Counter
from collections.abc import Iterator
from typing import Final, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.observability.metrics.definition import MetricDefinition, increment_bounded

_SHADOW_LABELS: Final = ("model", "version")
_SHADOW_COUNTERS: Final = {
    name: MetricDefinition(f"interlingua_shadow_{name}", "counter", help_, labels)
    for name, help_, labels in (
        ("requests", "Shadow requests, by outcome.", (*_SHADOW_LABELS, "outcome")),
        ("errors", "Failed shadow requests, by error class.", (*_SHADOW_LABELS, "error")),
        ("compared", "Shadow responses compared with the primary response.", _SHADOW_LABELS),
        ("equal", "Shadow responses equal to the primary response.", _SHADOW_LABELS),
    )
}
SHADOW_METRICS: Final = (*_SHADOW_COUNTERS.values(),)
_MAX_LABEL_SETS: Final = 1000
"""Maximum entries per table."""


class ShadowResult(Protocol):
    """How one shadow request ended."""

    @property
    def model(self) -> str:
        """The model that it was sent to."""

    @property
    def version(self) -> str:
        """The version of that model."""

    @property
    def outcome(self) -> str:
        """How it ended."""

    @property
    def error(self) -> str:
        """The class of the error, or ""."""


class ComparedRequest(Protocol):
    """A client's request and its shadow, both ended."""

    @property
    def shadow(self) -> ShadowResult:
        """The shadow's result."""

    @property
    def equal(self) -> bool | None:
        """Whether both responses are equal; None if they were not compared."""


class ShadowCollector(Collector):
    """Counts shadow requests and comparisons."""

    def __init__(self) -> None:
        self._counts = {name: Counter[tuple[str, ...]]() for name in _SHADOW_COUNTERS}

    def record_shadow(self, pair: ComparedRequest) -> None:
        """Count a shadow request that has ended, as has its primary request."""
        shadow = pair.shadow
        target = shadow.model, shadow.version
        self._increment("requests", (*target, shadow.outcome))
        if shadow.error:
            self._increment("errors", (*target, shadow.error))
        if pair.equal is not None:
            self._increment("compared", target)
        if pair.equal:
            self._increment("equal", target)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for name, counter in _SHADOW_COUNTERS.items():
            yield counter.build_family(self._counts[name].items())

    def _increment(self, name: str, key: tuple[str, ...]) -> None:
        increment_bounded(self._counts[name], key, _MAX_LABEL_SETS)
