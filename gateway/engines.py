"""What the engines of local models hold and do, for Prometheus.

interlingua_engine_running{backend}
interlingua_engine_waiting{backend}
interlingua_engine_batch{backend}
interlingua_engine_kv_usage{backend}
interlingua_engine_kv_blocks{backend}
interlingua_engine_prompt_tokens_total{backend}
interlingua_engine_completion_tokens_total{backend}
interlingua_engine_prefix_hits_total{backend}
interlingua_engine_preemptions_total{backend}
interlingua_engine_steps_total{backend}
interlingua_engine_step_seconds_total{backend}
interlingua_engine_queue_seconds_total{backend}
interlingua_engine_prefill_seconds_total{backend}
interlingua_engine_decode_seconds_total{backend}
interlingua_engine_restarts_total{backend}

All but the last are the engine's own figures, a second old at most, and begin anew with it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_GAUGES = {
    "running": "Rows and prompts in work.",
    "waiting": "Prompts, and samples of prompts, that have no place.",
    "batch": "Rows and prompts in the last step.",
    "kv_usage": "The share of the memory for keys and values that is in use, 0 to 1.",
    "kv_blocks": "Blocks of that memory.",
}
_COUNTERS = {
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


@runtime_checkable
class Engine(Protocol):
    """A backend whose engine tells of itself."""

    def figures(self) -> Mapping[str, float]:
        """Its figures, by the names above without ``interlingua_engine_`` and ``_total``."""


class Engines(Collector):
    """Asked whenever the page is read; nothing is kept."""

    def __init__(self, engines: Callable[[], Mapping[str, Engine]]) -> None:
        """``engines`` gives those there are now, by their backends' names."""
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        told = {backend: engine.figures() for backend, engine in self._engines().items()}
        if not told:
            return
        for name, text in _GAUGES.items():
            family = GaugeMetricFamily(f"interlingua_engine_{name}", text, labels=("backend",))
            yield _filled(family, name, told)
        for name, text in _COUNTERS.items():
            counted = CounterMetricFamily(f"interlingua_engine_{name}", text, labels=("backend",))
            yield _filled(counted, name, told)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    name: str,
    told: Mapping[str, Mapping[str, float]],
) -> Metric:
    for backend, figures in told.items():
        family.add_metric([backend], figures[name])
    return family
