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
        "Whether it is asked.",
        lambda crew: (((one.url,), float(one.state != "out")) for one in crew.report_workers()),
        "worker",
    ),
    _define_pool_gauge(
        "worker_in_flight",
        "The requests that it has.",
        lambda crew: _read_worker_values("in_flight", crew),
        "worker",
    ),
    _define_pool_gauge(
        "worker_limit",
        "The most that it is given at a time, where there is a most.",
        lambda crew: _read_worker_values("limit", crew),
        "worker",
    ),
    _define_largest_gauge(
        "worker_latency_seconds",
        "To the first token of late, where that is known.",
        lambda crew: _read_worker_values("latency", crew),
        "worker",
    ),
    _define_largest_gauge(
        "backend_panic",
        "Whether health is ignored, since too few workers are well.",
        lambda crew: (((), float(crew.in_panic)),),
    ),
    _define_pool_gauge(
        "queue_length",
        "Requests that wait for a place.",
        lambda crew: (((), len(crew.queued_request_ids)),),
    ),
    _define_pool_gauge(
        "upstream_connections",
        "Connections to workers: busy or resting.",
        lambda crew: (
            (("busy",), crew.connections.open - crew.connections.idle),
            (("resting",), crew.connections.idle),
        ),
        "state",
    ),
    _define_pool_counter(
        "upstream_connects",
        "Connections made to workers, or tried in vain.",
        lambda crew: (
            (("made",), crew.connections.created),
            (("failed",), crew.connections.failed),
        ),
        "result",
    ),
    _define_pool_counter(
        "upstream_failures",
        "What workers failed with: connect, first_token, idle, total, cut, garbage, or a status.",
        lambda crew: _label_by_name(crew.metrics.failures),
        "kind",
    ),
    _define_pool_counter(
        "cancelled_upstream",
        "Answers that were ended at their worker, since nobody waited for them.",
        lambda crew: (((), crew.metrics.abandoned),),
    ),
    _define_pool_counter(
        "retries",
        "Further workers that were asked for a request, by what the one before failed with.",
        lambda crew: _label_by_name(crew.metrics.retries),
        "reason",
    ),
    _define_pool_counter(
        "retry_budget_exhausted",
        "Requests that were not tried again, since too many had been.",
        lambda crew: (((), crew.metrics.exhausted),),
    ),
    _define_pool_counter(
        "shed",
        "Requests that got no worker: queue_full, queue_wait, or no_worker where there is none.",
        lambda crew: _label_by_name(crew.metrics.shed),
        "reason",
    ),
    _define_pool_counter(
        "discovery_failures",
        "Looks that found no workers.",
        lambda crew: (((), crew.discovery_failures),),
    ),
)
_POOL_HISTOGRAMS: Final[tuple[tuple[MetricDefinition, Callable[[PoolStats], Histogram]], ...]] = (
    (
        MetricDefinition(
            "interlingua_upstream_request_duration_seconds",
            "histogram",
            "Of each try at a worker, to its end.",
            ("backend",),
        ),
        lambda crew: crew.metrics.request_durations,
    ),
    (
        MetricDefinition(
            "interlingua_queue_wait_seconds",
            "histogram",
            "For a place at a worker, of the requests that had to wait.",
            ("backend",),
        ),
        lambda crew: crew.metrics.queue_times,
    ),
    (
        MetricDefinition(
            "interlingua_longest_pause_seconds",
            "histogram",
            "Of streams that came to their end, the longest time from one read to the next.",
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
