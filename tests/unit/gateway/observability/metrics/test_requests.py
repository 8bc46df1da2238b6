"""The metrics of requests: counts, durations, tokens, and requests in flight."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from backends.histogram import Histogram
from backends.http.interfaces import ConnectionCounts
from backends.pool.metrics import PoolMetrics
from gateway.observability.metrics.definition import MetricDefinition
from gateway.observability.metrics.requests import MetricsCollector, RunningRequestCollector
from gateway.observability.metrics.system import ProcessCollector
from gateway.observability.metrics.vllm_compat import VllmCollector
from gateway.observability.record import RequestRecord, ignore_record
from protocols.core.events import Usage
from protocols.core.loss import UnsupportedParameter

SPLIT_VERSION = ("chat", "rollout", "2")


def collect_samples(metrics: MetricsCollector) -> dict[tuple[str, ...], float]:
    """Return values by metric name and by label values, ordered by label name."""
    families = text_string_to_metric_families(metrics.render_page().decode())
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


RECORD = RequestRecord(
    "r",
    protocol="openai",
    model="chat",
    version="2",
    split="rollout",
    backend="gpu",
    first_token=0.1,
    duration=1.0,
    usage=Usage(3, 5, source="counted"),
    finish_reasons=("eos", "length"),
    unsupported_parameters=(
        UnsupportedParameter("top_k", "dropped", path="sampling.top_k"),
        UnsupportedParameter("never heard of", "dropped"),
    ),
)


def test_requests_are_counted_by_their_labels() -> None:
    records: list[RequestRecord] = []
    metrics = MetricsCollector(records.append, dict)
    metrics.record_request(RECORD)
    metrics.record_request(RECORD)
    cut = replace(RECORD, outcome="truncated", error="StreamBroken", unsupported_parameters=())
    metrics.record_request(cut)

    samples = collect_samples(metrics)

    def one(name: str, **labels: str) -> float:
        every = {"model": "chat", "split": "rollout", "version": "2"} | labels
        return samples[f"interlingua_{name}", *(every[label] for label in sorted(every))]

    request_labels = {"protocol": "openai", "backend": "gpu"}
    assert one("requests_total", **request_labels, outcome="ok") == 2
    assert one("requests_total", **request_labels, outcome="truncated") == 1
    assert one("errors_total", error="StreamBroken") == 1
    assert one("unsupported_parameters_total", field="sampling.top_k", reason="dropped") == 2
    assert one("unsupported_parameters_total", field="_unknown", reason="dropped") == 2
    assert one("lossy_requests_total") == 2
    assert one("tokens_total", direction="input", source="counted") == 9
    assert one("tokens_total", direction="output", source="counted") == 15
    assert one("finish_reasons_total", reason="length") == 3
    assert "never heard of" not in metrics.render_page().decode()
    assert records == [RECORD, RECORD, cut]


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
def test_histogram_buckets_include_their_upper_bound(
    name: str, count: int, total: float, edge: str, below: int
) -> None:
    metrics = MetricsCollector(ignore_record, dict)
    for record in (RECORD, RECORD, replace(RECORD, outcome="truncated")):
        metrics.record_request(record)

    samples = collect_samples(metrics)

    split_version = ("chat", "rollout", "2")
    assert samples[f"interlingua_{name}_count", *split_version] == count
    assert samples[f"interlingua_{name}_sum", *split_version] == pytest.approx(total)
    assert samples[f"interlingua_{name}_bucket", edge, *split_version] == below
    assert samples[f"interlingua_{name}_bucket", "+Inf", *split_version] == count


def test_fallback_response_is_counted_outside_the_traffic_split() -> None:
    metrics = MetricsCollector(ignore_record, dict)
    metrics.record_request(
        replace(
            RECORD, version="1", fallback_from="chat@2", failed_attempts=("chat@2 WorkerFailed",)
        )
    )

    samples = collect_samples(metrics)

    assert samples["interlingua_requests_answered_by_fallback_total", "chat", "rollout", "2"] == 1
    assert samples["interlingua_requests_total", "gpu", "chat", "ok", "openai", "", "1"] == 1
    assert samples["interlingua_fallbacks_total", "WorkerFailed", "chat@2"] == 1
    assert (
        "interlingua_requests_total",
        "gpu",
        "openai",
        "chat",
        "ok",
        "rollout",
        "2",
    ) not in samples


def test_no_samples_are_exported_before_the_first_request() -> None:
    assert collect_samples(MetricsCollector(ignore_record, dict)) == {}


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_scrape_includes_all_buffered_records(count: int) -> None:
    records: list[RequestRecord] = []
    metrics = MetricsCollector(records.append, dict)
    metrics.register(VllmCollector(metrics.collect_stats, dict))
    for n in range(count):
        metrics.record_request(
            replace(RECORD, fallback_from="chat@1", failed_attempts=("chat@1 WorkerFailed",))
        )
        assert len(records) == n + 1

    assert metrics.collect_stats()["chat", "2", ""].outcomes.total() == count

    metrics.record_request(RECORD)
    samples = collect_samples(metrics)
    requests = ("interlingua_requests_total", "gpu", "chat", "ok", "openai")

    assert (samples[*requests, "", "2"], samples[*requests, "rollout", "2"]) == (count, 1)
    assert (
        samples["interlingua_requests_answered_by_fallback_total", "chat", "rollout", "1"] == count
    )
    assert samples["interlingua_fallbacks_total", "WorkerFailed", "chat@1"] == count
    assert samples["vllm:prompt_tokens_total", "0", "chat"] == 3 * (count + 1)


def test_model_label_values_are_bounded() -> None:
    metrics = MetricsCollector(ignore_record, dict)
    for n in range(550):
        metrics.record_request(RequestRecord("r", model=f"m{n}"))

    samples = collect_samples(metrics)

    assert len(samples) == 501
    assert samples["interlingua_requests_total", "", "_other", "ok", "", "_other", "_other"] == 50


def test_fallback_label_values_are_bounded() -> None:
    metrics = MetricsCollector(ignore_record, dict)
    for n in range(10_050):
        metrics.record_request(RequestRecord("r", failed_attempts=(f"m{n}@1 WorkerFailed",)))
    assert collect_samples(metrics)["interlingua_fallbacks_total", "_other", "_other"] == 50


def test_special_characters_in_labels_are_escaped() -> None:
    metrics = MetricsCollector(ignore_record, dict)
    odd = 'a "b" \\ c\nd'
    metrics.record_request(replace(RECORD, model=odd))

    samples = collect_samples(metrics)

    assert samples["interlingua_completion_tokens_count", odd, "rollout", "2"] == 1


class FakeWorkerReport(Struct):
    url: str
    state: str
    in_flight: int
    limit: int | None = None
    latency: float | None = None


class FakePool:
    """A pool of two workers, one of which is ejected."""

    discovery_failures = 3
    queued_request_ids = ("r1", "r2")
    in_panic = True
    connections = ConnectionCounts(open=5, idle=2, created=7, failed=1)

    def __init__(self) -> None:
        tally = self.metrics = PoolMetrics(exhausted=2, abandoned=6)
        tally.retries["connect"] += 4
        tally.failures["disconnect"] += 5
        tally.shed["queue_full"] += 8
        tally.queue_times.add(0.02)

    def report_workers(self) -> list[FakeWorkerReport]:
        return [
            FakeWorkerReport("http://a:1", "up", 4, 9, 0.25),
            FakeWorkerReport("http://b:1", "out", 0),
        ]


def test_pool_metrics_show_the_current_worker_state() -> None:
    samples = collect_samples(MetricsCollector(ignore_record, lambda: {"gpu": FakePool()}))
    values = {name: value for name, value in samples.items() if "bucket" not in name[0]}

    assert values == {
        ("interlingua_worker_up", "gpu", "http://a:1"): 1,
        ("interlingua_worker_up", "gpu", "http://b:1"): 0,
        ("interlingua_worker_in_flight", "gpu", "http://a:1"): 4,
        ("interlingua_worker_in_flight", "gpu", "http://b:1"): 0,
        ("interlingua_worker_limit", "gpu", "http://a:1"): 9,
        ("interlingua_worker_latency_seconds", "gpu", "http://a:1"): 0.25,
        ("interlingua_backend_panic", "gpu"): 1,
        ("interlingua_queue_length", "gpu"): 2,
        ("interlingua_upstream_connections", "gpu", "active"): 3,
        ("interlingua_upstream_connections", "gpu", "idle"): 2,
        ("interlingua_upstream_connects_total", "gpu", "established"): 7,
        ("interlingua_upstream_connects_total", "gpu", "failed"): 1,
        ("interlingua_upstream_failures_total", "gpu", "disconnect"): 5,
        ("interlingua_upstream_cancellations_total", "gpu"): 6,
        ("interlingua_retries_total", "gpu", "connect"): 4,
        ("interlingua_retry_budget_exhausted_total", "gpu"): 2,
        ("interlingua_shed_total", "gpu", "queue_full"): 8,
        ("interlingua_discovery_failures_total", "gpu"): 3,
        ("interlingua_queue_wait_seconds_sum", "gpu"): 0.02,
        ("interlingua_queue_wait_seconds_count", "gpu"): 1,
    }
    assert samples["interlingua_queue_wait_seconds_bucket", "gpu", "0.01"] == 0
    assert samples["interlingua_queue_wait_seconds_bucket", "gpu", "0.025"] == 1


@pytest.mark.parametrize(
    ("changes", "side", "reason"),
    [
        ({"outcome": "cancelled"}, "client", "ClientDisconnected"),
        ({"outcome": "truncated", "error": "StreamBroken"}, "worker", "StreamBroken"),
        ({"outcome": "truncated", "error": "DeadlineExceeded"}, "gateway", "DeadlineExceeded"),
        ({"outcome": "cancelled", "stream": False}, "", ""),
        ({"outcome": "worker_error", "error": "WorkerFailed"}, "", ""),
    ],
)
def test_aborted_stream_is_counted_with_side_and_reason(
    changes: dict[str, Any], side: str, reason: str
) -> None:
    metrics = MetricsCollector(ignore_record, dict)
    metrics.record_request(replace(RECORD, **({"stream": True, "tokens": 7} | changes)))
    aborts = {name: n for name, n in collect_samples(metrics).items() if "stream_aborts" in name[0]}

    wasted = collect_samples(metrics).get(("interlingua_wasted_tokens_total", *SPLIT_VERSION), 0)

    if side:
        assert [*aborts] == [
            ("interlingua_stream_aborts_total", "chat", reason, side, "rollout", "2")
        ]
    assert len(aborts) == bool(side)
    assert wasted == (7 if side else 0)


def test_cached_and_reasoning_tokens_are_counted_separately() -> None:
    metrics = MetricsCollector(ignore_record, dict)
    metrics.record_request(replace(RECORD, usage=Usage(9, 5, 4, 3), overhead=0.0004))
    samples = collect_samples(metrics)

    tokens = {name[1]: n for name, n in samples.items() if name[0] == "interlingua_tokens_total"}

    assert tokens == {"input": 9, "output": 5, "cached": 4, "reasoning": 3}
    assert samples["interlingua_overhead_seconds_sum", *SPLIT_VERSION] == 0.0004
    assert samples["interlingua_prompt_tokens_sum", *SPLIT_VERSION] == 9


def test_histogram_label_values_are_escaped() -> None:
    definition = MetricDefinition("named", "histogram", "Says nothing.", ("who",))
    histogram = Histogram((1.0,))
    histogram.add(0.5)
    text = "".join(definition.format_histogram_lines([(['a\n"b\\'], histogram)]))

    [family] = text_string_to_metric_families(text)

    assert {sample.labels["who"] for sample in family.samples} == {'a\n"b\\'}


@pytest.mark.parametrize(("full", "model"), [(499, "chat"), (500, "_other")])
def test_stats_keys_are_bounded(full: int, model: str) -> None:
    metrics = MetricsCollector(ignore_record, dict)
    for number in range(full):
        metrics.record_request(RequestRecord("r", model=f"m{number}"))

    metrics.record_request(RECORD)

    assert [*metrics.collect_stats()][-1][0] == model


# --- requests in flight and backends --------------------------------------------------------------


def test_running_requests_are_counted_by_phase() -> None:
    live = [
        RequestRecord("q", model="chat"),
        RequestRecord("w", model="chat"),
        RequestRecord("s", model="chat", first_byte=0.1),
        RequestRecord("s2", model="other", first_byte=0.1),
    ]
    metrics = MetricsCollector(ignore_record, dict)

    metrics.register(RunningRequestCollector(lambda: live, lambda: {"q", "s"}))

    assert collect_samples(metrics) == {
        ("interlingua_requests_in_flight", "chat", "queued"): 1,
        ("interlingua_requests_in_flight", "chat", "waiting"): 1,
        ("interlingua_requests_in_flight", "chat", "streaming"): 1,
        ("interlingua_requests_in_flight", "other", "streaming"): 1,
    }


class FakeListener(Struct):
    connections: int
    malformed_by_status: dict[int, int]
    refused_by_reason: dict[str, int]


async def test_process_metrics_are_exported() -> None:
    listener = FakeListener(3, {400: 2, 431: 1, 418: 5}, {"address": 7})
    process = ProcessCollector(lambda: {"127.0.0.1:8000": listener})
    metrics = MetricsCollector(ignore_record, dict)
    metrics.register(process)
    process.stop()
    process.start()
    while ("interlingua_event_loop_lag_seconds_count",) not in (page := collect_samples(metrics)):  # noqa: ASYNC110 - as a scraper asks
        await asyncio.sleep(0.05)
    process.stop()

    assert page["interlingua_event_loop_lag_seconds_bucket", "+Inf"] >= 1
    assert page["interlingua_open_client_connections", "127.0.0.1:8000"] == 3
    for kind, count in {"invalid_http": 2, "headers_too_large": 1, "418": 5}.items():
        assert page["interlingua_malformed_requests_total", kind, "127.0.0.1:8000"] == count

    name = "interlingua_refused_connections_total"
    assert page[name, "127.0.0.1:8000", "address"] == 7
    assert 0 < page["interlingua_open_fds",] < page["interlingua_max_fds",]
    assert page["interlingua_memory_bytes",] > 1 << 20
    assert page["interlingua_cpu_seconds_total",] > 0
    assert [name for name in page if name[0] == "interlingua_build_info"]


def test_process_metrics_without_proc_omit_file_descriptors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gateway.observability.metrics.system._STATM_FILE", tmp_path / "nothing")
    metrics = MetricsCollector(ignore_record, dict)
    metrics.register(ProcessCollector(dict))

    names = {name for name, *_ in collect_samples(metrics)}

    assert "interlingua_cpu_seconds_total" in names
    assert "interlingua_open_fds" not in names


def test_vllm_metric_names_have_the_same_values() -> None:
    metrics = MetricsCollector(ignore_record, dict)
    for version in ("1", "2"):
        metrics.record_request(replace(RECORD, version=version))
    metrics.record_request(RequestRecord("r", path="/nowhere"))
    phases = {("chat", "queued"): 2, ("chat", "waiting"): 3, ("chat", "streaming"): 4}
    metrics.register(VllmCollector(metrics.collect_stats, lambda: phases))
    samples = collect_samples(metrics)
    vllm = {name: n for name, n in samples.items() if name[0].startswith("vllm:")}

    values = {name: n for name, n in vllm.items() if not name[0].endswith(("_bucket", "_sum"))}

    assert values == {
        ("vllm:num_requests_running", "0", "chat"): 7,
        ("vllm:num_requests_waiting", "0", "chat"): 2,
        ("vllm:prompt_tokens_total", "0", "chat"): 6,
        ("vllm:generation_tokens_total", "0", "chat"): 10,
        ("vllm:request_success_total", "0", "stop", "chat"): 2,
        ("vllm:request_success_total", "0", "length", "chat"): 2,
        ("vllm:time_to_first_token_seconds_count", "0", "chat"): 2,
        ("vllm:inter_token_latency_seconds_count", "0", "chat"): 2,
        ("vllm:request_time_per_output_token_seconds_count", "0", "chat"): 2,
        ("vllm:e2e_request_latency_seconds_count", "0", "chat"): 2,
        ("vllm:request_prompt_tokens_count", "0", "chat"): 2,
        ("vllm:request_generation_tokens_count", "0", "chat"): 2,
    }
    assert vllm["vllm:request_prompt_tokens_sum", "0", "chat"] == 6


def test_vllm_gauges_are_zero_without_running_requests() -> None:
    metrics = MetricsCollector(ignore_record, dict)
    metrics.record_request(RECORD)

    metrics.register(VllmCollector(metrics.collect_stats, dict))

    assert collect_samples(metrics)["vllm:num_requests_running", "0", "chat"] == 0
