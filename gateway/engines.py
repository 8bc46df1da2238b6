"""What the engines of local models hold and do, for Prometheus.

All but the restarts are the engine's own figures, a second old at most, and begin anew with it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol, runtime_checkable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.told import MetricDefinition

_ENGINE_GAUGES = {
    "running": "Rows and prompts in work.",
    "waiting": "Prompts, and samples of prompts, that have no place.",
    "batch": "Rows and prompts in the last step.",
    "kv_usage": "The share of the memory for keys and values that is in use, 0 to 1.",
    "kv_blocks": "Blocks of that memory.",
}
_ENGINE_COUNTERS = {
    "prompt_tokens": "Prompt tokens that went through the model.",
    "completion_tokens": "Tokens made.",
    "prefix_hits": "Prompt tokens whose keys and values were known, so that they were not read.",
    "preemptions": "Rows and prompts that gave up their memory, to be read again.",
    "steps": "Passes of the model.",
    "step_seconds": "Time in steps.",
    "queue_seconds": "Of all finished requests, how long they waited.",
    "prefill_seconds": "Of all finished requests, how long their prompts were read.",
    "decode_seconds": "Of all finished requests, how long their answers were made.",
    "restarts": "Starts of a new engine in the place of one that died or hung.",
}
_ENGINE_DEFINITIONS: Final = {
    name: MetricDefinition(
        f"interlingua_engine_{name}",
        "gauge" if name in _ENGINE_GAUGES else "counter",
        help_,
        ("backend",),
    )
    for name, help_ in (_ENGINE_GAUGES | _ENGINE_COUNTERS).items()
}
ENGINE_METRICS: Final = (*_ENGINE_DEFINITIONS.values(),)


@runtime_checkable
class SupportsEngineStats(Protocol):
    """A backend whose engine tells of itself."""

    def read_stats(self) -> Mapping[str, float]:
        """Its figures, by the names above without ``interlingua_engine_`` and ``_total``."""


class EngineCollector(Collector):
    """Asked whenever the page is read; nothing is kept."""

    def __init__(self, engines: Callable[[], Mapping[str, SupportsEngineStats]]) -> None:
        """``engines`` gives those there are now, by their backends' names."""
        self._get_engines = engines

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        told = {backend: engine.read_stats() for backend, engine in self._get_engines().items()}
        if not told:
            return
        for name, family in _ENGINE_DEFINITIONS.items():
            yield family.build_family(((backend,), its[name]) for backend, its in told.items())
