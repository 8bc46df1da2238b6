"""What sends traces and figures to collectors, from threads of its own: OTLP over HTTP, protobuf.

Whoever gives something to send never waits, and at most so many things wait to be sent. A collector
that is busy (429, 502, 503, 504) or can't be reached is asked again, three times in all; what it
does not take then is given up and counted.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from itertools import chain
from typing import Final, Protocol

import httpx
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics, ScopeMetrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

from gateway import __version__
from gateway.recording.scribe import BackgroundWriter
from gateway.tracing.follow import RequestTrace
from gateway.tracing.names import AttributeValue, SemanticConventions
from gateway.tracing.spans import build_spans, encode_attributes

log = logging.getLogger("interlingua")

_EXPORT_TIMEOUT: Final = 5.0
"""Seconds that a collector has for each step of an answer."""
_MAX_ATTEMPTS: Final = 3
_RETRY_DELAY: Final = 1.0
"""Seconds before another try."""
_SPAN_BATCH_DELAY: Final = 1.0
"""Seconds in which exchanges are gathered to be sent together."""
_RETRYABLE_STATUSES: Final = frozenset(
    {
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
_INSTRUMENTATION_SCOPE: Final = InstrumentationScope(name="interlingua", version=__version__)


class ProtobufMessage(Protocol):
    """What protobuf makes bytes of."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's own name
        """The bytes."""


def build_resource(environment: Mapping[str, str], instance: str) -> Resource:
    """Who sends: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES may say more."""
    said = environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    pairs = (one.partition("=") for one in said)
    told: dict[str, AttributeValue | None] = {
        "service.name": "interlingua",
        "service.version": __version__,
        "service.instance.id": instance,
        **{name.strip(): value.strip() for name, equals, value in pairs if equals},
    }
    if name := environment.get("OTEL_SERVICE_NAME"):
        told["service.name"] = name
    return Resource(attributes=encode_attributes(told))


class OtlpClient:
    """Sends messages to one path of a collector. It does not wait any more once ``closing`` is."""

    def __init__(self, url: str, headers: Mapping[str, str], closing: threading.Event) -> None:
        self._url = url
        self._headers = {**headers, "content-type": "application/x-protobuf"}
        self._closing = closing
        self._healthy = True
        """Whether the last was taken, as the log knows."""

    def send(self, message: ProtobufMessage) -> bool:
        """Whether it was taken."""
        data = message.SerializeToString()
        why = ""
        for number in range(_MAX_ATTEMPTS):
            if number and self._closing.wait(_RETRY_DELAY):
                break
            why, again = self._post(data)
            if not again:
                break
        self._log_change(why)
        return not why

    def _post(self, data: bytes) -> tuple[str, bool]:
        """Why it was not taken, or "", and whether it may be another time."""
        try:
            answer = httpx.post(
                self._url,
                content=data,
                headers=self._headers,
                timeout=_EXPORT_TIMEOUT,
                trust_env=False,
            )
        except httpx.HTTPError as error:
            return type(error).__name__, True
        if answer.is_success:
            return "", False
        return str(answer.status_code), answer.status_code in _RETRYABLE_STATUSES

    def _log_change(self, why: str) -> None:
        """Say it, where it has changed."""
        if why and self._healthy:
            log.warning("%s takes nothing now: %s", self._url, why)
        elif not why and not self._healthy:
            log.warning("%s takes what it is sent again", self._url)
        self._healthy = not why


class SpanExporter:
    """Sends traces that are put to it, those of a second together."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        most: int,
        sender: Resource,
        names: SemanticConventions,
    ) -> None:
        """So many exchanges may wait at ``most``."""
        self._writer = BackgroundWriter[RequestTrace](
            "traces", most, self._export_batch, _SPAN_BATCH_DELAY
        )
        self._client = OtlpClient(f"{url}/v1/traces", headers, self._writer.closing)
        self._resource = sender
        self._semconv = names
        self.enqueue: Callable[[RequestTrace], None] = self._writer.enqueue
        """Send this one; it must not change any more."""
        self.start = self._writer.start
        self.close = self._writer.close

    def count_dropped(self) -> int:
        """How many exchanges were not told."""
        return self._writer.dropped

    def _export_batch(self, batch: Sequence[RequestTrace]) -> int:
        scope = ScopeSpans(
            scope=_INSTRUMENTATION_SCOPE,
            spans=chain.from_iterable(build_spans(one, self._semconv) for one in batch),
        )
        told = ResourceSpans(resource=self._resource, scope_spans=[scope])
        taken = self._client.send(ExportTraceServiceRequest(resource_spans=[told]))
        return 0 if taken else len(batch)


class MetricExporter:
    """Sends what exchanges come to, every so many seconds and at the end."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        every: float,
        sender: Resource,
        figures: Callable[[], Iterable[Metric]],
    ) -> None:
        """``figures`` gives them, from any thread."""
        self._closing = threading.Event()
        self._client = OtlpClient(f"{url}/v1/metrics", headers, self._closing)
        self._interval = every
        self._resource = sender
        self._collect_metrics = figures
        self._thread = threading.Thread(
            target=self._export_periodically, name="figures", daemon=True
        )
        self.start = self._thread.start

    def close(self, within: float) -> bool:
        """Send them a last time, for so many seconds at most; False if it took longer."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(within)
        return not self._thread.is_alive()

    def _export_periodically(self) -> None:
        while not self._closing.wait(self._interval):
            self._export_metrics()
        self._export_metrics()

    def _export_metrics(self) -> None:
        scope = ScopeMetrics(scope=_INSTRUMENTATION_SCOPE, metrics=self._collect_metrics())
        told = ResourceMetrics(resource=self._resource, scope_metrics=[scope])
        self._client.send(ExportMetricsServiceRequest(resource_metrics=[told]))
