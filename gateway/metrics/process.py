"""The process that serves: how late its loop is, what it has open, what it was not sent rightly."""

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
from gateway.told import MetricDefinition

_LAG_CHECK_INTERVAL: Final = 0.25
"""Seconds between two looks at how late the loop is."""
_LAG_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FD_DIRECTORY: Final = Path("/proc/self/fd")
_STATM_FILE: Final = Path("/proc/self/statm")

EVENT_LOOP_LAG: Final = MetricDefinition(
    "interlingua_event_loop_lag_seconds",
    "histogram",
    f"How much later than it was to the event loop came to a timer, {1 / _LAG_CHECK_INTERVAL:g} times a second.",
)
OPEN_CLIENT_CONNECTIONS: Final = MetricDefinition(
    "interlingua_open_client_connections", "gauge", "Connections of clients.", ("listener",)
)
MALFORMED_REQUESTS: Final = MetricDefinition(
    "interlingua_malformed_requests",
    "counter",
    "What came to a listener and was no request that can be served, by what was wrong with it.",
    ("listener", "kind"),
)
OPEN_FDS: Final = MetricDefinition(
    "interlingua_open_fds", "gauge", "File descriptors that are open."
)
MAX_FDS: Final = MetricDefinition(
    "interlingua_max_fds", "gauge", "File descriptors that may be open."
)
MEMORY_BYTES: Final = MetricDefinition("interlingua_memory_bytes", "gauge", "Resident memory.")
CPU_SECONDS: Final = MetricDefinition(
    "interlingua_cpu_seconds", "counter", "Processor time, of all threads."
)
BUILD_INFO: Final = MetricDefinition(
    "interlingua_build_info", "gauge", "What runs: always 1.", ("version", "python"), "largest"
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
    HTTPStatus.BAD_REQUEST: "not_http",
    HTTPStatus.REQUEST_TIMEOUT: "slow_head",
    HTTPStatus.REQUEST_URI_TOO_LONG: "long_target",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "large_head",
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: "other_version",
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
        """See ``gateway.metrics.exchanges.TextCollector``."""
        return EVENT_LOOP_LAG.format_histogram_lines([((), self._lag)])

    def _measure_lag(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        self._lag.add(now - due)
        self._timer = loop.call_later(
            _LAG_CHECK_INTERVAL, self._measure_lag, loop, now + _LAG_CHECK_INTERVAL
        )
