"""What all exchanges come to, counted for Prometheus. Labels are configured names only.

interlingua_requests_total{dialect,model,version,backend,outcome}
interlingua_losses_total{model,version,field,reason}
interlingua_tokens_total{model,version,direction,source}
interlingua_fallbacks_total{target,error}
interlingua_worker_up{backend,worker}
interlingua_worker_in_flight{backend,worker}
interlingua_discovery_failures_total{backend}
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.telemetry import Observer, Record

UNKNOWN = "_unknown"
"""Stands for a field that only the client knows: its names are without end."""
_OTHER = "_other"
"""Stands for whatever comes when a table is full: a model ``*`` takes any name."""
_MOST = 10_000
"""The entries of each table."""


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
        self._requests = Counter[tuple[str, ...]]()
        self._losses = Counter[tuple[str, ...]]()
        self._tokens = Counter[tuple[str, ...]]()
        self._fallbacks = Counter[tuple[str, ...]]()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def observe(self, record: Record) -> None:
        """Count an exchange."""
        arm = record.model, record.version
        requests = (record.dialect, *arm, record.backend, record.outcome)
        _add(self._requests, requests, 1)
        for loss in record.losses:
            _add(self._losses, (*arm, loss.path or UNKNOWN, loss.reason), 1)
        if (usage := record.usage) is not None:
            _add(self._tokens, (*arm, "input", usage.source), usage.prompt_tokens)
            _add(self._tokens, (*arm, "output", usage.source), usage.completion_tokens)
        for told in record.fell_back:
            target, _, error = told.rpartition(" ")
            _add(self._fallbacks, (target, error), 1)
        self._following(record)

    def page(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        arm = ("model", "version")
        yield _family(
            "requests",
            "Exchanges, by how they ended.",
            ("dialect", *arm, "backend", "outcome"),
            self._requests,
        )
        yield _family(
            "losses",
            "What targets could not honour, by the internal field.",
            (*arm, "field", "reason"),
            self._losses,
        )
        yield _family(
            "tokens",
            "Tokens, and who counted them.",
            (*arm, "direction", "source"),
            self._tokens,
        )
        yield _family(
            "fallbacks",
            "Targets in whose stead another was asked.",
            ("target", "error"),
            self._fallbacks,
        )
        yield from self._workers()

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
