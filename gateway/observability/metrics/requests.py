"""What exchanges come to.

``split`` is the one that sent an exchange to its version, and "" for what was pinned, sent by a
rule, or answered in another's stead.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol, runtime_checkable

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backends.histogram import Histogram
from gateway.observability.metrics.definition import MetricDefinition
from gateway.observability.metrics.upstream import PoolCollector, PoolStats
from gateway.observability.record import RecordObserver, RequestRecord
from gateway.observability.stats import (
    RequestStats,
    StatsKey,
    build_diverted_key,
    build_stats_key,
    group_by_labels,
)

_OVERFLOW_LABEL: Final = "_other"
"""Stands for whatever comes when a table is full: a model ``*`` takes any name."""
_MAX_LABEL_SETS: Final = 10_000
"""The entries of the table of fallbacks."""
_MAX_STATS_KEYS: Final = 500
_BATCH_SIZE: Final = 64
"""So many exchanges are counted at once: each takes half the time, and no answer waits for long."""
_STATS_LABELS: Final = ("model", "version", "split")
_HistogramStats = RequestStats[Histogram]


class _RequestMetric(Struct, frozen=True):
    """A metric: of each arm's figures, what ``of`` gives."""

    definition: MetricDefinition
    read_value: Callable[[_HistogramStats], Any]


def _define_counter(
    name: str, help_: str, of: Callable[[_HistogramStats], Any], *labels: str
) -> _RequestMetric:
    """``labels`` are those beside the arm's."""
    return _RequestMetric(
        MetricDefinition(f"interlingua_{name}", "counter", help_, (*_STATS_LABELS, *labels)), of
    )


def _define_histogram(
    name: str, help_: str, of: Callable[[_HistogramStats], Histogram]
) -> _RequestMetric:
    return _RequestMetric(
        MetricDefinition(f"interlingua_{name}", "histogram", help_, _STATS_LABELS), of
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
        "Tokens, and who counted them. Cached tokens are included in input, reasoning tokens in output.",
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
        "Streams that ended early, by the side that caused it (client, worker, gateway) and error class.",
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
    """What a collector may also be: one that writes its histograms by itself."""

    def format_histograms(self) -> Iterator[str]:
        """In Prometheus's text format."""


class MetricsCollector(Collector):
    """Counts records, in plain dictionaries: nothing is looked up or locked for an exchange."""

    def __init__(
        self, following: RecordObserver, crews: Callable[[], Mapping[str, PoolStats]]
    ) -> None:
        """``following`` is told of each record, too; ``crews`` gives each backend's workers."""
        self._next_observer = following
        self._pending: list[RequestRecord] = []
        """What is not counted yet."""
        self._stats: dict[StatsKey, _HistogramStats] = {}
        self._fallbacks = Counter[tuple[str, ...]]()
        self._registry = CollectorRegistry(auto_describe=False)
        self._text_collectors: list[TextCollector] = []
        self.register(self)
        self.register(PoolCollector(crews))

    def register(self, collector: Collector) -> None:
        """Tell on the page what this tells, too."""
        self._registry.register(collector)
        if isinstance(collector, TextCollector):
            self._text_collectors.append(collector)

    def record_request(self, record: RequestRecord) -> None:
        """Count an exchange: together with others, or as soon as somebody asks."""
        self._pending.append(record)
        if len(self._pending) >= _BATCH_SIZE:
            self._count_pending()
        self._next_observer(record)

    def collect_stats(self) -> Mapping[StatsKey, _HistogramStats]:
        """What is counted of each, with all that was observed."""
        self._count_pending()
        return self._stats

    def render_page(self) -> bytes:
        """As Prometheus reads it."""
        written = "".join(line for one in self._text_collectors for line in one.format_histograms())
        return generate_latest(self._registry) + written.encode()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        arms = self.collect_stats()
        for one in _REQUEST_COUNTERS:
            yield one.definition.build_family(
                ((*arm, *key), count)
                for arm, figures in arms.items()
                for key, count in one.read_value(figures).items()
                if count
            )
        yield _FALLBACK_COUNTER.build_family(self._fallbacks.items())

    def format_histograms(self) -> Iterator[str]:
        """See Lines."""
        arms = self.collect_stats()
        for one in _REQUEST_HISTOGRAMS:
            yield from one.definition.format_histogram_lines(
                (arm, one.read_value(its)) for arm, its in arms.items()
            )

    def _count_pending(self) -> None:
        """Count what waits."""
        waiting, self._pending = self._pending, []
        for records in group_by_labels(waiting):
            any_ = records[0]
            self._get_stats(build_stats_key(any_)).add_records(*records)
            if any_.fallback_from:
                self._get_stats(build_diverted_key(any_)).answered_by_fallback += len(records)
        for record in waiting:
            for told in record.failed_attempts:
                model, _, rest = told.rpartition("@")
                version, _, why = rest.partition(" ")
                self._count_fallback(f"{model}@{version}", why)

    def _get_stats(self, arm: StatsKey) -> _HistogramStats:
        figures = self._stats.get(arm)
        if figures is None:
            if len(self._stats) >= _MAX_STATS_KEYS:
                arm = (_OVERFLOW_LABEL, _OVERFLOW_LABEL, _OVERFLOW_LABEL)
            figures = self._stats.setdefault(arm, RequestStats(Histogram))
        return figures

    def _count_fallback(self, *key: str) -> None:
        if key not in self._fallbacks and len(self._fallbacks) >= _MAX_LABEL_SETS:
            key = (_OVERFLOW_LABEL,) * len(key)
        self._fallbacks[key] += 1


# The exchanges that are not over. Asked at each look; nothing is kept here.

REQUESTS_IN_FLIGHT: Final = MetricDefinition(
    "interlingua_requests_in_flight",
    "gauge",
    "Running requests, by phase: queued for a worker, waiting for the response, or streaming it.",
    ("model", "phase"),
)
RUNNING_REQUEST_METRICS: Final = (REQUESTS_IN_FLIGHT,)


class RunningRequestCollector(Collector):
    """Looks at their records."""

    def __init__(
        self, live: Callable[[], Iterable[RequestRecord]], queued: Callable[[], Collection[str]]
    ) -> None:
        """``live`` gives those, ``queued`` the ids of the ones that wait for a worker."""
        self._get_records = live
        self._get_queued_ids = queued

    def count_by_phase(self) -> Counter[tuple[str, str]]:
        """How many there are by model and phase."""
        queued = self._get_queued_ids()
        return Counter((one.model, _get_phase(one, queued)) for one in self._get_records())

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield REQUESTS_IN_FLIGHT.build_family(self.count_by_phase().items())


def _get_phase(record: RequestRecord, queued: Collection[str]) -> str:
    if record.first_byte is not None:
        return "streaming"
    return "queued" if record.id in queued else "waiting"
