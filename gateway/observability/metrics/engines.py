"""Metrics of the engines of local models.

All numbers but the restarts come from the engine process, are at most one second old, and start at
0 when the engine restarts.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol, runtime_checkable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.observability.metrics.definition import MetricDefinition

_ENGINE_GAUGES = {
    "running": "Sequences and prompts being processed.",
    "waiting": "Prompts, and samples of prompts, waiting for a slot.",
    "batch_size": "Sequences and prompts in the last step.",
    "kv_cache_usage": "Used fraction of the KV cache, 0 to 1.",
    "kv_cache_blocks": "Blocks in the KV cache.",
}
_ENGINE_COUNTERS = {
    "prompt_tokens": "Prompt tokens processed by the model.",
    "completion_tokens": "Generated tokens.",
    "prefix_cache_hit_tokens": "Prompt tokens found in the prefix cache.",
    "preemptions": "Sequences and prompts that released their KV cache and are recomputed.",
    "steps": "Forward passes of the model.",
    "step_seconds": "Time in forward passes.",
    "queue_seconds": "Queue time of finished requests, in total.",
    "prefill_seconds": "Prefill time of finished requests, in total.",
    "decode_seconds": "Decode time of finished requests, in total.",
    "draft_tokens": "Tokens proposed by prompt lookup.",
    "accepted_draft_tokens": "Proposed tokens that the model generated.",
    "restarts": "Restarts of an engine that died or hung.",
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
    """A backend whose engine reports statistics."""

    def read_stats(self) -> Mapping[str, float]:
        """Its statistics, by metric name without ``interlingua_engine_`` and ``_total``."""


class EngineCollector(Collector):
    """Reads the engines whenever the page is rendered."""

    def __init__(self, get_engines: Callable[[], Mapping[str, SupportsEngineStats]]) -> None:
        """``get_engines`` gives the current engines by backend name."""
        self._get_engines = get_engines

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        stats = {backend: engine.read_stats() for backend, engine in self._get_engines().items()}
        if not stats:
            return
        for name, definition_ in _ENGINE_DEFINITIONS.items():
            yield definition_.build_family(
                ((backend,), values[name]) for backend, values in stats.items()
            )
