"""The metrics of shadow requests."""

from prometheus_client.registry import CollectorRegistry

from gateway.observability.metrics.shadows import ShadowCollector
from gateway.pipeline.shadow_comparison import ShadowComparison, ShadowOutcome, ShadowSide


def make_comparison(
    outcome: ShadowOutcome, error: str = "", *, equal: bool | None = None, name: str = "c"
) -> ShadowComparison:
    shadow = ShadowSide(name, "2", outcome, error)
    return ShadowComparison("r", "r-shadow", ShadowSide("c", "1"), shadow, equal=equal)


def test_shadow_requests_are_counted_by_outcome() -> None:
    counts, registry = ShadowCollector(), CollectorRegistry()
    registry.register(counts)
    for one in (
        make_comparison("ok", equal=True),
        make_comparison("ok", equal=False),
        make_comparison("ok"),
        make_comparison("dropped"),
        make_comparison("worker_error", "WorkerFailed"),
    ):
        counts.record_shadow(one)

    def value(name: str, **labels: str) -> float | None:
        labels = {"model": "c", "version": "2"} | labels
        return registry.get_sample_value(f"interlingua_shadow_{name}_total", labels)

    assert value("requests", outcome="ok") == 3
    assert value("requests", outcome="dropped") == 1
    assert value("requests", outcome="worker_error") == 1
    assert value("errors", error="WorkerFailed") == 1
    assert value("errors", error="") is None
    assert (value("compared"), value("equal")) == (2, 1)


def test_shadow_label_values_are_bounded() -> None:
    counts = ShadowCollector()
    for n in range(1010):
        counts.record_shadow(make_comparison("ok", name=f"m{n}"))
    families = {family.name: family.samples for family in counts.collect()}

    samples = families["interlingua_shadow_requests"]
    assert len(samples) == 1001
    assert [one.value for one in samples if one.labels["model"] == "_other"] == [10]
