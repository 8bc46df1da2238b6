"""The status of the gateway: models, versions, workers, statistics and running requests."""

import asyncio
import platform
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from backends.histogram import Histogram, bucket_quantile
from backends.interfaces import Backend
from gateway import __version__
from gateway.admin.api import WorkerSet, list_failures
from gateway.config import listeners as config_listeners
from gateway.config import loader, schema
from gateway.config.file_watch import read_file_state
from gateway.http_server.connection import HandleRequest
from gateway.observability.stats import FIRST_TOKEN_BUCKETS, RequestStats, StatsKey
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.http import CancellableRequest
from gateway.routing.router import Router
from protocols.core.interfaces import Clock

# The status as JSON, and the merged status of several processes. Pure.


class ListenerProtocolStatus(Struct, frozen=True):
    """A protocol on a listener."""

    name: str
    profile: str = ""
    prefix: str = ""


class ListenerStatus(Struct, frozen=True):
    """A listener."""

    url: str
    protocols: Sequence[ListenerProtocolStatus]


class VersionStatus(Struct, frozen=True):
    """A version of a model; ``share`` is its percentage of the traffic split."""

    name: str
    backend: str
    backend_model: str
    share: int
    ready: bool


class ModelStatus(Struct, frozen=True):
    """A public model."""

    name: str
    task: str
    aliases: Sequence[str]
    versions: Sequence[VersionStatus]


class VersionStats(Struct, kw_only=True):
    """Statistics of a version, over all splits.

    ``requests`` to ``completion_tokens`` are since the start; the rest is over the last
    ``GatewayStatus.recent_seconds``. ``first_token_*`` are seconds, of streams; the counts are by
    the buckets of ``interlingua_time_to_first_token_seconds``, the last one for larger values.
    """

    model: str
    version: str
    requests: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    first_token_p50: float | None = None
    first_token_p95: float | None = None
    first_token_counts: Sequence[int]

    def compute_quantiles(self) -> "VersionStats":
        """Set the quantiles from the counts; returns the same object."""
        self.first_token_p50 = bucket_quantile(FIRST_TOKEN_BUCKETS, self.first_token_counts, 0.5)
        self.first_token_p95 = bucket_quantile(FIRST_TOKEN_BUCKETS, self.first_token_counts, 0.95)
        return self


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


def add_counts(left: Sequence[int], right: Sequence[int]) -> Sequence[int]:
    """The sums of two lists of counts."""
    return [a + b for a, b in zip(left, right, strict=True)]


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
        stats=_merge_stats([stats for one in statuses for stats in one.stats]),
        backends={
            name: any(one.backends.get(name, False) for one in statuses) for name in first.backends
        },
        failures={name: text for one in statuses for name, text in one.failures.items()},
        workers=workers,
    )


def _merge_stats(stats: Sequence[VersionStats]) -> Sequence[VersionStats]:
    merged: dict[tuple[str, str], VersionStats] = {}
    for version_stats in stats:
        target = version_stats.model, version_stats.version
        merged[target] = (
            _add_stats(merged[target], version_stats) if target in merged else version_stats
        )
    return [*merged.values()]


def _add_stats(left: VersionStats, right: VersionStats) -> VersionStats:
    return replace(
        left,
        requests=left.requests + right.requests,
        errors=left.errors + right.errors,
        prompt_tokens=left.prompt_tokens + right.prompt_tokens,
        completion_tokens=left.completion_tokens + right.completion_tokens,
        requests_per_second=left.requests_per_second + right.requests_per_second,
        tokens_per_second=left.tokens_per_second + right.tokens_per_second,
        first_token_counts=add_counts(left.first_token_counts, right.first_token_counts),
    ).compute_quantiles()


# Statistics of the last minute, computed from cumulative counts when the status is read.

_WINDOW_SECONDS: Final = 60.0
"""Seconds that recent statistics cover, if the status was read then."""
_SAMPLE_INTERVAL: Final = 5.0
"""Minimum seconds between two kept samples."""

TargetKey = tuple[str, str]
"""Model and version."""


class _VersionCounts(Struct):
    """Cumulative counts of a version."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token: Sequence[int] = (0,) * (len(FIRST_TOKEN_BUCKETS) + 1)


class RecentStats:
    """Recent statistics, from the cumulative ones that ``get_stats`` gives."""

    def __init__(
        self, get_stats: Callable[[], Mapping[StatsKey, RequestStats[Histogram]]], clock: Clock
    ) -> None:
        self._get_stats = get_stats
        self._clock = clock
        self._samples = deque[tuple[float, Mapping[TargetKey, _VersionCounts]]]([(clock(), {})])

    def sample(self) -> tuple[float, list[VersionStats]]:
        """The seconds that recent statistics cover, and the statistics of each version."""
        now, counts = self._clock(), _count_by_version(self._get_stats())
        while len(self._samples) > 1 and now - self._samples[1][0] >= _WINDOW_SECONDS:
            self._samples.popleft()
        then, baseline = self._samples[0]
        if now - self._samples[-1][0] >= _SAMPLE_INTERVAL:
            self._samples.append((now, counts))
        seconds = now - then
        none = _VersionCounts()
        return seconds, [
            _build_version_stats(target, count, baseline.get(target, none), seconds)
            for target, count in counts.items()
        ]


def _count_by_version(
    stats: Mapping[StatsKey, RequestStats[Histogram]],
) -> Mapping[TargetKey, _VersionCounts]:
    counts: dict[TargetKey, _VersionCounts] = {}
    for (model, version, _), request_stats in stats.items():
        count = counts.setdefault((model, version), _VersionCounts())
        count.requests += request_stats.outcomes.total()
        count.errors += request_stats.errors.total()
        for (direction, _), tokens in request_stats.tokens.items():
            if direction == "input":
                count.prompt_tokens += tokens
            elif direction == "output":
                count.completion_tokens += tokens
        count.first_token = add_counts(count.first_token, request_stats.first_token.counts)
    return counts


def _build_version_stats(
    target: TargetKey, count: _VersionCounts, baseline: _VersionCounts, seconds: float
) -> VersionStats:
    recent = [now - then for now, then in zip(count.first_token, baseline.first_token, strict=True)]
    stats = VersionStats(
        model=target[0],
        version=target[1],
        requests=count.requests,
        errors=count.errors,
        prompt_tokens=count.prompt_tokens,
        completion_tokens=count.completion_tokens,
        first_token_counts=recent,
    )
    if seconds > 0:
        stats.requests_per_second = (count.requests - baseline.requests) / seconds
        stats.tokens_per_second = (count.completion_tokens - baseline.completion_tokens) / seconds
    return stats.compute_quantiles()


_HASH_LENGTH: Final = 12
"""Digits of a configuration hash."""
_MASKED_FIELDS: Final = frozenset({"sha256", "watermark"})
"""Fields that are masked although they are no secrets."""


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

    def set_draining(self, *, on: bool) -> None:
        """See ``gateway.admin.api.StatusService``."""


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
        self, gateway: GatewayView, filename: str, recent_stats: RecentStats, clock: Clock
    ) -> None:
        self._gateway = gateway
        self._filename = filename
        self._recent_stats = recent_stats
        self._clock = clock
        self._started_at = clock()

    async def get_config(self) -> Any:
        """See ``gateway.admin.api.StatusService``."""
        snapshot = self._current
        return await describe_config(snapshot.config, snapshot.config_hash, self._filename)

    def get_status(self) -> GatewayStatus:
        """See ``gateway.admin.api.StatusService``."""
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
        )

    def list_requests(self) -> Sequence[RunningRequest]:
        """See ``gateway.admin.api.StatusService``."""
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
        """See ``gateway.admin.api.StatusService``."""
        requests = [request for request in self._collect_running() if request.record.id == id]
        for request in requests:
            request.stop()
        return len(requests)

    def set_draining(self, *, on: bool) -> None:
        """See ``gateway.admin.api.StatusService``."""
        self._gateway.set_draining(on=on)

    def get_listener_handler(self, number: int) -> HandleRequest | None:
        """See ``gateway.admin.api.StatusService``."""
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


async def describe_config(config: schema.Config, digest: str, filename: str) -> Mapping[str, Any]:
    """The configuration with masked secrets, and the state of its file."""
    state = await asyncio.to_thread(read_file_state, filename)
    file_hash = None if state is None else state.digest.hex()[:_HASH_LENGTH]
    return {
        "hash": digest,
        "file": {"name": filename, "hash": file_hash, "differs": file_hash not in (None, digest)},
        "config": _mask_fields(loader.dump_config(config)),
    }


def _mask_fields(node: Any) -> Any:
    match node:
        case dict():
            return {
                name: "***" if name in _MASKED_FIELDS and value is not None else _mask_fields(value)
                for name, value in node.items()
            }
        case list():
            return [_mask_fields(value) for value in node]
        case _:
            return node


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
            )
            for version in info.versions
        ]
        yield ModelStatus(info.name, info.task, info.aliases, versions)


def _describe_request(request: CancellableRequest, *, queued: bool) -> RunningRequest:
    record = request.record
    return RunningRequest(
        record.id,
        request.age,
        "streaming" if request.started else "queued" if queued else "waiting",
        record.protocol,
        record.model,
        record.version,
        record.backend,
        record.key,
        record.stream,
        record.tokens,
    )
