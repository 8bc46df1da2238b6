"""What is counted of exchanges."""

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.loss import Loss
from gateway.core.types import Usage
from gateway.metrics import Metrics
from gateway.telemetry import Record, silent


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Values by the name and the labels in the order of the labels' names."""
    families = text_string_to_metric_families(metrics.page().decode())
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def test_an_exchange_is_counted_by_its_labels() -> None:
    seen: list[Record] = []
    metrics = Metrics(seen.append, dict)
    record = Record(
        "r",
        dialect="openai",
        model="chat",
        version="2",
        backend="gpu",
        usage=Usage(3, 5, source="counted"),
        fell_back=("chat@1 WorkerFailed",),
        losses=(
            Loss("top_k", "dropped", path="sampling.top_k"),
            Loss("never heard of", "dropped"),
        ),
    )
    metrics.observe(record)
    metrics.observe(record)

    found = samples(metrics)

    assert found["interlingua_requests_total", "gpu", "openai", "chat", "ok", "2"] == 2
    assert found["interlingua_losses_total", "sampling.top_k", "chat", "dropped", "2"] == 2
    assert found["interlingua_losses_total", "_unknown", "chat", "dropped", "2"] == 2
    assert found["interlingua_tokens_total", "input", "chat", "counted", "2"] == 6
    assert found["interlingua_tokens_total", "output", "chat", "counted", "2"] == 10
    assert found["interlingua_fallbacks_total", "WorkerFailed", "chat@1"] == 2
    assert "never heard of" not in metrics.page().decode()
    assert seen == [record, record]


def test_nothing_is_told_before_there_is_anything() -> None:
    assert samples(Metrics(silent, dict)) == {}


def test_names_without_end_do_not_fill_the_memory() -> None:
    metrics = Metrics(silent, dict)
    for n in range(10_050):
        metrics.observe(Record("r", model=f"m{n}"))
    found = samples(metrics)
    assert len(found) == 10_001
    assert found["interlingua_requests_total", *["_other"] * 5] == 50


class Report(Struct):
    url: str
    state: str
    in_flight: int


class Pool:
    """A crew of two, one of them out."""

    discovery_failures = 3

    def snapshot(self) -> list[Report]:
        return [Report("http://a:1", "up", 4), Report("http://b:1", "out", 0)]


def test_workers_are_told_of_as_they_are_now() -> None:
    found = samples(Metrics(silent, lambda: {"gpu": Pool()}))
    assert found == {
        ("interlingua_worker_up", "gpu", "http://a:1"): 1,
        ("interlingua_worker_up", "gpu", "http://b:1"): 0,
        ("interlingua_worker_in_flight", "gpu", "http://a:1"): 4,
        ("interlingua_worker_in_flight", "gpu", "http://b:1"): 0,
        ("interlingua_discovery_failures_total", "gpu"): 3,
    }
