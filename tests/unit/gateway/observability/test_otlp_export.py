"""What is sent to a collector that takes it, and to one that does not."""

import logging
import threading
from collections.abc import Callable

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.observability.otel_metrics import OtelMetrics
from gateway.observability.record import RequestRecord
from gateway.observability.semconv import STABLE_CONVENTIONS
from gateway.observability.tracing import (
    MetricExporter,
    OtlpClient,
    RequestTrace,
    SpanExporter,
    build_resource,
)
from tests.otlp_collector import Collector

MESSAGE = ExportTraceServiceRequest()
SENDER = build_resource({}, "i1")


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.observability.tracing._RETRY_DELAY", 0.001)
    monkeypatch.setattr("gateway.observability.tracing._SPAN_BATCH_DELAY", 0.001)


def traced(number: int) -> RequestTrace:
    record = RequestRecord(f"r{number}", trace_id="1" * 32, span_id=f"{number:016x}")
    return RequestTrace(record, "POST", lambda: 1.0, lambda: "2" * 16)


@pytest.mark.parametrize(
    ("statuses", "taken", "asked"),
    [
        ((), True, 1),
        ((503, 429), True, 3),
        ((503, 502, 504), False, 3),
        ((400,), False, 1),
        ((401,), False, 1),
    ],
)
def test_a_collector_that_is_busy_is_asked_again(
    statuses: tuple[int, ...], taken: bool, asked: int
) -> None:
    with Collector(*statuses) as collector:
        post = OtlpClient(f"{collector.url}/v1/traces", {}, threading.Event())
        assert post.send(MESSAGE) == taken
    assert len(collector.taken) == asked


def test_a_collector_that_is_not_there_takes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with Collector() as collector:
        pass
    assert not OtlpClient(f"{collector.url}/v1/traces", {}, threading.Event()).send(MESSAGE)
    assert caplog.messages == [
        f"the collector {collector.url}/v1/traces accepts nothing: ConnectError"
    ]


def test_at_the_end_nobody_waits_to_ask_again() -> None:
    closing = threading.Event()
    closing.set()
    with Collector(503) as collector:
        assert not OtlpClient(f"{collector.url}/v1/traces", {}, closing).send(MESSAGE)
    assert len(collector.taken) == 1


def test_the_log_has_a_line_where_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "interlingua")
    with Collector(400, 400, 200, 200, 400) as collector:
        post = OtlpClient(f"{collector.url}/v1/traces", {"x-key": "canary"}, threading.Event())
        for _ in range(5):
            post.send(MESSAGE)
    url = f"{collector.url}/v1/traces"
    assert caplog.messages == [
        f"the collector {url} accepts nothing: 400",
        f"the collector {url} accepts data again",
        f"the collector {url} accepts nothing: 400",
    ]


def test_what_was_not_taken_is_counted() -> None:
    with Collector(400) as collector:
        sending = SpanExporter(collector.url, {}, 10, SENDER, STABLE_CONVENTIONS)
        for number in range(12):
            sending.enqueue(traced(number))
        sending.start()
        assert sending.close(10)
        assert sending.count_dropped() == 12
    with Collector() as collector:
        sending = SpanExporter(collector.url, {}, 10, SENDER, STABLE_CONVENTIONS)
        sending.start()
        sending.enqueue(traced(1))
        assert sending.close(10)
        assert sending.count_dropped() == 0
    assert [one.span_id[-1] for one in collector.spans()] == [1]


def test_figures_are_sent_again_and_again() -> None:
    with Collector() as collector:
        push = MetricExporter(collector.url, {}, 0.001, SENDER, tuple)
        push.start()
        while len(collector.taken) < 3:
            pass
        assert push.close(10)


def test_figures_are_sent_a_last_time() -> None:
    figures = OtelMetrics(STABLE_CONVENTIONS, 1.0)
    figures.record_request(RequestRecord("r", operation="chat", duration=0.5))
    with Collector() as collector:
        push = MetricExporter(collector.url, {}, 60.0, SENDER, lambda: figures.build_metrics(2.0))
        push.start()
        assert push.close(10)
    assert "gen_ai.server.request.duration" in collector.metrics()


@pytest.mark.parametrize(
    "make",
    [
        lambda url: MetricExporter(url, {}, 60.0, SENDER, tuple),
        lambda url: SpanExporter(url, {}, 10, SENDER, STABLE_CONVENTIONS),
    ],
)
def test_what_never_began_ends(make: Callable[[str], MetricExporter | SpanExporter]) -> None:
    assert make("http://127.0.0.1:9").close(10)
