"""What exchanges come to.

``split`` is the one that sent an exchange to its version, and "" for what was pinned, sent by a
rule, or answered in another's stead.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, runtime_checkable

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.core.histogram import Histogram
from gateway.figures import Arm, Figures, alike, answered, left
from gateway.metrics.workers import Crew, Workers
from gateway.telemetry import Observer, Record
from gateway.told import Told

_OTHER: Final = "_other"
"""Stands for whatever comes when a table is full: a model ``*`` takes any name."""
_MOST: Final = 10_000
"""The entries of the table of fallbacks."""
_MOST_ARMS: Final = 500
_TOGETHER: Final = 64
"""So many exchanges are counted at once: each takes half the time, and no answer waits for long."""
_ARM: Final = ("model", "version", "split")
_Figures = Figures[Histogram]


class _Of(Struct, frozen=True):
    """A metric: of each arm's figures, what ``of`` gives."""

    definition: Told
    read_value: Callable[[_Figures], Any]


def _counter(name: str, help_: str, of: Callable[[_Figures], Any], *labels: str) -> _Of:
    """``labels`` are those beside the arm's."""
    return _Of(Told(f"interlingua_{name}", "counter", help_, (*_ARM, *labels)), of)


def _histogram(name: str, help_: str, of: Callable[[_Figures], Histogram]) -> _Of:
    return _Of(Told(f"interlingua_{name}", "histogram", help_, _ARM), of)


_COUNTERS: Final = (
    _counter(
        "requests",
        "Exchanges, by how they ended.",
        lambda one: one.outcomes,
        *("dialect", "backend", "outcome"),
    ),
    _counter(
        "errors",
        "Exchanges that failed, by the class of the error.",
        lambda one: one.errors,
        "error",
    ),
    _counter(
        "losses",
        "What targets could not honour, by the internal field.",
        lambda one: one.unsupported_parameters,
        *("field", "reason"),
    ),
    _counter(
        "lossy_requests",
        "Exchanges of which something was lost.",
        lambda one: {(): one.lossy_requests},
    ),
    _counter(
        "tokens",
        "Tokens, and who counted them: cached ones are part of the input, reasoning of the output.",
        lambda one: one.tokens,
        *("direction", "source"),
    ),
    _counter(
        "wasted_tokens",
        "Tokens passed on of streams that did not come to their end.",
        lambda one: {(): one.wasted_tokens},
    ),
    _counter("finishes", "Why choices ended.", lambda one: one.finishes, "reason"),
    _counter(
        "stream_aborts",
        "Streams that did not come to their end: client, worker or gateway, and the error's class.",
        lambda one: one.aborts,
        *("side", "reason"),
    ),
    _counter(
        "diversions", "Exchanges that another target answered.", lambda one: {(): one.diversions}
    ),
)
_HISTOGRAMS: Final = (
    _histogram(
        "time_to_first_token_seconds",
        "Of streams, until something was said.",
        lambda one: one.first_token,
    ),
    _histogram(
        "request_duration_seconds",
        "Of answers that came to their end.",
        lambda one: one.duration,
    ),
    _histogram(
        "time_per_output_token_seconds",
        "Of streams, after their first token: one mean for each.",
        lambda one: one.per_token,
    ),
    _histogram(
        "overhead_seconds",
        "The gateway's own time on a request, until a worker, or a place at one, was asked for.",
        lambda one: one.overhead,
    ),
    _histogram(
        "prompt_tokens", "The length of prompts that were answered.", lambda one: one.prompt_tokens
    ),
    _histogram("completion_tokens", "The length of answers.", lambda one: one.completion_tokens),
)
_FALLBACKS: Final = Told(
    "interlingua_fallbacks",
    "counter",
    "Targets in whose stead another was asked.",
    ("target", "error"),
)
TOLD: Final = (*(one.definition for one in (*_COUNTERS, *_HISTOGRAMS)), _FALLBACKS)


@runtime_checkable
class Lines(Protocol):
    """What a collector may also be: one that writes its histograms by itself."""

    def format_histograms(self) -> Iterator[str]:
        """In Prometheus's text format."""


class Metrics(Collector):
    """Counts records, in plain dictionaries: nothing is looked up or locked for an exchange."""

    def __init__(self, following: Observer, crews: Callable[[], Mapping[str, Crew]]) -> None:
        """``following`` is told of each record, too; ``crews`` gives each backend's workers."""
        self._next_observer = following
        self._pending: list[Record] = []
        """What is not counted yet."""
        self._stats: dict[Arm, _Figures] = {}
        self._fallbacks = Counter[tuple[str, ...]]()
        self._registry = CollectorRegistry(auto_describe=False)
        self._text_collectors: list[Lines] = []
        self.register(self)
        self.register(Workers(crews))

    def register(self, collector: Collector) -> None:
        """Tell on the page what this tells, too."""
        self._registry.register(collector)
        if isinstance(collector, Lines):
            self._text_collectors.append(collector)

    def record_request(self, record: Record) -> None:
        """Count an exchange: together with others, or as soon as somebody asks."""
        self._pending.append(record)
        if len(self._pending) >= _TOGETHER:
            self._count_pending()
        self._next_observer(record)

    def collect_stats(self) -> Mapping[Arm, _Figures]:
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
        for one in _COUNTERS:
            yield one.definition.build_family(
                ((*arm, *key), count)
                for arm, figures in arms.items()
                for key, count in one.read_value(figures).items()
                if count
            )
        yield _FALLBACKS.build_family(self._fallbacks.items())

    def format_histograms(self) -> Iterator[str]:
        """See Lines."""
        arms = self.collect_stats()
        for one in _HISTOGRAMS:
            yield from one.definition.format_histogram_lines(
                (arm, one.read_value(its)) for arm, its in arms.items()
            )

    def _count_pending(self) -> None:
        """Count what waits."""
        waiting, self._pending = self._pending, []
        for records in alike(waiting):
            any_ = records[0]
            self._get_stats(answered(any_)).add_records(*records)
            if any_.diverted:
                self._get_stats(left(any_)).diversions += len(records)
        for record in waiting:
            for told in record.fell_back:
                model, _, rest = told.rpartition("@")
                version, _, why = rest.partition(" ")
                self._count_fallback(f"{model}@{version}", why)

    def _get_stats(self, arm: Arm) -> _Figures:
        figures = self._stats.get(arm)
        if figures is None:
            if len(self._stats) >= _MOST_ARMS:
                arm = (_OTHER, _OTHER, _OTHER)
            figures = self._stats.setdefault(arm, Figures(Histogram))
        return figures

    def _count_fallback(self, *key: str) -> None:
        if key not in self._fallbacks and len(self._fallbacks) >= _MOST:
            key = (_OTHER,) * len(key)
        self._fallbacks[key] += 1
