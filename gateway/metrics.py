"""What all exchanges come to, counted for Prometheus. Labels are configured names only.

interlingua_requests_total{dialect,model,version,split,backend,outcome}
interlingua_errors_total{model,version,split,error}
interlingua_losses_total{model,version,split,field,reason}
interlingua_lossy_requests_total{model,version,split}
interlingua_tokens_total{model,version,split,direction,source}
interlingua_finishes_total{model,version,split,reason}
interlingua_diversions_total{model,version,split}
interlingua_time_to_first_token_seconds{model,version,split}
interlingua_request_duration_seconds{model,version,split}
interlingua_time_per_output_token_seconds{model,version,split}
interlingua_completion_tokens{model,version,split}
interlingua_fallbacks_total{target,error}
interlingua_worker_up{backend,worker}
interlingua_worker_in_flight{backend,worker}
interlingua_discovery_failures_total{backend}

``split`` is the one that sent an exchange to its version, and "" for what was pinned, sent by a
rule, or answered in another's stead.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.figures import Arm, Figures, Histogram, answered, left
from gateway.telemetry import Observer, Record

_OTHER = "_other"
"""Stands for whatever comes when a table is full: a model ``*`` takes any name."""
_MOST = 10_000
"""The entries of the table of fallbacks."""
_MOST_ARMS = 500
_ARM = ("model", "version", "split")
_Figures = Figures[Histogram]
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class _Told(Struct, frozen=True):
    """A metric: of each arm's figures, what ``of`` gives."""

    name: str
    help: str
    of: Callable[[_Figures], Any]
    labels: tuple[str, ...] = ()
    """Those beside the arm's."""


_COUNTERS = (
    _Told(
        "requests",
        "Exchanges, by how they ended.",
        lambda one: one.outcomes,
        ("dialect", "backend", "outcome"),
    ),
    _Told(
        "errors",
        "Exchanges that failed, by the class of the error.",
        lambda one: one.errors,
        ("error",),
    ),
    _Told(
        "losses",
        "What targets could not honour, by the internal field.",
        lambda one: one.losses,
        ("field", "reason"),
    ),
    _Told("lossy_requests", "Exchanges of which something was lost.", lambda one: {(): one.lossy}),
    _Told(
        "tokens", "Tokens, and who counted them.", lambda one: one.tokens, ("direction", "source")
    ),
    _Told("finishes", "Why choices ended.", lambda one: one.finishes, ("reason",)),
    _Told(
        "diversions", "Exchanges that another target answered.", lambda one: {(): one.diversions}
    ),
)
_HISTOGRAMS = (
    _Told(
        "time_to_first_token_seconds",
        "Of streams, until something was said.",
        lambda one: one.first_token,
    ),
    _Told(
        "request_duration_seconds", "Of answers that came to their end.", lambda one: one.duration
    ),
    _Told(
        "time_per_output_token_seconds",
        "Of streams, after their first token.",
        lambda one: one.per_token,
    ),
    _Told("completion_tokens", "The length of answers.", lambda one: one.completion),
)


@runtime_checkable
class Crew(Protocol):
    """The workers of a backend."""

    @property
    def discovery_failures(self) -> int:
        """How often who names workers could not be asked."""

    def snapshot(self) -> Sequence[Any]:
        """How each worker is: its ``url``, ``state`` and ``in_flight``."""


class Metrics(Collector):
    """Counts records, in plain dictionaries: nothing is looked up or locked for an exchange."""

    def __init__(self, following: Observer, crews: Callable[[], Mapping[str, Crew]]) -> None:
        """``following`` is told of each record, too; ``crews`` gives each backend's workers."""
        self._following = following
        self._crews = crews
        self._arms: dict[Arm, _Figures] = {}
        self._fallbacks = Counter[tuple[str, ...]]()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def also(self, collector: Collector) -> None:
        """Tell on the page what this tells, too."""
        self._registry.register(collector)

    def observe(self, record: Record) -> None:
        """Count an exchange."""
        self._of(answered(record)).add(record)
        if record.diverted:
            self._of(left(record)).diversions += 1
        for told in record.fell_back:
            model, _, rest = told.rpartition("@")
            version, _, why = rest.partition(" ")
            _add(self._fallbacks, (f"{model}@{version}", why), 1)
        self._following(record)

    def page(self) -> bytes:
        """As Prometheus reads it."""
        written = "".join(line for told in _HISTOGRAMS for line in self._histogram(told))
        return generate_latest(self._registry) + written.encode()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield from (self._counter(told) for told in _COUNTERS)
        yield _family(
            "fallbacks",
            "Targets in whose stead another was asked.",
            ("target", "error"),
            self._fallbacks,
        )
        yield from self._workers()

    def _of(self, arm: Arm) -> _Figures:
        figures = self._arms.get(arm)
        if figures is None:
            if len(self._arms) >= _MOST_ARMS:
                arm = (_OTHER, _OTHER, _OTHER)
            figures = self._arms.setdefault(arm, Figures(Histogram))
        return figures

    def _counter(self, told: _Told) -> Metric:
        labels = (*_ARM, *told.labels)
        family = CounterMetricFamily(f"interlingua_{told.name}", told.help, labels=labels)
        for arm, figures in self._arms.items():
            for key, count in told.of(figures).items():
                if count:
                    family.add_metric((*arm, *key), count)
        return family

    def _histogram(self, told: _Told) -> Iterator[str]:
        """Its lines. They are by far the most of the page, and the library would take long."""
        name = f"interlingua_{told.name}"
        yield f"# HELP {name} {told.help}\n# TYPE {name} histogram\n"
        for arm, figures in self._arms.items():
            histogram: Histogram = told.of(figures)
            *counts, total = accumulate(histogram.counts)
            if not total:
                continue
            values = zip(_ARM, (value.translate(_ESCAPES) for value in arm), strict=True)
            labels = ",".join(f'{label}="{value}"' for label, value in values)
            for edge, count in zip(histogram.edges, counts, strict=True):
                yield f'{name}_bucket{{{labels},le="{edge}"}} {count}\n'
            yield f'{name}_bucket{{{labels},le="+Inf"}} {total}\n'
            yield f"{name}_sum{{{labels}}} {histogram.total}\n{name}_count{{{labels}}} {total}\n"

    def _workers(self) -> Iterator[Metric]:
        labels = ("backend", "worker")
        up = GaugeMetricFamily("interlingua_worker_up", "Whether it is asked.", labels=labels)
        busy = GaugeMetricFamily(
            "interlingua_worker_in_flight", "The requests that it has.", labels=labels
        )
        failed = CounterMetricFamily(
            "interlingua_discovery_failures", "Looks that found no workers.", labels=("backend",)
        )
        for name, crew in self._crews().items():
            failed.add_metric([name], crew.discovery_failures)
            for member in crew.snapshot():
                up.add_metric([name, member.url], float(member.state != "out"))
                busy.add_metric([name, member.url], member.in_flight)
        yield from (up, busy, failed)


def _add(counted: Counter[tuple[str, ...]], key: tuple[str, ...], count: int) -> None:
    if key not in counted and len(counted) >= _MOST:
        key = (_OTHER,) * len(key)
    counted[key] += count


def _family(
    name: str, told: str, labels: tuple[str, ...], counted: Counter[tuple[str, ...]]
) -> Metric:
    family = CounterMetricFamily(f"interlingua_{name}", told, labels=labels)
    for key, count in counted.items():
        family.add_metric(key, count)
    return family
