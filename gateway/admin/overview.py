"""How the gateway is: what it serves, what runs in it, and what both come to."""

import asyncio
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from msgspec import Struct

from backends.interfaces import Backend
from gateway import __version__
from gateway.admin.ports import HandleRequest, WorkerSet
from gateway.admin.status import (
    GatewayStatus,
    ListenerProtocolStatus,
    ListenerStatus,
    ModelStatus,
    VersionStatus,
)
from gateway.admin.window import RecentStats
from gateway.config import listeners, loader, schema
from gateway.config.file_watch import read_file_state
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.responder import Responder
from gateway.routing.router import Router
from protocols.core.interfaces import Clock

_HASH_LENGTH: Final = 12
"""As many digits as a configuration's hash has."""
_MASKED_FIELDS: Final = frozenset({"sha256", "watermark"})
"""Fields that are no secrets, and by which one could be guessed or a mark be found."""


class HandlerView(Protocol):
    """What serves a listener."""

    @property
    def dispatcher(self) -> Dispatcher:
        """With the exchanges that run there."""


class SnapshotView(Protocol):
    """What one configuration makes."""

    @property
    def config(self) -> schema.Config: ...
    @property
    def config_hash(self) -> str: ...
    @property
    def backends(self) -> Mapping[str, Backend]: ...
    @property
    def router(self) -> Router: ...
    @property
    def handlers(self) -> Mapping[listeners.ListenerId, HandlerView]: ...
    def get_handler(self, listener_id: listeners.ListenerId) -> HandleRequest:
        """What a listener's requests go through."""


@runtime_checkable
class HasQueue(Protocol):
    """A backend at which requests wait for a place."""

    @property
    def queued_request_ids(self) -> Sequence[str]:
        """The ids of those that do."""


class GatewayView(Protocol):
    """The running gateway."""

    @property
    def active_snapshots(self) -> Sequence[SnapshotView]:
        """What has exchanges, or may have; the last is what is served."""

    @property
    def listener_urls(self) -> Mapping[listeners.ListenerId, str]:
        """Where each listener is bound."""

    def set_draining(self, *, on: bool) -> None:
        """See ``gateway.admin.ports.StatusService``."""


class RunningRequest(Struct, frozen=True):
    """An exchange that runs. ``age`` is in seconds, ``tokens`` are those passed on so far.

    ``queued``: no worker has a place for it; ``waiting``: nothing of its answer was passed on.
    """

    id: str
    age: float
    phase: str
    dialect: str
    model: str
    version: str
    backend: str
    key: str
    stream: bool
    tokens: int


class StatusReporter:
    """Of ``house``, whose configuration is in the file of this name.

    ``figures`` are those of all its exchanges.
    """

    def __init__(
        self, house: GatewayView, filename: str, figures: RecentStats, clock: Clock
    ) -> None:
        self._gateway = house
        self._filename = filename
        self._recent_stats = figures
        self._clock = clock
        self._started_at = clock()

    async def get_config(self) -> Any:
        """See ``gateway.admin.ports.StatusService``."""
        now = self._current
        return await describe_config(now.config, now.config_hash, self._filename)

    def get_status(self) -> GatewayStatus:
        """See ``gateway.admin.ports.StatusService``."""
        now = self._current
        seconds, figures = self._recent_stats.sample()
        return GatewayStatus(
            version=__version__,
            python=platform.python_version(),
            config=now.config_hash,
            uptime=self._clock() - self._started_at,
            draining=not now.router.ready,
            running=len(self._collect_running()),
            recent=seconds,
            listeners=[*self._list_listeners()],
            models=[*_list_models(now)],
            figures=figures,
            backends={name: one.ready for name, one in now.backends.items()},
            workers={
                name: one.report_workers()
                for name, one in now.backends.items()
                if isinstance(one, WorkerSet)
            },
        )

    def list_requests(self) -> Sequence[RunningRequest]:
        """See ``gateway.admin.ports.StatusService``."""
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
        """See ``gateway.admin.ports.StatusService``."""
        found = [one for one in self._collect_running() if one.record.id == id]
        for one in found:
            one.stop()
        return len(found)

    def set_draining(self, *, on: bool) -> None:
        """See ``gateway.admin.ports.StatusService``."""
        self._gateway.set_draining(on=on)

    def get_listener_handler(self, number: int) -> HandleRequest | None:
        """See ``gateway.admin.ports.StatusService``."""
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
        return {exchange for one in answers for exchange in one.running_requests}

    def _list_listeners(self) -> Iterator[ListenerStatus]:
        for listener_id, one in listeners.listeners_by_id(self._current.config).items():
            dialects = [
                ListenerProtocolStatus(it.name, it.profile or "", it.prefix) for it in one.dialects
            ]
            yield ListenerStatus(self._gateway.listener_urls.get(listener_id, ""), dialects)


async def describe_config(config: schema.Config, digest: str, filename: str) -> Mapping[str, Any]:
    """A configuration as it may be shown, and what its file holds now if it is in one."""
    found = await asyncio.to_thread(read_file_state, filename)
    there = None if found is None else found.digest.hex()[:_HASH_LENGTH]
    return {
        "hash": digest,
        "file": {"name": filename, "hash": there, "differs": there not in (None, digest)},
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


def _describe_request(exchange: Responder, *, queued: bool) -> RunningRequest:
    record = exchange.record
    return RunningRequest(
        record.id,
        exchange.age,
        "streaming" if exchange.started else "queued" if queued else "waiting",
        record.dialect,
        record.model,
        record.version,
        record.backend,
        record.key,
        record.stream,
        record.tokens,
    )
