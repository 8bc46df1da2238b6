"""Metrics of the process itself, its connections, and the supervisor of several processes."""

import asyncio
import os
import platform
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Final, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backends.histogram import Histogram
from gateway import __version__
from gateway.observability.metrics.definition import MetricDefinition

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
