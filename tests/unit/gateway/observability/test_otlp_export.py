"""Exports to a collector that accepts them, and to one that fails."""

import logging
from collections.abc import Callable

import pytest
from opentelemetry.trace import SpanKind

from gateway.observability.otel_metrics import OtelMetrics
from gateway.observability.otlp import MetricExporter, TraceExporter, build_resource
from gateway.observability.record import RequestRecord
from gateway.observability.semconv import STABLE_CONVENTIONS
from tests.support.otlp_collector import Collector

RESOURCE = build_resource("i1")


@pytest.fixture(autouse=True)
def _no_batch_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.observability.otlp._SPAN_BATCH_DELAY", 0.001)


def make_exporter(url: str, *, buffer: int = 10) -> TraceExporter:
    return TraceExporter(url, {"x-key": "canary"}, buffer, RESOURCE, 1.0)


def end_trace(traces: TraceExporter) -> None:
    """End a SERVER and a CLIENT span, if the buffer has room."""
    tracer = traces.provider.get_tracer("test")
    server = tracer.start_span("server", kind=SpanKind.SERVER)
    client = tracer.start_span("client", kind=SpanKind.CLIENT)
    if traces.reserve():
        server.end()
        client.end()


@pytest.mark.parametrize(
    ("statuses", "accepted", "attempts"),
    [
        ((), True, 1),
        ((503, 429), True, 3),
        ((503, 502, 504) * 2, False, 6),
        ((400,), False, 1),
        ((401,), False, 1),
    ],
)
def test_retryable_collector_status_is_retried(
    statuses: tuple[int, ...], accepted: bool, attempts: int
) -> None:
    with Collector(*statuses) as collector:
        traces = make_exporter(collector.url)
        end_trace(traces)
        assert traces.close(10)
    assert traces.count_dropped() == (not accepted)
    assert len(collector.taken) == attempts


def test_unreachable_collector_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.observability.otlp._EXPORT_TIMEOUT", 0.1)
    with Collector() as collector:
        pass
    traces = make_exporter(collector.url)

    end_trace(traces)

    assert traces.close(10)
    assert traces.count_dropped() == 1
    assert caplog.messages == [
        f"the collector {collector.url}/v1/traces accepts nothing: ConnectionError"
    ]


def test_failed_collector_gets_no_request_at_shutdown() -> None:
    with Collector(400, 400) as collector:
        traces = make_exporter(collector.url)
        metrics = MetricExporter(collector.url, {}, 0.001, RESOURCE)
        end_trace(traces)
        metrics.provider.get_meter("test").create_counter("c").add(1)
        while traces.count_dropped() < 1 or len(collector.taken) < 2:
            pass

        assert metrics.close(10)

        for _ in range(3):
            end_trace(traces)
        assert traces.close(10)
        assert traces.count_dropped() == 4
    assert [one.path for one in collector.taken].count("/v1/traces") == 1


def test_collector_failure_and_recovery_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with Collector(400, 400, 200, 200, 400) as collector:
        traces = make_exporter(collector.url)
        for number in range(5):
            end_trace(traces)
            while len(collector.taken) <= number:
                pass
        assert traces.close(10)
    url = f"{collector.url}/v1/traces"

    assert caplog.messages == [
        f"the collector {url} accepts nothing: 400",
        f"the collector {url} accepts data again",
        f"the collector {url} accepts nothing: 400",
    ]


def test_dropped_traces_are_counted() -> None:
    with Collector(400) as collector:
        traces = make_exporter(collector.url)
        rejected = [traces.reserve() for _ in range(12)].count(False)
        assert rejected == traces.count_dropped() == 2

        traces = make_exporter(collector.url)
        end_trace(traces)
        assert traces.close(10)
        assert traces.count_dropped() == 1
    with Collector() as collector:
        traces = make_exporter(collector.url, buffer=1)
        for number in range(3):  # the buffer has room once a trace is exported
            end_trace(traces)
            while len(collector.spans()) < 2 * (number + 1):
                pass

        assert traces.close(10)
        assert traces.count_dropped() == 0

    assert [span.name for span in collector.spans()] == ["server", "client"] * 3


def test_metrics_are_exported_periodically() -> None:
    with Collector() as collector:
        push = MetricExporter(collector.url, {}, 0.001, RESOURCE)
        push.provider.get_meter("test").create_counter("c").add(1)

        while len(collector.taken) < 3:
            pass

        assert push.close(10)


def test_metrics_are_exported_at_shutdown() -> None:
    with Collector() as collector:
        push = MetricExporter(collector.url, {}, 60.0, RESOURCE)
        metrics = OtelMetrics(STABLE_CONVENTIONS, push.provider)

        metrics.record_request(RequestRecord("r", operation="chat", duration=0.5))

        assert push.close(10)
    assert "gen_ai.server.request.duration" in collector.metrics()


@pytest.mark.parametrize(
    "create",
    [
        lambda url: MetricExporter(url, {}, 60.0, RESOURCE),
        lambda url: TraceExporter(url, {}, 10, RESOURCE, 1.0),
    ],
)
def test_unused_exporter_can_be_closed(
    create: Callable[[str], MetricExporter | TraceExporter],
) -> None:
    assert create("http://127.0.0.1:9").close(10)
