"""The status of the gateway: models, versions, workers, statistics and running requests."""

import asyncio
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from backends.histogram import Histogram
from backends.interfaces import Backend
from gateway import __version__
from gateway.admin.config_view import describe_config
from gateway.admin.history import (
    SAMPLE_INTERVAL,
    HistoryRecorder,
    StatsHistory,
)
from gateway.admin.services import WorkerSet
from gateway.admin.version_stats import RecentStats, VersionStats, merge_version_stats
from gateway.config import listeners as config_listeners
from gateway.config import schema
from gateway.http_server.connection import HandleRequest
from gateway.memory import MemoryBudget, MemoryStatus, merge_memory
from gateway.observability.record import RequestRecord
from gateway.observability.stats import RequestStats, StatsKey
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.http import CancellableRequest
from gateway.routing.failed_models import list_failures
from gateway.routing.router import Router
from protocols.core.catalog import ModelState
from protocols.core.interfaces import Clock


class ListenerProtocolStatus(Struct, frozen=True):
    """A protocol on a listener."""

    name: str
    profile: str = ""
    prefix: str = ""


class ListenerStatus(Struct, frozen=True):
    """A listener."""

    url: str
    protocols: Sequence[ListenerProtocolStatus]


class VersionStatus(Struct, frozen=True, omit_defaults=True):
    """A version of a model; ``share`` is its percentage of the traffic split."""

    name: str
    backend: str
    backend_model: str
    share: int
    ready: bool
    state: ModelState | None = None
    """Of a model that the gateway runs itself."""
    description: Mapping[str, str] = {}
    """What is known of such a model, for a person: texts by subject."""


class ModelStatus(Struct, frozen=True):
    """A public model."""

    name: str
    task: str
    aliases: Sequence[str]
    versions: Sequence[VersionStatus]


class GatewayStatus(Struct, frozen=True, kw_only=True):
    """The status of the gateway. ``workers`` are the reports of each pool's workers."""

    version: str
    python: str
    config_hash: str
    uptime: float
    """Seconds; over several processes, the longest."""
    processes: int = 1
    draining: bool
    running: int
    """Running requests."""
    recent_seconds: float
    listeners: Sequence[ListenerStatus]
    models: Sequence[ModelStatus]
    stats: Sequence[VersionStats]
    backends: Mapping[str, bool]
    """Whether each backend is ready."""
    failures: Mapping[str, str]
    """Why a backend will never be ready, by the backends that failed for good."""
    workers: Mapping[str, Any]
    memory: MemoryStatus
    """What is held for clients; over several processes, together."""


def merge_statuses(statuses: Sequence[GatewayStatus], workers: Mapping[str, Any]) -> GatewayStatus:
    """Merge the statuses of one or more processes. ``workers`` are the merged reports."""
    first = statuses[0]
    return replace(
        first,
        uptime=max(one.uptime for one in statuses),
        processes=len(statuses),
        draining=all(one.draining for one in statuses),
        running=sum(one.running for one in statuses),
        recent_seconds=max(one.recent_seconds for one in statuses),
        stats=merge_version_stats([stats for one in statuses for stats in one.stats]),
        backends={
            name: any(one.backends.get(name, False) for one in statuses) for name in first.backends
        },
        failures={name: text for one in statuses for name, text in one.failures.items()},
        workers=workers,
        memory=merge_memory([one.memory for one in statuses]),
    )


class HandlerView(Protocol):
    """A request handler."""

    @property
    def dispatcher(self) -> Dispatcher:
        """Its dispatcher, which has the running requests."""


class SnapshotView(Protocol):
    """A configuration snapshot."""

    @property
    def config(self) -> schema.Config: ...
    @property
    def config_hash(self) -> str: ...
    @property
    def backends(self) -> Mapping[str, Backend]: ...
    @property
    def router(self) -> Router: ...
    @property
    def handlers(self) -> Mapping[config_listeners.ListenerId, HandlerView]: ...
    def get_handler(self, listener_id: config_listeners.ListenerId) -> HandleRequest:
        """The handler of a listener's requests."""


@runtime_checkable
class HasQueue(Protocol):
    """A backend with a queue."""

    @property
    def queued_request_ids(self) -> Sequence[str]:
        """The ids of the queued requests."""


class GatewayView(Protocol):
    """The running gateway."""

    @property
    def active_snapshots(self) -> Sequence[SnapshotView]:
        """Snapshots that may have running requests; the last one is current."""

    @property
    def listener_urls(self) -> Mapping[config_listeners.ListenerId, str]:
        """The URL of each bound listener."""

    @property
    def config_data(self) -> bytes:
        """The text that the current configuration was loaded from."""

    @property
    def memory(self) -> MemoryBudget:
        """What clients make this process hold."""

    def set_draining(self, *, on: bool) -> None:
        """See ``gateway.admin.services.StatusService``."""


class RequestStatsSource(Protocol):
    """The statistics of finished requests."""

    def collect_stats(self) -> Mapping[StatsKey, RequestStats[Histogram]]:
        """The cumulative statistics."""

    def list_finished(self) -> Sequence[RequestRecord]:
        """The last finished requests, the latest first."""


class RunningRequest(Struct, frozen=True):
    """A running request. ``age`` is in seconds, ``tokens`` are those sent so far.

    ``phase``: ``queued`` for a worker, ``waiting`` for the response, or ``streaming``.
    """

    id: str
    age: float
    phase: str
    protocol: str
    model: str
    version: str
    backend: str
    key: str
    stream: bool
    tokens: int


class StatusReporter:
    """Reports the status of ``gateway``, whose configuration file is ``filename``."""

    def __init__(
        self, gateway: GatewayView, filename: str, source: RequestStatsSource, clock: Clock
    ) -> None:
        self._gateway = gateway
        self._filename = filename
        self._source = source
        self._recent_stats = RecentStats(source.collect_stats, clock)
        self._history = HistoryRecorder(source.collect_stats, clock)
        self._clock = clock
        self._started_at = clock()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """See ``gateway.admin.services.StatusService``."""
        self._recent_stats.sample()
        self._history.take_sample()
        delay = SAMPLE_INTERVAL - self._clock() % SAMPLE_INTERVAL
        self._timer = asyncio.get_running_loop().call_later(delay, self.start)

    def stop(self) -> None:
        """See ``gateway.admin.services.StatusService``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def get_config(self) -> Any:
        """See ``gateway.admin.services.StatusService``."""
        snapshot = self._current
        return await describe_config(
            snapshot.config, snapshot.config_hash, self._filename, self._gateway.config_data
        )

    def get_status(self) -> GatewayStatus:
        """See ``gateway.admin.services.StatusService``."""
        snapshot = self._current
        seconds, stats = self._recent_stats.sample()
        return GatewayStatus(
            version=__version__,
            python=platform.python_version(),
            config_hash=snapshot.config_hash,
            uptime=self._clock() - self._started_at,
            draining=not snapshot.router.ready,
            running=len(self._collect_running()),
            recent_seconds=seconds,
            listeners=[*self._list_listeners()],
            models=[*_list_models(snapshot)],
            stats=stats,
            backends={name: one.ready for name, one in snapshot.backends.items()},
            failures=list_failures(snapshot.backends),
            workers={
                name: one.report_workers()
                for name, one in snapshot.backends.items()
                if isinstance(one, WorkerSet)
            },
            memory=self._gateway.memory.get_status(),
        )

    def get_history(self) -> StatsHistory:
        """See ``gateway.admin.services.StatusService``."""
        return self._history.build_history()

    def list_finished(self) -> Sequence[RequestRecord]:
        """See ``gateway.admin.services.StatusService``."""
        return self._source.list_finished()

    def list_requests(self) -> Sequence[RunningRequest]:
        """See ``gateway.admin.services.StatusService``."""
        queued = {
            request_id
            for snapshot in self._gateway.active_snapshots
            for one in snapshot.backends.values()
            if isinstance(one, HasQueue)
            for request_id in one.queued_request_ids
        }
        requests = (
            _describe_request(one, queued=one.record.id in queued)
            for one in self._collect_running()
        )
        return sorted(requests, key=lambda one: -one.age)

    def cancel_request(self, id: str) -> int:  # noqa: A002 - the usual name
        """See ``gateway.admin.services.StatusService``."""
        requests = [request for request in self._collect_running() if request.record.id == id]
        for request in requests:
            request.stop()
        return len(requests)

    def set_draining(self, *, on: bool) -> None:
        """See ``gateway.admin.services.StatusService``."""
        self._gateway.set_draining(on=on)

    def get_listener_handler(self, number: int) -> HandleRequest | None:
        """See ``gateway.admin.services.StatusService``."""
        listener_ids = [*self._current.handlers]
        return (
            self._current.get_handler(listener_ids[number]) if number < len(listener_ids) else None
        )

    @property
    def _current(self) -> SnapshotView:
        return self._gateway.active_snapshots[-1]

    def _collect_running(self) -> set[CancellableRequest]:
        handlers = (
            one.dispatcher
            for snapshot in self._gateway.active_snapshots
            for one in snapshot.handlers.values()
        )
        return {request for one in handlers for request in one.running_requests}

    def _list_listeners(self) -> Iterator[ListenerStatus]:
        for listener_id, listener in config_listeners.listeners_by_id(self._current.config).items():
            protocols = [
                ListenerProtocolStatus(protocol.name, protocol.profile or "", protocol.prefix)
                for protocol in listener.protocols
            ]
            yield ListenerStatus(self._gateway.listener_urls.get(listener_id, ""), protocols)


def _list_models(snapshot: SnapshotView) -> Iterator[ModelStatus]:
    for info in snapshot.router.list_models():
        targets = snapshot.config.models[info.name].resolve_targets()
        versions = [
            VersionStatus(
                version.name,
                targets[version.name].backend,
                version.backend_model,
                version.share or 0,
                version.ready,
                state=version.state,
                description={} if version.state is None else dict(version.state.describe()),
            )
            for version in info.versions
        ]
        yield ModelStatus(info.name, info.task, info.aliases, versions)


def _describe_request(request: CancellableRequest, *, queued: bool) -> RunningRequest:
    record = request.record
    return RunningRequest(
        id=record.id,
        age=request.age,
        phase="streaming" if request.started else "queued" if queued else "waiting",
        protocol=record.protocol,
        model=record.model,
        version=record.version,
        backend=record.backend,
        key=record.key,
        stream=record.stream,
        tokens=record.tokens,
    )
