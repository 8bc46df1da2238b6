"""Metrics of worker pools and their workers, read whenever the page is rendered."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, Protocol, runtime_checkable

from msgspec import Struct
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backends.histogram import Histogram
from gateway.observability.metrics.definition import MergeMode, MetricDefinition, MetricSamples


class PoolCounters(Protocol):
    """The counters of a pool; ``backends.pool.metrics`` documents the fields."""

    retries: Counter[str]
    exhausted: int
    failures: Counter[str]
    shed: Counter[str]
    abandoned: int
    request_durations: Histogram
    queue_times: Histogram
    stream_gaps: Histogram


@runtime_checkable
class PoolStats(Protocol):
    """A backend with a pool of workers."""

    @property
    def metrics(self) -> PoolCounters:
        """Its counters."""

    @property
    def discovery_failures(self) -> int:
        """Failed lookups of worker lists."""

    @property
    def queued_request_ids(self) -> Sequence[str]:
        """The ids of the requests that wait for a worker."""

    @property
    def in_panic(self) -> bool:
        """Whether health is ignored because too few workers are healthy."""

    @property
    def connections(self) -> Any:
        """Connections to the workers: ``open``, ``idle``, ``created`` and ``failed``."""

    def report_workers(self) -> Sequence[Any]:
        """A report per worker: ``url``, ``state``, ``in_flight``, ``limit`` and ``latency``."""


class _PoolMetric(Struct, frozen=True):
    """A metric of a pool. ``read_samples`` gives samples by the labels after ``backend``."""

    definition: MetricDefinition
    read_samples: Callable[[PoolStats], MetricSamples]


def _define_metric(
    kind: Literal["counter", "gauge"],
    name: str,
    help_: str,
    read_samples: Callable[[PoolStats], MetricSamples],
    *labels: str,
    merge_mode: MergeMode = "sum",
) -> _PoolMetric:
    """``labels`` are added to the backend."""
    return _PoolMetric(
        MetricDefinition(f"interlingua_{name}", kind, help_, ("backend", *labels), merge_mode),
        read_samples,
    )


_define_counter: Final = partial(_define_metric, "counter")
_define_gauge: Final = partial(_define_metric, "gauge")
_define_largest_gauge: Final = partial(_define_metric, "gauge", merge_mode="largest")


def _label_by_name(counts: Mapping[str, int]) -> MetricSamples:
    return (((name,), count) for name, count in counts.items())


def _read_worker_values(name: str, pool: PoolStats) -> Iterable[tuple[Sequence[str], float]]:
    """Read an attribute of each worker's report; workers where it is None are omitted."""
    values = ((worker.url, getattr(worker, name)) for worker in pool.report_workers())
    return (((url,), value) for url, value in values if value is not None)


_POOL_METRICS: Final = (
    _define_largest_gauge(
        "worker_up",
        "1 if the worker is in rotation, 0 if it is ejected.",
        lambda pool: (((one.url,), float(one.state != "out")) for one in pool.report_workers()),
        "worker",
    ),
    _define_gauge(
        "worker_in_flight",
        "Requests in flight at the worker.",
        lambda pool: _read_worker_values("in_flight", pool),
        "worker",
    ),
    _define_gauge(
        "worker_limit",
        "Maximum concurrent requests of the worker, if limited.",
        lambda pool: _read_worker_values("limit", pool),
        "worker",
    ),
    _define_largest_gauge(
        "worker_latency_seconds",
        "Mean time to first token of the worker's last streams, if known.",
        lambda pool: _read_worker_values("latency", pool),
        "worker",
    ),
    _define_largest_gauge(
        "backend_panic",
        "1 while health is ignored because too few workers are healthy.",
        lambda pool: (((), float(pool.in_panic)),),
    ),
    _define_gauge(
        "queue_length",
        "Requests waiting for a worker.",
        lambda pool: (((), len(pool.queued_request_ids)),),
    ),
    _define_gauge(
        "upstream_connections",
        "Connections to workers, by state: active or idle.",
        lambda pool: (
            (("active",), pool.connections.open - pool.connections.idle),
            (("idle",), pool.connections.idle),
        ),
        "state",
    ),
    _define_counter(
        "upstream_connects",
        "Connection attempts to workers, by result: established or failed.",
        lambda pool: (
            (("established",), pool.connections.created),
            (("failed",), pool.connections.failed),
        ),
        "result",
    ),
    _define_counter(
        "upstream_failures",
        "Failed attempts: connect, first_token, idle, total, disconnect, invalid_response, status.",
        lambda pool: _label_by_name(pool.metrics.failures),
        "kind",
    ),
    _define_counter(
        "upstream_cancellations",
        "Attempts cancelled at the worker because no client waited for them.",
        lambda pool: (((), pool.metrics.abandoned),),
    ),
    _define_counter(
        "retries",
        "Retries on another worker, by the failure of the attempt before.",
        lambda pool: _label_by_name(pool.metrics.retries),
        "reason",
    ),
    _define_counter(
        "retry_budget_exhausted",
        "Requests not retried because the retry budget was spent.",
        lambda pool: (((), pool.metrics.exhausted),),
    ),
    _define_counter(
        "shed",
        "Requests rejected without a worker: queue_full, queue_wait, or no_worker.",
        lambda pool: _label_by_name(pool.metrics.shed),
        "reason",
    ),
    _define_counter(
        "discovery_failures",
        "Failed lookups of a worker list.",
        lambda pool: (((), pool.discovery_failures),),
    ),
)
_POOL_HISTOGRAMS: Final[tuple[tuple[MetricDefinition, Callable[[PoolStats], Histogram]], ...]] = (
    (
        MetricDefinition(
            "interlingua_upstream_request_duration_seconds",
            "histogram",
            "Duration of each attempt at a worker.",
            ("backend",),
        ),
        lambda pool: pool.metrics.request_durations,
    ),
    (
        MetricDefinition(
            "interlingua_queue_wait_seconds",
            "histogram",
            "Time that queued requests waited for a worker.",
            ("backend",),
        ),
        lambda pool: pool.metrics.queue_times,
    ),
    (
        MetricDefinition(
            "interlingua_max_inter_chunk_gap_seconds",
            "histogram",
            "Longest gap between two reads from the worker, one value per complete stream.",
            ("backend",),
        ),
        lambda pool: pool.metrics.stream_gaps,
    ),
)
UPSTREAM_METRICS: Final = (
    *(one.definition for one in _POOL_METRICS),
    *(definition for definition, _ in _POOL_HISTOGRAMS),
)


class PoolCollector(Collector):
    """Reads the pools; it keeps no state."""

    def __init__(self, get_pools: Callable[[], Mapping[str, PoolStats]]) -> None:
        """``get_pools`` gives the current pools by backend name."""
        self._get_pools = get_pools

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        pools = self._get_pools()
        for metric in _POOL_METRICS:
            yield metric.definition.build_family(
                ((name, *labels), value)
                for name, pool in pools.items()
                for labels, value in metric.read_samples(pool)
            )

    def format_histograms(self) -> Iterator[str]:
        """See ``gateway.observability.metrics.requests.TextCollector``."""
        for definition, read_histogram in _POOL_HISTOGRAMS:
            yield from definition.format_histogram_lines(
                ((name,), read_histogram(pool)) for name, pool in self._get_pools().items()
            )
