"""Metrics of OpenTelemetry's conventions for generative AI. The buckets are those conventions'."""

from typing import Final

from opentelemetry.metrics import Histogram, MeterProvider

from gateway import __version__
from gateway.observability.record import RequestRecord
from gateway.observability.semconv import (
    OPERATION_NAMES,
    AttributeValue,
    SemanticConventions,
    TokenDirection,
)
from gateway.observability.tracing import clean_attributes

DURATION_BUCKETS: Final = tuple(0.01 * 2**k for k in range(14))
FIRST_TOKEN_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_BUCKETS: Final = tuple(float(4**k) for k in range(14))


class OtelMetrics:
    """Histograms per operation, backend and model. The SDK limits the series of each."""

    def __init__(self, names: SemanticConventions, provider: MeterProvider) -> None:
        self._semconv = names
        meter = provider.get_meter("interlingua", __version__)

        def create(name: str, unit: str, buckets: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(name, unit, explicit_bucket_boundaries_advisory=buckets)

        self._duration = create(names.duration, "s", DURATION_BUCKETS)
        self._ttft = create(names.ttft, "s", FIRST_TOKEN_BUCKETS)
        self._tpot = create(names.tpot, "s", PER_TOKEN_BUCKETS)
        self._durations = {
            name: create(name, "s", DURATION_BUCKETS) for name in {*names.durations.values()}
        }
        self._tokens = {
            name: create(name, "{token}", TOKEN_BUCKETS)
            for name in {metric.name for metric in names.tokens.values()}
        }

    def record_request(self, record: RequestRecord) -> None:
        """Record a request that has ended."""
        operation, names = OPERATION_NAMES.get(record.operation), self._semconv
        if operation is None:
            return
        attributes = clean_attributes(
            names.rename_attributes(
                {
                    "operation": operation,
                    "backend": record.backend,
                    "model": record.model,
                    "requested_model": record.model,
                }
            )
        )
        result = attributes | {"error.type": record.error} if record.error else attributes
        self._duration.record(record.duration, result)
        self._durations[names.durations[operation]].record(record.duration, result)
        first, usage = record.first_token, record.usage
        if usage is not None:
            self._count_tokens(operation, "input", usage.prompt_tokens, attributes)
            self._count_tokens(operation, "output", usage.completion_tokens, attributes)
        if first is None or record.outcome != "ok":
            return
        self._ttft.record(first, attributes)
        if usage is not None and usage.completion_tokens > 1:
            time_per_token = (record.duration - first) / (usage.completion_tokens - 1)
            self._tpot.record(time_per_token, attributes)

    def _count_tokens(
        self,
        operation: str,
        direction: TokenDirection,
        count: int,
        attributes: dict[str, AttributeValue],
    ) -> None:
        metric = self._semconv.tokens.get((operation, direction))
        if metric is None:
            return
        if metric.has_type_attribute:
            attributes = attributes | {self._semconv.attributes["direction"]: direction}
        self._tokens[metric.name].record(count, attributes)
