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
from gateway.admin.api import HandleRequest, WorkerSet
from gateway.config import listeners as config_listeners
from gateway.config import loader, schema
from gateway.config.file_watch import read_file_state
from gateway.observability.stats import FIRST_TOKEN_BUCKETS, RequestStats, StatsKey
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.responder import Responder
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
    workers: Mapping[str, Any]


def add_counts(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """The sums of two lists of counts."""
    return [a + b for a, b in zip(one, other, strict=True)]


def merge_statuses(told: Sequence[GatewayStatus], workers: Mapping[str, Any]) -> GatewayStatus:
    """Merge the statuses of one or more processes. ``workers`` are the merged reports."""
    first = told[0]
    return replace(
        first,
        uptime=max(one.uptime for one in told),
        processes=len(told),
        draining=all(one.draining for one in told),
        running=sum(one.running for one in told),
        recent_seconds=max(one.recent_seconds for one in told),
        stats=_merge_stats([figures for one in told for figures in one.stats]),
        backends={
            name: any(one.backends.get(name, False) for one in told) for name in first.backends
        },
        workers=workers,
    )


def _merge_stats(every: Sequence[VersionStats]) -> Sequence[VersionStats]:
    known: dict[tuple[str, str], VersionStats] = {}
    for one in every:
        target = one.model, one.version
        known[target] = _add_stats(known[target], one) if target in known else one
    return [*known.values()]


def _add_stats(one: VersionStats, other: VersionStats) -> VersionStats:
    return replace(
        one,
        requests=one.requests + other.requests,
        errors=one.errors + other.errors,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        requests_per_second=one.requests_per_second + other.requests_per_second,
        tokens_per_second=one.tokens_per_second + other.tokens_per_second,
        first_token_counts=add_counts(one.first_token_counts, other.first_token_counts),
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
        then, before = self._samples[0]
        if now - self._samples[-1][0] >= _SAMPLE_INTERVAL:
            self._samples.append((now, counts))
        seconds = now - then
        none = _VersionCounts()
        return seconds, [
            _build_version_stats(target, count, before.get(target, none), seconds)
            for target, count in counts.items()
        ]


def _count_by_version(
    arms: Mapping[StatsKey, RequestStats[Histogram]],
) -> Mapping[TargetKey, _VersionCounts]:
    found: dict[TargetKey, _VersionCounts] = {}
    for (model, version, _), figures in arms.items():
        one = found.setdefault((model, version), _VersionCounts())
        one.requests += figures.outcomes.total()
        one.errors += figures.errors.total()
        for (direction, _), tokens in figures.tokens.items():
            if direction == "input":
                one.prompt_tokens += tokens
            elif direction == "output":
                one.completion_tokens += tokens
        one.first_token = add_counts(one.first_token, figures.first_token.counts)
    return found


def _build_version_stats(
    target: TargetKey, count: _VersionCounts, before: _VersionCounts, seconds: float
) -> VersionStats:
    recent = [now - then for now, then in zip(count.first_token, before.first_token, strict=True)]
    told = VersionStats(
        model=target[0],
        version=target[1],
        requests=count.requests,
        errors=count.errors,
        prompt_tokens=count.prompt_tokens,
        completion_tokens=count.completion_tokens,
        first_token_counts=recent,
    )
    if seconds > 0:
        told.requests_per_second = (count.requests - before.requests) / seconds
        told.tokens_per_second = (count.completion_tokens - before.completion_tokens) / seconds
    return told.compute_quantiles()


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
        now = self._current
        return await describe_config(now.config, now.config_hash, self._filename)

    def get_status(self) -> GatewayStatus:
        """See ``gateway.admin.api.StatusService``."""
        now = self._current
        seconds, stats = self._recent_stats.sample()
        return GatewayStatus(
            version=__version__,
            python=platform.python_version(),
            config_hash=now.config_hash,
            uptime=self._clock() - self._started_at,
            draining=not now.router.ready,
            running=len(self._collect_running()),
            recent_seconds=seconds,
            listeners=[*self._list_listeners()],
            models=[*_list_models(now)],
            stats=stats,
            backends={name: one.ready for name, one in now.backends.items()},
            workers={
                name: one.report_workers()
                for name, one in now.backends.items()
                if isinstance(one, WorkerSet)
            },
        )

    def list_requests(self) -> Sequence[RunningRequest]:
        """See ``gateway.admin.api.StatusService``."""
        queued = {
            waiter
            for made in self._gateway.active_snapshots
            for one in made.backends.values()
            if isinstance(one, HasQueue)
            for waiter in one.queued_request_ids
        }
        told = (
            _describe_request(one, queued=one.record.id in queued)
            for one in self._collect_running()
        )
        return sorted(told, key=lambda one: -one.age)

    def cancel_request(self, id: str) -> int:  # noqa: A002 - what it is called everywhere
        """See ``gateway.admin.api.StatusService``."""
        found = [one for one in self._collect_running() if one.record.id == id]
        for one in found:
            one.stop()
        return len(found)

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

    def _collect_running(self) -> set[Responder]:
        answers = (
            one.dispatcher
            for made in self._gateway.active_snapshots
            for one in made.handlers.values()
        )
        return {request for one in answers for request in one.running_requests}

    def _list_listeners(self) -> Iterator[ListenerStatus]:
        for listener_id, one in config_listeners.listeners_by_id(self._current.config).items():
            protocols = [
                ListenerProtocolStatus(it.name, it.profile or "", it.prefix) for it in one.protocols
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
                name: "***" if name in _MASKED_FIELDS and one is not None else _mask_fields(one)
                for name, one in node.items()
            }
        case list():
            return [_mask_fields(one) for one in node]
        case _:
            return node


def _list_models(now: SnapshotView) -> Iterator[ModelStatus]:
    for info in now.router.list_models():
        targets = now.config.models[info.name].resolve_targets()
        versions = [
            VersionStatus(
                one.name, targets[one.name].backend, one.backend_model, one.share, one.ready
            )
            for one in info.versions
        ]
        yield ModelStatus(info.name, info.task, info.aliases, versions)


def _describe_request(request: Responder, *, queued: bool) -> RunningRequest:
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
