"""An OpenTelemetry collector that receives OTLP over HTTP and decodes it."""

import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from msgspec import Struct
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class ReceivedExport(Struct):
    """An export request received."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class Collector:
    """Answers with each of ``statuses`` in turn, then with 200, and asks for retries at once.

    with Collector() as collector:
        ...
        collector.spans()
    """

    def __init__(self, *statuses: int) -> None:
        self.taken: list[ReceivedExport] = []
        statuses_left = [*statuses]
        taken = self.taken

        class Answers(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                taken.append(
                    ReceivedExport(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                )
                self.send_response(statuses_left.pop(0) if statuses_left else 200)
                self.send_header("retry-after", "0")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def traces(self) -> Iterator[ExportTraceServiceRequest]:
        """Yield the exports of traces."""
        for one in [*self.taken]:
            if one.path == "/v1/traces":
                yield ExportTraceServiceRequest.FromString(one.body)

    def spans(self) -> list[Span]:
        """Return all spans in the order received."""
        return [
            span
            for request in self.traces()
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def metrics(self) -> dict[str, Metric]:
        """Return the last export of each metric."""
        return {
            metric.name: metric
            for one in [*self.taken]
            if one.path == "/v1/metrics"
            for resource in ExportMetricsServiceRequest.FromString(one.body).resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


def decode_attributes(attributes: Any) -> dict[str, Any]:
    """Convert attributes to plain values."""
    return {one.key: _decode_value(one.value) for one in list[KeyValue](attributes)}


def _decode_value(value: AnyValue) -> Any:
    which = value.WhichOneof("value")
    assert which is not None
    field_value = getattr(value, which)
    return [*map(_decode_value, field_value.values)] if which == "array_value" else field_value
