"""Metrics of the process, reloads, engines, shadow traffic, rate limits and dropped records."""

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
from gateway.observability.metrics.definition import MetricDefinition, increment_bounded

_LAG_CHECK_INTERVAL: Final = 0.25
"""Seconds between two measurements of the event loop's lag."""
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
REFUSED_CONNECTIONS: Final = MetricDefinition(
    "interlingua_refused_connections",
    "counter",
    "Client connections closed at a limit, by reason.",
    ("listener", "reason"),
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
        REFUSED_CONNECTIONS,
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
    """What a listener counts."""

    @property
    def connections(self) -> int:
        """Open client connections."""

    @property
    def malformed_by_status(self) -> Mapping[int, int]:
        """Inputs that are not valid requests, by the status of the response."""

    @property
    def refused_by_reason(self) -> Mapping[str, int]:
        """Connections that were closed at a limit."""


class ProcessCollector(Collector):
    """Measures the event loop from ``start`` to ``stop``; reads the rest on rendering."""

    def __init__(self, get_listeners: Callable[[], Mapping[str, ListenerStats]]) -> None:
        """``get_listeners`` gives the current listeners by address."""
        self._get_listeners = get_listeners
        self._lag = Histogram(_LAG_BUCKETS)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start measuring the lag of the event loop."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(
            _LAG_CHECK_INTERVAL, self._measure_lag, loop, loop.time() + _LAG_CHECK_INTERVAL
        )

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        listeners = self._get_listeners()
        yield OPEN_CLIENT_CONNECTIONS.build_family(
            ((name,), one.connections) for name, one in listeners.items()
        )
        yield MALFORMED_REQUESTS.build_family(
            ((name, _MALFORMED_KINDS.get(status, str(status))), count)
            for name, one in listeners.items()
            for status, count in one.malformed_by_status.items()
        )
        yield REFUSED_CONNECTIONS.build_family(
            ((name, reason), count)
            for name, one in listeners.items()
            for reason, count in one.refused_by_reason.items()
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

    def _measure_lag(self, loop: asyncio.AbstractEventLoop, due_at: float) -> None:
        now = loop.time()
        self._lag.add(now - due_at)
        self._timer = loop.call_later(
            _LAG_CHECK_INTERVAL, self._measure_lag, loop, now + _LAG_CHECK_INTERVAL
        )


# Serving processes, reported by the supervisor.

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


# Configuration reloads.

CONFIG_RELOADS: Final = MetricDefinition(
    "interlingua_config_reloads",
    "counter",
    "Configuration reloads, by result.",
    ("result",),
    "supervisor",
)
LAST_RELOAD_SUCCESSFUL: Final = MetricDefinition(
    "interlingua_config_last_reload_successful",
    "gauge",
    "1 if the last reload succeeded.",
    merge_mode="supervisor",
)
LAST_RELOAD_TIMESTAMP: Final = MetricDefinition(
    "interlingua_config_last_reload_success_timestamp_seconds",
    "gauge",
    "Unix time of the last successful reload.",
    merge_mode="supervisor",
)
CONFIG_INFO: Final = MetricDefinition(
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


# Engines of local models. All numbers but the restarts come from the engine process, are at most
# one second old, and start at 0 when the engine restarts.

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
    "draft_tokens": "Tokens proposed by prompt lookup.",
    "accepted_draft_tokens": "Proposed tokens that the model generated.",
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
    """A backend whose engine reports statistics."""

    def read_stats(self) -> Mapping[str, float]:
        """Its statistics, by metric name without ``interlingua_engine_`` and ``_total``."""


class EngineCollector(Collector):
    """Reads the engines whenever the page is rendered."""

    def __init__(self, get_engines: Callable[[], Mapping[str, SupportsEngineStats]]) -> None:
        """``get_engines`` gives the current engines by backend name."""
        self._get_engines = get_engines

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        stats = {backend: engine.read_stats() for backend, engine in self._get_engines().items()}
        if not stats:
            return
        for name, definition_ in _ENGINE_DEFINITIONS.items():
            yield definition_.build_family(
                ((backend,), values[name]) for backend, values in stats.items()
            )


# Shadow traffic, by the target of the copy.

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
_MAX_LABEL_SETS: Final = 1000
"""Maximum entries per table."""


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

    def record_shadow(self, pair: ComparedRequest) -> None:
        """Count a shadow request that has ended, as has its primary request."""
        shadow = pair.shadow
        target = shadow.model, shadow.version
        self._increment("requests", (*target, shadow.outcome))
        if shadow.error:
            self._increment("errors", (*target, shadow.error))
        if pair.equal is not None:
            self._increment("compared", target)
        if pair.equal:
            self._increment("equal", target)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for name, counter in _SHADOW_COUNTERS.items():
            yield counter.build_family(self._counts[name].items())

    def _increment(self, name: str, key: tuple[str, ...]) -> None:
        increment_bounded(self._counts[name], key, _MAX_LABEL_SETS)


# Rate limits. Each process reports its part of a budget.

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
    """Reads the rate limiter of the current configuration, which may have none."""

    def __init__(self, get_limiter: Callable[[], RateLimitStats | None]) -> None:
        self._get_limiter = get_limiter

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


# The store of shared rate limits.

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
    """The state of the store."""

    errors: int
    up: bool


class RateLimitStoreCollector(Collector):
    """Reports the state of the store."""

    def __init__(self, store: StoreStats) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield RATELIMIT_STORE_ERRORS.build_family([((), self._store.errors)])
        yield RATELIMIT_STORE_UP.build_family([((), float(self._store.up))])


# Log lines, usage rows and traces that were dropped.

FEEDBACK: Final = MetricDefinition(
    "interlingua_feedback",
    "counter",
    "Requests with feedback, by result: accepted, or the class of the error; and answers that a "
    "model judges: judged, judge_skipped, judge_failed or judge_unreadable.",
    ("result",),
)
FEEDBACK_METRICS: Final = (FEEDBACK,)


class FeedbackCollector(Collector):
    """Counts feedback."""

    def __init__(self, results: Mapping[str, int]) -> None:
        """``results`` gives the count of each result, which are few."""
        self._results = results

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield FEEDBACK.build_family(((name,), count) for name, count in self._results.items())


_DROPPED_COUNTERS: Final = {
    name: MetricDefinition(f"interlingua_{name}_dropped", "counter", help_)
    for name, help_ in (
        ("log_lines", "Log lines dropped because the reader was too slow."),
        ("usage_rows", "Usage rows dropped because they could not be written."),
        ("traces", "Traces dropped because no collector took them in time."),
        (
            "recorded_requests",
            "Requests that were to be recorded and were not: the disk was full or too slow.",
        ),
    )
}
DROPPED_RECORD_METRICS: Final = (*_DROPPED_COUNTERS.values(),)
RECORDED_REQUESTS: Final = MetricDefinition(
    "interlingua_recorded_requests", "counter", "Requests that were written to recordings."
)


class DroppedRecordCollector(Collector):
    """Reports dropped records."""

    def __init__(self, counts: Mapping[str, Callable[[], int]]) -> None:
        """``counts`` gives each count by name: such as ``log_lines``."""
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for name, count in self._counts.items():
            yield _DROPPED_COUNTERS[name].build_family([((), count())])


class RecordingCollector(Collector):
    """Reports recorded requests."""

    def __init__(self, count_written: Callable[[], int]) -> None:
        self._count_written = count_written

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield RECORDED_REQUESTS.build_family([((), self._count_written())])
