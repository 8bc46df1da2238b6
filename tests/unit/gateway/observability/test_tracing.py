"""Which requests are traced, the contents of spans, and the OpenTelemetry metrics."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from gateway.observability.otel_metrics import OtelMetrics
from gateway.observability.otlp import TraceExporter, build_resource
from gateway.observability.record import RequestRecord
from gateway.observability.semconv import (
    EXPERIMENTAL_CONVENTIONS,
    STABLE_CONVENTIONS,
    SemanticConventions,
    select_conventions,
)
from gateway.observability.tracing import RequestTracer
from protocols.core.errors import WorkerUnreachable
from protocols.core.events import Usage
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    SamplingParams,
    StopConditions,
)
from tests.support.otlp_collector import decode_attributes

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RECORD = RequestRecord(
    "r",
    protocol="openai",
    model="chat",
    backend="gpu",
    operation="chat",
    status=200,
    first_token=0.1,
    duration=0.5,
    usage=Usage(3, 5),
    finish_reasons=("eos",),
)


class FakeHttpRequest:
    headers: Mapping[str, str]
    method = "POST"
    path = "/v1/chat/completions"
    query = ""
    peer = ""
    head = None

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers

    async def body(self, limit: int) -> bytes:
        raise AssertionError(limit)


class FixedIdGenerator(RandomIdGenerator):
    """Generates trace ids that a sampler with a share above 0.5 selects."""

    def __init__(self) -> None:
        self._spans = 0

    def generate_trace_id(self) -> int:
        return 7 << 64 | 1 << 63

    def generate_span_id(self) -> int:
        self._spans += 1
        return self._spans


class TracerTestBench:
    """A tracer and the spans that it ended."""

    def __init__(self, share: float, *, trust: bool = False, buffer: int = 10) -> None:
        self._ended = InMemorySpanExporter()
        exporter = TraceExporter("http://127.0.0.1:9", {}, buffer, build_resource("i1"), share)
        exporter.provider.id_generator = FixedIdGenerator()
        assert exporter.close(10)  # nothing is left to export
        exporter.provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self.exporter = exporter
        self.follower = RequestTracer(
            exporter.provider,
            exporter,
            STABLE_CONVENTIONS,
            trust_parent=trust,
            now=lambda: 100.0,
        )

    def begin(self, flags: str = "") -> RequestRecord:
        record = replace(RECORD)
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}"} if flags else {}
        self.follower.start_trace(record, FakeHttpRequest(headers))
        return record

    @property
    def put(self) -> list[Span]:
        [*resources] = encode_spans(self._ended.get_finished_spans()).resource_spans
        return [
            span for resource in resources for scope in resource.scope_spans for span in scope.spans
        ]


@pytest.mark.parametrize(
    ("share", "trust", "flags", "traced"),
    [
        (0.6, False, "", True),
        (0.5, False, "", False),
        (0.6, False, "00", True),
        (0.5, False, "01", False),
        (0.6, True, "", True),
        (0.5, True, "", False),
        (0.6, True, "00", False),
        (0.5, True, "01", True),
    ],
)
def test_only_a_trusted_parent_decides_the_sampling(
    share: float, trust: bool, flags: str, traced: bool
) -> None:
    bench = TracerTestBench(share, trust=trust)
    record = bench.begin(flags)
    assert (bench.follower.get_trace(record) is not None) == traced
    assert bool(record.span_id) == traced

    bench.follower.end_trace(record)
    assert len(bench.put) == traced
    assert bench.follower.get_trace(record) is None


def test_ended_trace_is_exported_once() -> None:
    bench = TracerTestBench(1)
    record = bench.begin()
    bench.follower.end_trace(record)

    bench.follower.end_trace(record)

    assert len(bench.put) == 1


def test_trace_beyond_the_buffer_is_dropped_and_counted() -> None:
    bench = TracerTestBench(1, buffer=1)
    for record in (bench.begin(), bench.begin()):
        bench.follower.end_trace(record)

    assert len(bench.put) == 1
    assert bench.exporter.count_dropped() == 1


def test_worker_request_has_the_trace_context_of_its_attempt() -> None:
    bench = TracerTestBench(0, trust=True)
    record = replace(RECORD)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-03", "tracestate": "a=1,b=2"}
    bench.follower.start_trace(record, FakeHttpRequest(headers))

    trace = bench.follower.get_trace(record)

    assert trace is not None
    assert trace.start_attempt("http://w") == (
        ("traceparent", f"00-{TRACE}-{'0' * 15}2-01"),  # without the flag for random ids
        ("tracestate", "a=1,b=2"),
    )


def trace_request(record: RequestRecord, *, trust: bool = False, request: Any = None) -> list[Span]:
    """Return the spans of a request with two worker attempts."""
    bench = TracerTestBench(1, trust=trust)
    begun = bench.begin("01")
    trace = bench.follower.get_trace(begun)
    assert trace is not None
    if request is not None:
        trace.set_request(request)
        trace.start_attempt("http://[::1]:8001")
        trace.end_attempt(WorkerUnreachable("no"))
        trace.end_attempt(None)
        trace.start_attempt("https://worker.example/base")
        trace.end_attempt(None)
    trace.record = replace(record, trace_id=begun.trace_id, span_id=begun.span_id)
    bench.follower.end_trace(begun)
    return bench.put


def test_failed_attempt_span_has_error_type_and_server_address() -> None:
    chat = GenerationRequest(model="m", kind="chat", sampling=SamplingParams(seed=2**64 - 1), n=2)
    server, first, second = trace_request(replace(RECORD, stream=True), request=chat)
    assert server.status.code == Status.STATUS_CODE_UNSET
    assert server.name == "POST openai"
    assert (first.status.code, second.status.code) == (Status.STATUS_CODE_ERROR, 0)

    facts = decode_attributes(first.attributes)
    assert (facts["server.address"], facts["server.port"]) == ("::1", 8001)
    assert facts["error.type"] == "WorkerUnreachable"
    assert "gen_ai.usage.output_tokens" not in facts

    facts = decode_attributes(second.attributes)
    assert (facts["server.address"], facts["server.port"]) == ("worker.example", 443)
    assert facts["gen_ai.request.seed"] == -1
    assert facts["gen_ai.request.choice.count"] == 2
    assert facts["gen_ai.request.stream"] is True
    assert facts["gen_ai.response.finish_reasons"] == ["stop"]


def test_any_client_input_is_encoded_as_span_attributes() -> None:
    odd = replace(RECORD, path="/\udcff\x00é", model="\udcff")
    stopping = StopConditions(max_tokens=10**30)
    request = GenerationRequest(model="m", kind="chat", stopping=stopping)

    server, _, last = trace_request(odd, request=request)

    assert decode_attributes(server.attributes)["url.path"] == "/?\x00é"
    assert decode_attributes(server.attributes)["interlingua.model"] == "?"
    assert decode_attributes(last.attributes)["gen_ai.request.max_tokens"] == 2**63 - 1
    assert Span.FromString(last.SerializeToString()).name == "chat chat"


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"status": 500, "outcome": "gateway_error", "error": "InternalError"}, True),
        ({"status": 200, "outcome": "truncated", "error": "StreamBroken"}, True),
        ({"status": 404, "outcome": "client_error", "error": "ModelNotFound"}, False),
    ],
)
def test_client_error_does_not_set_the_span_status_to_error(
    changes: dict[str, Any], failed: bool
) -> None:
    [server] = trace_request(replace(RECORD, **changes))
    assert (server.status.code == Status.STATUS_CODE_ERROR) == failed
    assert decode_attributes(server.attributes)["error.type"] == changes["error"]


def test_trusted_parent_trace_is_continued() -> None:
    [server] = trace_request(RECORD, trust=True)
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, SPAN)

    [alone] = trace_request(RECORD)
    assert alone.trace_id == bytes([*[0] * 7, 7, 0x80, *[0] * 7])
    assert alone.parent_span_id == b""


def test_embedding_request_has_its_own_span_attributes() -> None:
    request = EmbeddingRequest(model="e", inputs=("x",), dimensions=64)
    record = replace(RECORD, operation="embedding", finish_reasons=(), first_token=None, usage=None)

    facts = decode_attributes(trace_request(record, request=request)[-1].attributes)

    assert facts["gen_ai.operation.name"] == "embeddings"
    assert facts["gen_ai.embeddings.dimension.count"] == 64
    assert "gen_ai.usage.input_tokens" not in facts


# --- metrics --------------------------------------------------------------------------------------


class OtelMetricsTestBench:
    """Metrics and their OTLP encoding."""

    def __init__(self, version: SemanticConventions) -> None:
        self._reader = InMemoryMetricReader()
        provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.figures = OtelMetrics(version, provider)

    def sent(self) -> list[Metric]:
        data = self._reader.get_metrics_data()
        return (
            []
            if data is None
            else [*encode_metrics(data).resource_metrics[0].scope_metrics[0].metrics]
        )


def collect_points(version: Any, *records: RequestRecord) -> dict[str, dict[str, Any]]:
    """Return the attributes of each metric's last point, with its sum."""
    bench = OtelMetricsTestBench(version)
    for record in records:
        bench.figures.record_request(record)
    return {
        metric.name: {**decode_attributes(point.attributes), "sum": point.sum, "count": point.count}
        for metric in bench.sent()
        for point in metric.histogram.data_points
    }


EMBEDDED = replace(RECORD, operation="embedding", first_token=None, usage=Usage(3))


def test_metrics_have_the_stable_convention_names_by_default() -> None:
    points = collect_points(STABLE_CONVENTIONS, EMBEDDED, RECORD, RECORD)
    assert set(points) == {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "gen_ai.client.operation.duration",
        "gen_ai.client.token.usage",
    }
    assert points["gen_ai.server.time_per_output_token"] == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "gpu",
        "gen_ai.request.model": "chat",
        "gen_ai.original.model": "chat",
        "sum": pytest.approx(0.2),
        "count": 2,
    }
    assert points["gen_ai.client.token.usage"]["gen_ai.token.type"] == "output"


def test_experimental_convention_names_require_the_opt_in() -> None:
    assert select_conventions({}) is STABLE_CONVENTIONS
    assert select_conventions({"OTEL_SEMCONV_STABILITY_OPT_IN": "http"}) is STABLE_CONVENTIONS

    conventions = select_conventions(
        {"OTEL_SEMCONV_STABILITY_OPT_IN": "http, gen_ai_latest_experimental"}
    )
    assert conventions is EXPERIMENTAL_CONVENTIONS

    points = collect_points(conventions, EMBEDDED, RECORD)
    assert "gen_ai.client.token.usage" not in points
    assert points["gen_ai.client.inference.operation.input_tokens"]["sum"] == 3
    assert points["gen_ai.client.inference.operation.output_tokens"]["sum"] == 5
    assert points["gen_ai.client.embeddings.operation.input_tokens"]["sum"] == 3
    assert points["gen_ai.client.embeddings.duration"]["count"] == 1
    assert "gen_ai.token.type" not in points["gen_ai.client.inference.operation.input_tokens"]


@pytest.mark.parametrize(
    ("record", "missing"),
    [
        (replace(RECORD, operation=""), "gen_ai.server.request.duration"),
        (replace(RECORD, outcome="truncated"), "gen_ai.server.time_to_first_token"),
        (replace(RECORD, first_token=None), "gen_ai.server.time_to_first_token"),
        (replace(RECORD, usage=Usage(3, 1)), "gen_ai.server.time_per_output_token"),
        (replace(RECORD, usage=None), "gen_ai.server.time_per_output_token"),
        (replace(RECORD, usage=None), "gen_ai.client.token.usage"),
    ],
)
def test_missing_measurement_adds_no_metric_point(record: RequestRecord, missing: str) -> None:
    assert missing in collect_points(STABLE_CONVENTIONS, RECORD)
    assert missing not in collect_points(STABLE_CONVENTIONS, record)


def test_otel_metric_points_are_bounded() -> None:
    bench = OtelMetricsTestBench(STABLE_CONVENTIONS)
    for number in range(2500):
        record = replace(RECORD, model=f"m{number}", usage=None, first_token=None)
        bench.figures.record_request(record)
    for metric in bench.sent():
        points = [*metric.histogram.data_points]
        assert len(points) <= 2001
        others = [
            one for one in points if "otel.metric.overflow" in decode_attributes(one.attributes)
        ]
        assert [one.count for one in others] == [2500 - len(points) + 1]


def test_otel_buckets_match_the_conventions() -> None:
    bench = OtelMetricsTestBench(STABLE_CONVENTIONS)
    bench.figures.record_request(RECORD)

    bounds = {
        metric.name: [*metric.histogram.data_points[0].explicit_bounds] for metric in bench.sent()
    }

    assert bounds["gen_ai.server.request.duration"] == [0.01 * 2**k for k in range(14)]
    assert bounds["gen_ai.client.token.usage"] == [4**k for k in range(14)]


@pytest.mark.parametrize(
    ("environment", "name", "attributes"),
    [
        ({}, "interlingua", None),
        ({"OTEL_SERVICE_NAME": "edge"}, "edge", None),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=own, zone = b,odd"}, "own", "b"),
    ],
)
def test_otel_resource_is_read_from_the_environment(
    environment: dict[str, str], name: str, attributes: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    facts = build_resource("i1").attributes

    assert facts["service.name"] == name
    assert facts["service.instance.id"] == "i1"
    assert facts.get("zone") == attributes
