"""Cumulative histograms under the OpenTelemetry conventions for generative AI.

The bucket edges are those of the conventions.
"""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE as _CUMULATIVE,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Histogram as OtlpHistogram
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint, Metric

from backends.histogram import Histogram
from gateway.observability.record import RequestRecord
from gateway.observability.semconv import (
    OPERATION_NAMES,
    AttributeValue,
    SemanticConventions,
    TokenDirection,
)
from gateway.observability.tracing import encode_attributes

DURATION_BUCKETS: Final = tuple(0.01 * 2**k for k in range(14))
FIRST_TOKEN_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_BUCKETS: Final = tuple(float(4**k) for k in range(14))
_NANOSECONDS_PER_SECOND: Final = 1_000_000_000
_MAX_SERIES: Final = 2000
"""Maximum series; further ones are counted under ``_OVERFLOW_LABEL``."""
_OVERFLOW_LABEL: Final = "_other"


class _SeriesKey(Struct, frozen=True):
    """The name and attributes of a histogram."""

    name: str
    operation: str
    backend: str
    model: str
    error: str = ""
    direction: str = ""

    def build_attributes(self) -> dict[str, AttributeValue | None]:
        """The attributes by the gateway's names."""
        return {
            "operation": self.operation,
            "backend": self.backend,
            "model": self.model,
            "requested_model": self.model,
            "direction": self.direction,
        }


class OtelMetrics:
    """Histograms per operation, backend and model."""

    def __init__(self, names: SemanticConventions, started_at: float) -> None:
        """``started_at`` is the start of the counting, in Unix seconds."""
        self._semconv = names
        self._started_at = started_at
        self._series: dict[_SeriesKey, Histogram] = {}

    def record_request(self, record: RequestRecord) -> None:
        """Record a request that has ended."""
        operation = OPERATION_NAMES.get(record.operation)
        if operation is None:
            return
        labels = operation, record.backend, record.model
        for name in (self._semconv.duration, self._semconv.durations[operation]):
            self._add_value(
                _SeriesKey(name, *labels, record.error), DURATION_BUCKETS, record.duration
            )
        first, usage, names = record.first_token, record.usage, self._semconv
        if usage is not None:
            self._count_tokens(labels, usage.prompt_tokens, usage.completion_tokens)
        if first is None or record.outcome != "ok":
            return
        self._add_value(_SeriesKey(names.ttft, *labels), FIRST_TOKEN_BUCKETS, first)
        if usage is not None and usage.completion_tokens > 1:
            mean = (record.duration - first) / (usage.completion_tokens - 1)
            self._add_value(_SeriesKey(names.tpot, *labels), PER_TOKEN_BUCKETS, mean)

    def build_metrics(self, now: float) -> Iterator[Metric]:
        """Build the export at ``now`` (Unix seconds); thread-safe."""
        points: dict[str, list[HistogramDataPoint]] = {}
        for series, histogram in self._series.copy().items():
            counts = histogram.counts.copy()
            named = self._semconv.rename_attributes(series.build_attributes())
            points.setdefault(series.name, []).append(
                HistogramDataPoint(
                    attributes=encode_attributes(named | {"error.type": series.error}),
                    start_time_unix_nano=int(self._started_at * _NANOSECONDS_PER_SECOND),
                    time_unix_nano=int(now * _NANOSECONDS_PER_SECOND),
                    count=sum(counts),
                    sum=histogram.total,
                    bucket_counts=counts,
                    explicit_bounds=histogram.edges,
                )
            )
        for name, data_points in points.items():
            histogram_data = OtlpHistogram(
                data_points=data_points, aggregation_temporality=_CUMULATIVE
            )
            unit = "{token}" if data_points[0].explicit_bounds[0] == TOKEN_BUCKETS[0] else "s"
            yield Metric(name=name, unit=unit, histogram=histogram_data)

    def _count_tokens(self, labels: tuple[str, str, str], prompt: int, completion: int) -> None:
        counts: tuple[tuple[TokenDirection, int], ...] = (("input", prompt), ("output", completion))
        for direction, count in counts:
            counted = self._semconv.tokens.get((labels[0], direction))
            if counted is not None:
                label = direction if counted.has_type_attribute else ""
                self._add_value(
                    _SeriesKey(counted.name, *labels, direction=label), TOKEN_BUCKETS, count
                )

    def _add_value(self, series: _SeriesKey, edges: tuple[float, ...], value: float) -> None:
        histogram = self._series.get(series)
        if histogram is None:
            if len(self._series) >= _MAX_SERIES:
                series = replace(series, backend=_OVERFLOW_LABEL, model=_OVERFLOW_LABEL)
            histogram = self._series.setdefault(series, Histogram(edges))
        histogram.add(value)
