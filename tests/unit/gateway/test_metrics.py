"""What is counted of exchanges."""

import pytest
from msgspec import Struct
from msgspec.structs import replace
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


RECORD = Record(
    "r",
    dialect="openai",
    model="chat",
    version="2",
    split="rollout",
    backend="gpu",
    first_token=0.1,
    duration=1.0,
    usage=Usage(3, 5, source="counted"),
    finish=("eos", "length"),
    losses=(
        Loss("top_k", "dropped", path="sampling.top_k"),
        Loss("never heard of", "dropped"),
    ),
)


def test_an_exchange_is_counted_by_its_labels() -> None:
    seen: list[Record] = []
    metrics = Metrics(seen.append, dict)
    metrics.observe(RECORD)
    metrics.observe(RECORD)
    cut = replace(RECORD, outcome="truncated", error="StreamBroken", losses=())
    metrics.observe(cut)

    found = samples(metrics)

    def one(name: str, **labels: str) -> float:
        every = {"model": "chat", "split": "rollout", "version": "2"} | labels
        return found[f"interlingua_{name}", *(every[label] for label in sorted(every))]

    asked = {"dialect": "openai", "backend": "gpu"}
    assert one("requests_total", **asked, outcome="ok") == 2
    assert one("requests_total", **asked, outcome="truncated") == 1
    assert one("errors_total", error="StreamBroken") == 1
    assert one("losses_total", field="sampling.top_k", reason="dropped") == 2
    assert one("losses_total", field="_unknown", reason="dropped") == 2
    assert one("lossy_requests_total") == 2
    assert one("tokens_total", direction="input", source="counted") == 9
    assert one("tokens_total", direction="output", source="counted") == 15
    assert one("finishes_total", reason="length") == 3
    assert "never heard of" not in metrics.page().decode()
    assert seen == [RECORD, RECORD, cut]


@pytest.mark.parametrize(
    ("name", "count", "total", "edge", "below"),
    [
        ("time_to_first_token_seconds", 3, 0.3, "0.1", 3),
        ("request_duration_seconds", 2, 2.0, "1.28", 2),
        ("request_duration_seconds", 2, 2.0, "0.64", 0),
        ("time_per_output_token_seconds", 2, 0.45, "0.3", 2),
        ("completion_tokens", 2, 10, "4.0", 0),
        ("completion_tokens", 2, 10, "8.0", 2),
    ],
)
def test_what_is_measured_lies_up_to_its_edge(
    name: str, count: int, total: float, edge: str, below: int
) -> None:
    metrics = Metrics(silent, dict)
    for record in (RECORD, RECORD, replace(RECORD, outcome="truncated")):
        metrics.observe(record)

    found = samples(metrics)

    arm = ("chat", "rollout", "2")
    assert found[f"interlingua_{name}_count", *arm] == count
    assert found[f"interlingua_{name}_sum", *arm] == pytest.approx(total)
    assert found[f"interlingua_{name}_bucket", edge, *arm] == below
    assert found[f"interlingua_{name}_bucket", "+Inf", *arm] == count


def test_who_was_diverted_is_no_sample_of_either_arm() -> None:
    metrics = Metrics(silent, dict)
    metrics.observe(
        replace(RECORD, version="1", diverted="chat@2", fell_back=("chat@2 WorkerFailed",))
    )

    found = samples(metrics)

    assert found["interlingua_diversions_total", "chat", "rollout", "2"] == 1
    assert found["interlingua_requests_total", "gpu", "openai", "chat", "ok", "", "1"] == 1
    assert found["interlingua_fallbacks_total", "WorkerFailed", "chat@2"] == 1
    assert (
        "interlingua_requests_total",
        "gpu",
        "openai",
        "chat",
        "ok",
        "rollout",
        "2",
    ) not in found


def test_nothing_is_told_before_there_is_anything() -> None:
    assert samples(Metrics(silent, dict)) == {}


def test_names_without_end_do_not_fill_the_memory() -> None:
    metrics = Metrics(silent, dict)
    for n in range(550):
        metrics.observe(Record("r", model=f"m{n}"))
    found = samples(metrics)
    assert len(found) == 501
    assert found["interlingua_requests_total", "", "", "_other", "ok", "_other", "_other"] == 50


def test_fallbacks_without_end_do_not_fill_the_memory() -> None:
    metrics = Metrics(silent, dict)
    for n in range(10_050):
        metrics.observe(Record("r", fell_back=(f"m{n}@1 WorkerFailed",)))
    assert samples(metrics)["interlingua_fallbacks_total", "_other", "_other"] == 50


def test_a_name_is_written_so_that_it_can_be_read_again() -> None:
    metrics = Metrics(silent, dict)
    odd = 'a "b" \\ c\nd'
    metrics.observe(replace(RECORD, model=odd))
    found = samples(metrics)
    assert found["interlingua_completion_tokens_count", odd, "rollout", "2"] == 1


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
