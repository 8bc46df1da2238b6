"""Exports traces and metrics by OTLP over HTTP, with the threads of the OpenTelemetry SDK.

Beside the SDK stand a limit of whole traces with a count of those dropped, one log line when a
collector fails or recovers instead of one per batch, and a limited wait at shutdown.
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind

from gateway import __version__

log = logging.getLogger("interlingua")
# A client's invalid tracestate and each batch that a collector refuses would be a line in the log.
logging.getLogger("opentelemetry").setLevel(logging.ERROR)
logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)

_EXPORT_TIMEOUT: Final = 5.0
"""Seconds to send a batch, with all retries."""
_SPAN_BATCH_DELAY: Final = 1.0
"""Seconds in which spans are collected into a batch."""
_MAX_SPANS_PER_BATCH: Final = 512


def build_resource(instance: str) -> Resource:
    """The OpenTelemetry resource; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES extend it."""
    attributes = {
        "service.name": "interlingua",
        "service.version": __version__,
        "service.instance.id": instance,
    }
    return Resource(attributes).merge(OTELResourceDetector().detect())


class CollectorSession(requests.Session):
    """The connections to one path of a collector; logs when the collector fails or recovers."""

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False
        """Without proxies and passwords of the environment."""
        self.healthy = True
        """Whether the last request was accepted."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """See requests.Session."""
        failure = ""
        try:
            response = super().send(request, **options)
            failure = "" if response.ok else str(response.status_code)
        except requests.RequestException as error:
            failure = type(error).__name__
            raise
        finally:
            if failure and self.healthy:
                log.warning("the collector %s accepts nothing: %s", request.url, failure)
            elif not failure and not self.healthy:
                log.warning("the collector %s accepts data again", request.url)
            self.healthy = not failure
        return response


class _SpanExporter(OTLPSpanExporter):
    """Counts the traces that are sent."""

    started = 0
    """Traces that were taken from the queue."""
    failed = 0
    """Traces that the collector did not accept."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See the SDK's SpanExporter."""
        traces = sum(span.kind is SpanKind.SERVER for span in spans)
        self.started += traces
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.failed += traces
        return result


class TraceExporter:
    """Exports the spans of ``provider`` in batches of one second."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        max_waiting: int,
        resource: Resource,
        sample_rate: float,
    ) -> None:
        """At most ``max_waiting`` traces are queued."""
        self._max_waiting = max_waiting
        self._queued = 0
        self._rejected = 0
        self._session = CollectorSession()
        self._exporter = _SpanExporter(
            f"{url}/v1/traces",
            headers=dict(headers),
            timeout=_EXPORT_TIMEOUT,
            session=self._session,
        )
        self.provider = TracerProvider(
            ParentBased(TraceIdRatioBased(sample_rate)), resource, shutdown_on_exit=False
        )
        # ``reserve`` limits the queue: the processor would drop single spans, and not count them.
        processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=sys.maxsize,
            schedule_delay_millis=_SPAN_BATCH_DELAY * 1000,
            max_export_batch_size=_MAX_SPANS_PER_BATCH,
        )
        self.provider.add_span_processor(processor)

    def reserve(self) -> bool:
        """See ``gateway.observability.tracing.TraceQueue``."""
        if self._queued - self._exporter.started >= self._max_waiting:
            self._rejected += 1
            return False
        self._queued += 1
        return True

    def count_dropped(self) -> int:
        """The number of dropped traces."""
        return self._rejected + self._exporter.failed

    def close(self, within: float) -> bool:
        """Export what is queued within ``within`` seconds and stop; False if some is left."""
        if not self._session.healthy:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]
        return _run(self.provider.shutdown, within)


class MetricExporter:
    """Exports the metrics of ``provider`` at an interval and once at the end."""

    def __init__(
        self, url: str, headers: Mapping[str, str], interval: float, resource: Resource
    ) -> None:
        self._session = CollectorSession()
        self._exporter = OTLPMetricExporter(
            f"{url}/v1/metrics",
            headers=dict(headers),
            timeout=_EXPORT_TIMEOUT,
            session=self._session,
        )
        reader = PeriodicExportingMetricReader(self._exporter, interval * 1000)
        self.provider = MeterProvider([reader], resource, shutdown_on_exit=False)

    def close(self, within: float) -> bool:
        """Export a last time within ``within`` seconds; False if it took longer."""
        if not self._session.healthy:
            self._exporter.shutdown()
        return _run(self.provider.shutdown, within)


def _run(shutdown: Callable[[], None], within: float) -> bool:
    """Run a provider's shutdown, which sends what is left; False if it took longer."""
    thread = threading.Thread(target=shutdown, name="exporter shutdown", daemon=True)
    thread.start()
    thread.join(within)
    return not thread.is_alive()
