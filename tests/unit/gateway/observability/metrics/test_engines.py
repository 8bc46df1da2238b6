"""The metrics of local models."""

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from gateway.observability.metrics.engines import _ENGINE_COUNTERS, _ENGINE_GAUGES, EngineCollector
from gateway.observability.metrics.requests import MetricsCollector


class FakeEngine:
    """An engine with fixed statistics."""

    def __init__(self, first: float) -> None:
        self._first = first

    def read_stats(self) -> Mapping[str, float]:
        return {
            name: self._first + at for at, name in enumerate((*_ENGINE_GAUGES, *_ENGINE_COUNTERS))
        }


def test_engine_metrics_are_labeled_by_backend() -> None:
    metrics = MetricsCollector(lambda record: None, dict)
    metrics.register(EngineCollector(lambda: {"tiny": FakeEngine(0), "large": FakeEngine(100)}))

    families = text_string_to_metric_families(metrics.render_page().decode())
    samples = {
        (sample.name, sample.labels["backend"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("interlingua_engine_")
    }

    assert len(samples) == 2 * (len(_ENGINE_GAUGES) + len(_ENGINE_COUNTERS))
    assert samples["interlingua_engine_running", "large"] == 100
    assert samples["interlingua_engine_kv_cache_usage", "tiny"] == 3
    assert samples["interlingua_engine_prompt_tokens_total", "tiny"] == len(_ENGINE_GAUGES)


def test_no_engine_metrics_are_exported_without_engines() -> None:
    assert list(EngineCollector(dict).collect()) == []
