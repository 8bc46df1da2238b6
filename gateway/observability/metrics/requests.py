"""Metrics of finished and running requests, and the collectors that count them.

The label ``split`` is the traffic split that chose the version; it is "" for pinned versions,
routes and fallbacks.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backends.histogram import Histogram
from gateway.observability.metrics.definition import (
    OVERFLOW_LABEL,
    MetricDefinition,
    increment_bounded,
)
from gateway.observability.metrics.shadows import ComparedRequest
from gateway.observability.metrics.upstream import PoolCollector, PoolStats
from gateway.observability.record import RecordObserver, RequestRecord
from gateway.observability.stats import (
    RequestStats,
    StatsKey,
    build_fallback_key,
    build_stats_key,
    group_by_labels,
)

_MAX_LABEL_SETS: Final = 10_000
"""Maximum entries in the table of fallbacks."""
_MAX_STATS_KEYS: Final = 500
_BATCH_SIZE: Final = 256
"""Records counted together: the larger the batch, the less a record costs. 256 take 1 ms."""
MAX_FINISHED_REQUESTS: Final = 200
"""How many of the last finished requests are kept."""
_STATS_LABELS: Final = ("model", "version", "split")
_HistogramStats = RequestStats[Histogram]


class _RequestMetric(Struct, frozen=True):
    """A metric that ``read_value`` reads from each ``RequestStats``."""

    definition: MetricDefinition
    read_value: Callable[[_HistogramStats], Any]


def _define_counter(
    name: str, help_: str, read_value: Callable[[_HistogramStats], Any], *labels: str
) -> _RequestMetric:
    """``labels`` are added to model, version and split."""
    return _RequestMetric(
        MetricDefinition(f"interlingua_{name}", "counter", help_, (*_STATS_LABELS, *labels)),
        read_value,
    )


def _define_histogram(
    name: str, help_: str, read_value: Callable[[_HistogramStats], Histogram]
) -> _RequestMetric:
    return _RequestMetric(
        MetricDefinition(f"interlingua_{name}", "histogram", help_, _STATS_LABELS), read_value
    )


_REQUEST_COUNTERS: Final = (
    _define_counter(
        "requests",
        "Requests, by outcome.",
        lambda one: one.outcomes,
        *("protocol", "backend", "outcome"),
    ),
    _define_counter(
        "errors",
        "Failed requests, by error class.",
        lambda one: one.errors,
        "error",
    ),
    _define_counter(
        "unsupported_parameters",
        "Parameters that the target does not support, by internal field and reason.",
        lambda one: one.unsupported_parameters,
        *("field", "reason"),
    ),
    _define_counter(
        "lossy_requests",
        "Requests with at least one unsupported parameter.",
        lambda one: {(): one.lossy_requests},
    ),
    _define_counter(
        "tokens",
        "Tokens by source. Input includes cached tokens, output includes reasoning tokens.",
        lambda one: one.tokens,
        *("direction", "source"),
    ),
    _define_counter(
        "wasted_tokens",
        "Tokens sent to clients in streams that ended early.",
        lambda one: {(): one.wasted_tokens},
    ),
    _define_counter(
        "finish_reasons",
        "Finished choices, by finish reason.",
        lambda one: one.finish_reasons,
        "reason",
    ),
    _define_counter(
        "stream_aborts",
        "Streams that ended early, by side (client, worker or gateway) and error class.",
        lambda one: one.aborts,
        *("side", "reason"),
    ),
    _define_counter(
        "requests_answered_by_fallback",
        "Requests sent to this target that a fallback answered.",
        lambda one: {(): one.answered_by_fallback},
    ),
)
_REQUEST_HISTOGRAMS: Final = (
    _define_histogram(
        "time_to_first_token_seconds",
        "Time from the request to the first token of a stream.",
        lambda one: one.first_token,
    ),
    _define_histogram(
        "request_duration_seconds",
        "Duration of requests that ended successfully.",
        lambda one: one.duration,
    ),
    _define_histogram(
        "time_per_output_token_seconds",
        "Mean time per token after the first, one value per stream.",
        lambda one: one.per_token,
    ),
    _define_histogram(
        "overhead_seconds",
        "Time the gateway itself takes before it asks for a worker or a queue slot.",
        lambda one: one.overhead,
    ),
    _define_histogram(
        "prompt_tokens", "Prompt tokens per successful request.", lambda one: one.prompt_tokens
    ),
    _define_histogram(
        "completion_tokens",
        "Completion tokens per successful request.",
        lambda one: one.completion_tokens,
    ),
)
_FALLBACK_COUNTER: Final = MetricDefinition(
    "interlingua_fallbacks",
    "counter",
    "Targets that were skipped or failed so that a fallback was tried, by error.",
    ("target", "error"),
)
REQUEST_METRICS: Final = (
    *(one.definition for one in (*_REQUEST_COUNTERS, *_REQUEST_HISTOGRAMS)),
    _FALLBACK_COUNTER,
)


@runtime_checkable
class TextCollector(Protocol):
    """A collector that formats its own histograms."""

    def format_histograms(self) -> Iterator[str]:
        """Lines in the Prometheus text format."""


class MetricsCollector(Collector):
    """Counts request records in plain dictionaries, without locks."""

    def __init__(
        self, next_observer: RecordObserver, get_pools: Callable[[], Mapping[str, PoolStats]]
    ) -> None:
        """``next_observer`` gets each record too; ``get_pools`` gives the pools by backend name."""
        self._next_observer = next_observer
        self._pending: list[RequestRecord] = []
        """Records not counted yet."""
        self._finished = deque[RequestRecord](maxlen=MAX_FINISHED_REQUESTS)
        self._stats: dict[StatsKey, _HistogramStats] = {}
        self._fallbacks = Counter[tuple[str, ...]]()
        self._registry = CollectorRegistry(auto_describe=False)
        self._text_collectors: list[TextCollector] = []
        self.register(self)
        self.register(PoolCollector(get_pools))

    def register(self, collector: Collector) -> None:
        """Add the metrics of another collector to the page."""
        self._registry.register(collector)
        if isinstance(collector, TextCollector):
            self._text_collectors.append(collector)

    def record_request(self, record: RequestRecord) -> None:
        """Count a request, in a batch or when the metrics are read."""
        self._pending.append(record)
        if len(self._pending) >= _BATCH_SIZE:
            self._count_pending()
        self._next_observer(record)

    def record_shadow(self, pair: ComparedRequest) -> None:
        """Count a shadow request, for the version that it was sent to."""
        shadow = pair.shadow
        self._get_stats((shadow.model, shadow.version, "")).shadow_requests += 1

    def collect_stats(self) -> Mapping[StatsKey, _HistogramStats]:
        """The statistics of all requests recorded so far."""
        self._count_pending()
        return self._stats

    def list_finished(self) -> Sequence[RequestRecord]:
        """The last requests that a model answered or that failed, the latest first."""
        self._count_pending()
        return [*reversed(self._finished)]

    def render_page(self) -> bytes:
        """The page in the Prometheus text format."""
        histograms = "".join(
            line for one in self._text_collectors for line in one.format_histograms()
        )
        return generate_latest(self._registry) + histograms.encode()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        stats_by_key = self.collect_stats()
        for metric in _REQUEST_COUNTERS:
            yield metric.definition.build_family(
                ((*key, *labels), count)
                for key, stats in stats_by_key.items()
                for labels, count in metric.read_value(stats).items()
                if count
            )
        yield _FALLBACK_COUNTER.build_family(self._fallbacks.items())

    def format_histograms(self) -> Iterator[str]:
        """See ``TextCollector``."""
        stats_by_key = self.collect_stats()
        for metric in _REQUEST_HISTOGRAMS:
            yield from metric.definition.format_histogram_lines(
                (key, metric.read_value(stats)) for key, stats in stats_by_key.items()
            )

    def _count_pending(self) -> None:
        """Count the pending records."""
        pending, self._pending = self._pending, []
        self._finished.extend(one for one in pending if one.model or one.outcome != "ok")
        for records in group_by_labels(pending):
            first = records[0]
            self._get_stats(build_stats_key(first)).add_records(*records)
            if first.fallback_from:
                self._get_stats(build_fallback_key(first)).answered_by_fallback += len(records)
        for record in pending:
            for attempt in record.failed_attempts:
                model, _, rest = attempt.rpartition("@")
                version, _, error = rest.partition(" ")
                increment_bounded(self._fallbacks, (f"{model}@{version}", error), _MAX_LABEL_SETS)

    def _get_stats(self, key: StatsKey) -> _HistogramStats:
        stats = self._stats.get(key)
        if stats is None:
            if len(self._stats) >= _MAX_STATS_KEYS:
                key = (OVERFLOW_LABEL, OVERFLOW_LABEL, OVERFLOW_LABEL)
            stats = self._stats.setdefault(key, RequestStats(Histogram))
        return stats


REQUESTS_IN_FLIGHT: Final = MetricDefinition(
    "interlingua_requests_in_flight",
    "gauge",
    "Running requests, by phase: queued for a worker, waiting for the response, or streaming it.",
    ("model", "phase"),
)
RUNNING_REQUEST_METRICS: Final = (REQUESTS_IN_FLIGHT,)


class RunningRequestCollector(Collector):
    """Counts running requests from their records."""

    def __init__(
        self,
        get_records: Callable[[], Iterable[RequestRecord]],
        get_queued_ids: Callable[[], Collection[str]],
    ) -> None:
        """``get_records`` gives the running requests, ``get_queued_ids`` the ids of queued ones."""
        self._get_records = get_records
        self._get_queued_ids = get_queued_ids

    def count_by_phase(self) -> Counter[tuple[str, str]]:
        """The number of running requests by model and phase."""
        queued = self._get_queued_ids()
        return Counter((one.model, _get_phase(one, queued)) for one in self._get_records())

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield REQUESTS_IN_FLIGHT.build_family(self.count_by_phase().items())


def _get_phase(record: RequestRecord, queued: Collection[str]) -> str:
    if record.first_byte is not None:
        return "streaming"
    return "queued" if record.id in queued else "waiting"
