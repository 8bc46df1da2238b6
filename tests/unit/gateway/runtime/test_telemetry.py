"""The configuration selects the wrappers around requests that trace and measure them."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.config.schema import ObservabilityConfig
from gateway.observability.otlp import MetricExporter, TraceExporter
from gateway.observability.record import RequestRecord, ignore_record
from gateway.pipeline.services import HandlerSettings
from gateway.pipeline.state import RequestState
from gateway.routing.router import Router
from gateway.runtime.gateway import build_services
from gateway.runtime.telemetry import set_up_exporters
from tests.support.otlp_collector import Collector, decode_attributes

START = "backends: {a: {kind: echo}}\nmodels: {m: {backend: a}}\n"
RECORD = RequestRecord("r", operation="chat", model="m", backend="a", duration=0.5)


def load_observability_config(**parts: Any) -> ObservabilityConfig:
    return load_text(f"{START}observe: {parts}\n", "g", env={}).observe


class FakeHttpRequest:
    method = "POST"
    path = "/v1/chat/completions"
    query = ""
    peer = ""
    head = None
    headers: Any = {"traceparent": "none"}  # noqa: RUF012 - as the port has it

    async def body(self, limit: int) -> bytes:
        raise AssertionError(limit)

    def reserve_memory(self, size: int) -> None:
        raise AssertionError(size)


@pytest.fixture
def collector() -> Any:
    with Collector() as new_collector:
        yield new_collector


def test_no_exporters_are_created_without_configuration() -> None:
    services = build_services()
    same, sending = set_up_exporters(load_observability_config(), services, {})

    assert same is services
    assert not sending


def test_traces_are_exported_as_configured(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge")
    records: list[RequestRecord] = []
    config = load_observability_config(
        traces={"otlp": collector.url, "sample": 1, "auth": {"bearer": "k"}}
    )
    before = replace(
        build_services(), observe_request=records.append, dropped_counts={"log_lines": int}
    )
    services, sending = set_up_exporters(config, before, {})

    assert [type(one) for one in sending] == [TraceExporter]
    assert [*services.dropped_counts] == ["log_lines", "traces"]

    [build_stage] = services.stage_factories
    stage = build_stage(Router({}, draw=lambda: 0.0), HandlerSettings())

    record = replace(RECORD)
    http: Any = FakeHttpRequest()
    writer: Any = None  # not used
    stage.on_found(RequestState(http, writer, record))
    services.observe_request(record)

    assert sending[0].close(10)
    assert records == [record]
    assert [one.span_id.hex() for one in collector.spans()] == [record.span_id]
    assert collector.taken[0].headers["authorization"] == "Bearer k"

    [resource] = next(collector.traces()).resource_spans
    assert decode_attributes(resource.resource.attributes)["service.name"] == "edge"


def test_metrics_are_exported_as_configured(collector: Collector) -> None:
    config = load_observability_config(
        metrics={"push": {"otlp": collector.url, "headers": {"x-scope": "s"}}}
    )
    before = replace(build_services(), observe_request=ignore_record)
    environment = {"OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental"}
    services, sending = set_up_exporters(config, before, environment)

    assert [type(one) for one in sending] == [MetricExporter]
    assert services.stage_factories == ()

    services.observe_request(replace(RECORD, operation="embedding"))
    assert sending[0].close(10)
    assert "gen_ai.client.embeddings.duration" in collector.metrics()
    assert collector.taken[0].headers["x-scope"] == "s"
