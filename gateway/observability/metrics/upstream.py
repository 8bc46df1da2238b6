"""What a pool of workers does for exchanges, and how its workers are. Asked at each look."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from msgspec import Struct
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backends.histogram import Histogram
from gateway.observability.metrics.definition import MetricDefinition, MetricSamples


class PoolCounters(Protocol):
    """What a pool counts; see ``backends.pool.metrics``, which has the fields' meaning."""

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
    """The workers of a backend."""

    @property
    def metrics(self) -> PoolCounters:
        """What is counted of them."""

    @property
    def discovery_failures(self) -> int:
        """How often who names workers could not be asked."""

    @property
    def queued_request_ids(self) -> Sequence[str]:
        """The ids of the exchanges that wait for one of them."""

    @property
    def in_panic(self) -> bool:
        """Whether their health is ignored, since too few are well."""

    @property
    def connections(self) -> Any:
        """How many there are to them: ``open``, ``resting``, ``made`` and ``failed``."""

    def report_workers(self) -> Sequence[Any]:
        """How each worker is: its ``url``, ``state``, ``in_flight``, ``limit`` and ``latency``."""


class _PoolMetric(Struct, frozen=True):
    """A metric: of a pool, by the labels beside ``backend``, what ``of`` gives."""

    definition: MetricDefinition
    read_samples: Callable[[PoolStats], MetricSamples]


def _define_pool_counter(
    name: str, help_: str, of: Callable[[PoolStats], MetricSamples], *labels: str
) -> _PoolMetric:
    return _PoolMetric(
        MetricDefinition(f"interlingua_{name}", "counter", help_, ("backend", *labels)), of
    )


def _define_pool_gauge(
    name: str, help_: str, of: Callable[[PoolStats], MetricSamples], *labels: str
) -> _PoolMetric:
    return _PoolMetric(
        MetricDefinition(f"interlingua_{name}", "gauge", help_, ("backend", *labels)), of
    )


def _define_largest_gauge(
    name: str, help_: str, of: Callable[[PoolStats], MetricSamples], *labels: str
) -> _PoolMetric:
    """A gauge that is in all processes what it is in the one where it is the largest."""
    return _PoolMetric(
        MetricDefinition(f"interlingua_{name}", "gauge", help_, ("backend", *labels), "largest"), of
    )


def _label_by_name(counts: Mapping[str, int]) -> MetricSamples:
    return (((name,), count) for name, count in counts.items())


def _read_worker_values(name: str, crew: PoolStats) -> Iterable[tuple[Sequence[str], float]]:
    """What is known of each worker; nothing of one of which it is not known."""
    known = ((one.url, getattr(one, name)) for one in crew.report_workers())
    return (((url,), value) for url, value in known if value is not None)


_POOL_METRICS: Final = (
    _define_largest_gauge(
        "worker_up",
        "1 if the worker is in rotation, 0 if it is ejected.",
        lambda crew: (((one.url,), float(one.state != "out")) for one in crew.report_workers()),
        "worker",
    ),
    _define_pool_gauge(
        "worker_in_flight",
        "Requests in flight at the worker.",
        lambda crew: _read_worker_values("in_flight", crew),
        "worker",
    ),
    _define_pool_gauge(
        "worker_limit",
        "Maximum concurrent requests of the worker, if limited.",
        lambda crew: _read_worker_values("limit", crew),
        "worker",
    ),
    _define_largest_gauge(
        "worker_latency_seconds",
        "Recent time to first token of the worker, if known.",
        lambda crew: _read_worker_values("latency", crew),
        "worker",
    ),
    _define_largest_gauge(
        "backend_panic",
        "1 while health is ignored because too few workers are healthy.",
        lambda crew: (((), float(crew.in_panic)),),
    ),
    _define_pool_gauge(
        "queue_length",
        "Requests waiting for a worker.",
        lambda crew: (((), len(crew.queued_request_ids)),),
    ),
    _define_pool_gauge(
        "upstream_connections",
        "Connections to workers, by state: active or idle.",
        lambda crew: (
            (("active",), crew.connections.open - crew.connections.idle),
            (("idle",), crew.connections.idle),
        ),
        "state",
    ),
    _define_pool_counter(
        "upstream_connects",
        "Connection attempts to workers, by result: established or failed.",
        lambda crew: (
            (("established",), crew.connections.created),
            (("failed",), crew.connections.failed),
        ),
        "result",
    ),
    _define_pool_counter(
        "upstream_failures",
        "Failed attempts at workers: connect, first_token, idle, total, disconnect, invalid_response, or an HTTP status.",
        lambda crew: _label_by_name(crew.metrics.failures),
        "kind",
    ),
    _define_pool_counter(
        "upstream_cancellations",
        "Attempts cancelled at the worker because no client waited for them.",
        lambda crew: (((), crew.metrics.abandoned),),
    ),
    _define_pool_counter(
        "retries",
        "Retries on another worker, by the failure of the attempt before.",
        lambda crew: _label_by_name(crew.metrics.retries),
        "reason",
    ),
    _define_pool_counter(
        "retry_budget_exhausted",
        "Requests not retried because the retry budget was spent.",
        lambda crew: (((), crew.metrics.exhausted),),
    ),
    _define_pool_counter(
        "shed",
        "Requests rejected without a worker: queue_full, queue_wait, or no_worker.",
        lambda crew: _label_by_name(crew.metrics.shed),
        "reason",
    ),
    _define_pool_counter(
        "discovery_failures",
        "Failed lookups of a worker list.",
        lambda crew: (((), crew.discovery_failures),),
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
        lambda crew: crew.metrics.request_durations,
    ),
    (
        MetricDefinition(
            "interlingua_queue_wait_seconds",
            "histogram",
            "Time that queued requests waited for a worker.",
            ("backend",),
        ),
        lambda crew: crew.metrics.queue_times,
    ),
    (
        MetricDefinition(
            "interlingua_max_inter_chunk_gap_seconds",
            "histogram",
            "Longest gap between two reads from the worker, one value per complete stream.",
            ("backend",),
        ),
        lambda crew: crew.metrics.stream_gaps,
    ),
)
UPSTREAM_METRICS: Final = (
    *(one.definition for one in _POOL_METRICS),
    *(told for told, _ in _POOL_HISTOGRAMS),
)


class PoolCollector(Collector):
    """Nothing is kept here."""

    def __init__(self, crews: Callable[[], Mapping[str, PoolStats]]) -> None:
        """``crews`` gives those there are now, by their backends' names."""
        self._get_pools = crews

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        crews = self._get_pools()
        for one in _POOL_METRICS:
            yield one.definition.build_family(
                ((name, *labels), value)
                for name, crew in crews.items()
                for labels, value in one.read_samples(crew)
            )

    def format_histograms(self) -> Iterator[str]:
        """See ``gateway.observability.metrics.requests.TextCollector``."""
        for told, of in _POOL_HISTOGRAMS:
            yield from told.format_histogram_lines(
                ((name,), of(crew)) for name, crew in self._get_pools().items()
            )
