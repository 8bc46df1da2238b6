"""The process that serves: how late its loop is, what it has open, what it was not sent rightly."""

import asyncio
import os
import platform
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backends.histogram import Histogram
from gateway import __version__
from gateway.observability.metrics import definition
from gateway.observability.metrics.definition import MetricDefinition

_LAG_CHECK_INTERVAL: Final = 0.25
"""Seconds between two looks at how late the loop is."""
_LAG_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FD_DIRECTORY: Final = Path("/proc/self/fd")
_STATM_FILE: Final = Path("/proc/self/statm")

EVENT_LOOP_LAG: Final = MetricDefinition(
    "interlingua_event_loop_lag_seconds",
    "histogram",
    f"Delay of a timer in the event loop, measured {1 / _LAG_CHECK_INTERVAL:g} times a second.",
)
OPEN_CLIENT_CONNECTIONS: Final = MetricDefinition(
    "interlingua_open_client_connections", "gauge", "Open client connections.", ("listener",)
)
MALFORMED_REQUESTS: Final = MetricDefinition(
    "interlingua_malformed_requests",
    "counter",
    "Input at a listener that is not a valid HTTP request, by kind of error.",
    ("listener", "kind"),
)
OPEN_FDS: Final = MetricDefinition("interlingua_open_fds", "gauge", "Open file descriptors.")
MAX_FDS: Final = MetricDefinition(
    "interlingua_max_fds", "gauge", "Maximum number of open file descriptors."
)
MEMORY_BYTES: Final = MetricDefinition(
    "interlingua_memory_bytes", "gauge", "Resident memory in bytes."
)
CPU_SECONDS: Final = MetricDefinition(
    "interlingua_cpu_seconds", "counter", "CPU time of all threads."
)
BUILD_INFO: Final = MetricDefinition(
    "interlingua_build_info",
    "gauge",
    "Version of the gateway and of Python; always 1.",
    ("version", "python"),
    "largest",
)
PROCESS_METRICS: Final = (
    *(
        EVENT_LOOP_LAG,
        OPEN_CLIENT_CONNECTIONS,
        MALFORMED_REQUESTS,
        OPEN_FDS,
        MAX_FDS,
        MEMORY_BYTES,
        CPU_SECONDS,
        BUILD_INFO,
    ),
)

_MALFORMED_KINDS: Final[Mapping[int, str]] = {
    HTTPStatus.BAD_REQUEST: "invalid_http",
    HTTPStatus.REQUEST_TIMEOUT: "header_timeout",
    HTTPStatus.REQUEST_URI_TOO_LONG: "uri_too_long",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "headers_too_large",
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: "unsupported_version",
}


class ListenerStats(Protocol):
    """A listener."""

    @property
    def connections(self) -> int:
        """How many it has now."""

    @property
    def malformed_by_status(self) -> Mapping[int, int]:
        """How often what came could not be read as a request, by the status that said so."""


class ProcessCollector(Collector):
    """Looks after the loop from ``start`` to ``stop``; all else is asked at each look."""

    def __init__(self, fronts: Callable[[], Mapping[str, ListenerStats]]) -> None:
        """``fronts`` gives the listeners there are now, by their addresses."""
        self._get_listeners = fronts
        self._lag = Histogram(_LAG_BUCKETS)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look how late the loop is, from now on."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(
            _LAG_CHECK_INTERVAL, self._measure_lag, loop, loop.time() + _LAG_CHECK_INTERVAL
        )

    def stop(self) -> None:
        """Look no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        fronts = self._get_listeners()
        yield OPEN_CLIENT_CONNECTIONS.build_family(
            ((name,), one.connections) for name, one in fronts.items()
        )
        yield MALFORMED_REQUESTS.build_family(
            ((name, _MALFORMED_KINDS.get(status, str(status))), count)
            for name, one in fronts.items()
            for status, count in one.malformed_by_status.items()
        )
        usage = resource.getrusage(resource.RUSAGE_SELF)
        yield CPU_SECONDS.build_family([((), usage.ru_utime + usage.ru_stime)])
        yield MAX_FDS.build_family([((), resource.getrlimit(resource.RLIMIT_NOFILE)[0])])
        with suppress(OSError):  # where there is no /proc
            pages = int(_STATM_FILE.read_text("ascii").split()[1])
            yield MEMORY_BYTES.build_family([((), pages * os.sysconf("SC_PAGE_SIZE"))])
            yield OPEN_FDS.build_family([((), len([*_FD_DIRECTORY.iterdir()]))])
        yield BUILD_INFO.build_family([((__version__, platform.python_version()), 1)])

    def format_histograms(self) -> Iterator[str]:
        """See ``gateway.observability.metrics.requests.TextCollector``."""
        return EVENT_LOOP_LAG.format_histogram_lines([((), self._lag)])

    def _measure_lag(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        self._lag.add(now - due)
        self._timer = loop.call_later(
            _LAG_CHECK_INTERVAL, self._measure_lag, loop, now + _LAG_CHECK_INTERVAL
        )


# What the supervisor tells of its processes, for Prometheus.

SERVING_PROCESSES: Final = MetricDefinition(
    "interlingua_processes", "gauge", "Running serving processes.", merge_mode="supervisor"
)
PROCESS_RESTARTS: Final = MetricDefinition(
    "interlingua_process_restarts",
    "counter",
    "Restarts of serving processes that ended unexpectedly.",
    merge_mode="supervisor",
)
SUPERVISOR_METRICS: Final = (SERVING_PROCESSES, PROCESS_RESTARTS)


# What came of reloads, counted for Prometheus.

CONFIG_RELOADS: Final = definition.MetricDefinition(
    "interlingua_config_reloads",
    "counter",
    "Configuration reloads, by result.",
    ("result",),
    "supervisor",
)
LAST_RELOAD_SUCCESSFUL: Final = definition.MetricDefinition(
    "interlingua_config_last_reload_successful",
    "gauge",
    "1 if the last reload succeeded.",
    merge_mode="supervisor",
)
LAST_RELOAD_TIMESTAMP: Final = definition.MetricDefinition(
    "interlingua_config_last_reload_success_timestamp_seconds",
    "gauge",
    "Unix time of the last successful reload.",
    merge_mode="supervisor",
)
CONFIG_INFO: Final = definition.MetricDefinition(
    "interlingua_config_info",
    "gauge",
    "Hash of the current configuration; always 1.",
    ("hash",),
    "supervisor",
)
RELOAD_METRICS: Final = (CONFIG_RELOADS, LAST_RELOAD_SUCCESSFUL, LAST_RELOAD_TIMESTAMP, CONFIG_INFO)


class ReloadOutcome(Protocol):
    """The result of a reload."""

    @property
    def hash(self) -> str:
        """The hash of the configuration in effect after it."""

    @property
    def is_ok(self) -> bool:
        """Whether the new configuration is in effect."""


class ReloadCollector(Collector):
    """Counts reloads. The start of the gateway counts as a success, but not in the total."""

    def __init__(self, config_hash: str, now: Callable[[], float]) -> None:
        """``config_hash`` is that of the first configuration; ``now`` gives Unix seconds."""
        self._now = now
        self._config_hash = config_hash
        self._last_ok = True
        self._succeeded_at = now()
        self._results = Counter({"success": 0, "failure": 0})

    def record_reload(self, outcome: ReloadOutcome) -> None:
        """Count a reload that has ended."""
        self._config_hash, self._last_ok = outcome.hash, outcome.is_ok
        self._results["success" if outcome.is_ok else "failure"] += 1
        if outcome.is_ok:
            self._succeeded_at = self._now()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield CONFIG_RELOADS.build_family(
            ((result,), count) for result, count in self._results.items()
        )
        yield LAST_RELOAD_SUCCESSFUL.build_family([((), float(self._last_ok))])
        yield LAST_RELOAD_TIMESTAMP.build_family([((), self._succeeded_at)])
        yield CONFIG_INFO.build_family([((self._config_hash,), 1)])


# What the engines of local models hold and do, for Prometheus.
#
# All but the restarts are the engine's own figures, a second old at most, and begin anew with it.

_ENGINE_GAUGES = {
    "running": "Sequences and prompts being processed.",
    "waiting": "Prompts, and samples of prompts, waiting for a slot.",
    "batch_size": "Sequences and prompts in the last step.",
    "kv_cache_usage": "Used fraction of the KV cache, 0 to 1.",
    "kv_cache_blocks": "Blocks in the KV cache.",
}
_ENGINE_COUNTERS = {
    "prompt_tokens": "Prompt tokens processed by the model.",
    "completion_tokens": "Generated tokens.",
    "prefix_cache_hit_tokens": "Prompt tokens found in the prefix cache.",
    "preemptions": "Sequences and prompts that released their KV cache and are recomputed.",
    "steps": "Forward passes of the model.",
    "step_seconds": "Time in forward passes.",
    "queue_seconds": "Queue time of finished requests, in total.",
    "prefill_seconds": "Prefill time of finished requests, in total.",
    "decode_seconds": "Decode time of finished requests, in total.",
    "restarts": "Restarts of an engine that died or hung.",
}
_ENGINE_DEFINITIONS: Final = {
    name: MetricDefinition(
        f"interlingua_engine_{name}",
        "gauge" if name in _ENGINE_GAUGES else "counter",
        help_,
        ("backend",),
    )
    for name, help_ in (_ENGINE_GAUGES | _ENGINE_COUNTERS).items()
}
ENGINE_METRICS: Final = (*_ENGINE_DEFINITIONS.values(),)


@runtime_checkable
class SupportsEngineStats(Protocol):
    """A backend whose engine tells of itself."""

    def read_stats(self) -> Mapping[str, float]:
        """Its figures, by the names above without ``interlingua_engine_`` and ``_total``."""


class EngineCollector(Collector):
    """Asked whenever the page is read; nothing is kept."""

    def __init__(self, engines: Callable[[], Mapping[str, SupportsEngineStats]]) -> None:
        """``engines`` gives those there are now, by their backends' names."""
        self._get_engines = engines

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        told = {backend: engine.read_stats() for backend, engine in self._get_engines().items()}
        if not told:
            return
        for name, family in _ENGINE_DEFINITIONS.items():
            yield family.build_family(((backend,), its[name]) for backend, its in told.items())


# What came of shadows, counted for Prometheus by the target that they were sent to.

_SHADOW_LABELS: Final = ("model", "version")
_SHADOW_COUNTERS: Final = {
    name: MetricDefinition(f"interlingua_shadow_{name}", "counter", help_, labels)
    for name, help_, labels in (
        ("requests", "Shadow requests, by outcome.", (*_SHADOW_LABELS, "outcome")),
        ("errors", "Failed shadow requests, by error class.", (*_SHADOW_LABELS, "error")),
        ("compared", "Shadow responses compared with the primary response.", _SHADOW_LABELS),
        ("equal", "Shadow responses equal to the primary response.", _SHADOW_LABELS),
    )
}
SHADOW_METRICS: Final = (*_SHADOW_COUNTERS.values(),)
_OVERFLOW_LABEL: Final = "_other"
"""Stands for whatever comes when a table is full: a model ``*`` takes any name."""
_MAX_LABEL_SETS: Final = 1000
"""The entries of each table."""


class ShadowResult(Protocol):
    """How one shadow request ended."""

    @property
    def model(self) -> str:
        """The model that it was sent to."""

    @property
    def version(self) -> str:
        """The version of that model."""

    @property
    def outcome(self) -> str:
        """How it ended."""

    @property
    def error(self) -> str:
        """The class of the error, or ""."""


class ComparedRequest(Protocol):
    """A client's request and its shadow, both ended."""

    @property
    def shadow(self) -> ShadowResult:
        """The shadow's result."""

    @property
    def equal(self) -> bool | None:
        """Whether both responses are equal; None if they were not compared."""


class ShadowCollector(Collector):
    """Counts shadow requests and comparisons."""

    def __init__(self) -> None:
        self._counts = {name: Counter[tuple[str, ...]]() for name in _SHADOW_COUNTERS}

    def record_shadow(self, shadowed: ComparedRequest) -> None:
        """One has ended, and so has its original."""
        shadow = shadowed.shadow
        arm = shadow.model, shadow.version
        self._increment("requests", (*arm, shadow.outcome))
        if shadow.error:
            self._increment("errors", (*arm, shadow.error))
        if shadowed.equal is not None:
            self._increment("compared", arm)
        if shadowed.equal:
            self._increment("equal", arm)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for name, told in _SHADOW_COUNTERS.items():
            yield told.build_family(self._counts[name].items())

    def _increment(self, name: str, key: tuple[str, ...]) -> None:
        counted = self._counts[name]
        if key not in counted and len(counted) >= _MAX_LABEL_SETS:
            key = (_OVERFLOW_LABEL,) * len(key)
        counted[key] += 1


# What came of the keys' limits, counted for Prometheus.
#
# Of a budget, each process tells its own part.

RATELIMIT_DECISIONS: Final = MetricDefinition(
    "interlingua_ratelimit_decisions",
    "counter",
    "Requests checked against a limit, by scope and decision.",
    ("scope", "decision"),
)
BUDGET_TOKENS: Final = MetricDefinition(
    "interlingua_budget_tokens", "gauge", "Daily token budget of a key.", ("key", "model")
)
BUDGET_SPENT_TOKENS: Final = MetricDefinition(
    "interlingua_budget_spent_tokens",
    "gauge",
    "Tokens used of the daily budget, including reservations of running requests.",
    ("key", "model"),
)
RATE_LIMIT_METRICS: Final = (RATELIMIT_DECISIONS, BUDGET_TOKENS, BUDGET_SPENT_TOKENS)


class BudgetStats(Protocol):
    """The daily token budget of a key."""

    @property
    def amount(self) -> int:
        """Tokens per day."""

    @property
    def spent_today(self) -> int:
        """Tokens used or reserved today."""


class ScopeCounts(Protocol):
    """Numbers of requests by the scope of a limit."""

    def items(self) -> Iterable[tuple[str, int]]:
        """Each scope with its number."""


class DecisionStats(Protocol):
    """Counts of the requests that were checked against limits."""

    @property
    def rejections(self) -> ScopeCounts:
        """Rejected requests."""

    def count_admitted(self) -> ScopeCounts:
        """Admitted requests."""


class RateLimitStats(Protocol):
    """The rate limiter of a configuration."""

    @property
    def registry(self) -> DecisionStats:
        """The decisions."""

    @property
    def daily_budgets(self) -> Mapping[tuple[str, str], BudgetStats]:
        """The daily budgets by key and model."""


class RateLimitCollector(Collector):
    """Reads them. ``limiter`` gives the limiter of the current configuration, if it has one."""

    def __init__(self, limiter: Callable[[], RateLimitStats | None]) -> None:
        self._get_limiter = limiter

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        limiter = self._get_limiter()
        admitted: ScopeCounts = {} if limiter is None else limiter.registry.count_admitted()
        refused: ScopeCounts = {} if limiter is None else limiter.registry.rejections
        days = {} if limiter is None else limiter.daily_budgets
        yield RATELIMIT_DECISIONS.build_family(
            ((scope, decision), count)
            for decision, counts in (("admitted", admitted), ("refused", refused))
            for scope, count in counts.items()
        )
        yield BUDGET_TOKENS.build_family((named, day.amount) for named, day in days.items())
        yield BUDGET_SPENT_TOKENS.build_family(
            (named, day.spent_today) for named, day in days.items()
        )


# How it goes with the store of shared limits, counted for Prometheus.

RATELIMIT_STORE_ERRORS: Final = MetricDefinition(
    "interlingua_ratelimit_store_errors",
    "counter",
    "Failed calls to the Redis server of shared limits.",
)
RATELIMIT_STORE_UP: Final = MetricDefinition(
    "interlingua_ratelimit_store_up",
    "gauge",
    "1 if limits are shared, 0 while the failure policy applies.",
    merge_mode="smallest",
)
RATE_LIMIT_STORE_METRICS: Final = (RATELIMIT_STORE_ERRORS, RATELIMIT_STORE_UP)


class StoreStats(Protocol):
    """What is known of the store."""

    errors: int
    up: bool


class RateLimitStoreCollector(Collector):
    """Tells it."""

    def __init__(self, store: StoreStats) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield RATELIMIT_STORE_ERRORS.build_family([((), self._store.errors)])
        yield RATELIMIT_STORE_UP.build_family([((), float(self._store.up))])


# What was to be kept of exchanges and is lost, counted for Prometheus.

_DROPPED_COUNTERS: Final = {
    name: MetricDefinition(f"interlingua_{name}_dropped", "counter", help_)
    for name, help_ in (
        ("log_lines", "Log lines dropped because the reader was too slow."),
        ("usage_rows", "Usage rows dropped because they could not be written."),
        ("traces", "Traces dropped because no collector took them in time."),
    )
}
DROPPED_RECORD_METRICS: Final = (*_DROPPED_COUNTERS.values(),)


class DroppedRecordCollector(Collector):
    """Counts it."""

    def __init__(self, counts: Mapping[str, Callable[[], int]]) -> None:
        """What gives each count, by its name: ``log_lines``, ``usage_rows``, ``traces``."""
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for name, count in self._counts.items():
            yield _DROPPED_COUNTERS[name].build_family([((), count())])
