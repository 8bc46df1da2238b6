"""How the gateway is: what it serves, what runs in it, and what both come to."""

import asyncio
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from msgspec import Struct

from gateway import __version__
from gateway import config as c
from gateway.admin.ports import Serve, WorkerSet
from gateway.admin.status import Listener, Model, Mounted, Status, Version
from gateway.admin.window import Window
from gateway.answering import Answers
from gateway.core.context import Clock
from gateway.core.ports import Backend
from gateway.exchange import Exchange
from gateway.files import look
from gateway.router import Router

_HASH: Final = 12
"""As many digits as a configuration's hash has."""
_MASKED: Final = frozenset({"sha256", "watermark"})
"""Fields that are no secrets, and by which one could be guessed or a mark be found."""


class Answered(Protocol):
    """What serves a listener."""

    @property
    def answers(self) -> Answers:
        """With the exchanges that run there."""


class Served(Protocol):
    """What one configuration makes."""

    @property
    def config(self) -> c.Config: ...
    @property
    def digest(self) -> str: ...
    @property
    def backends(self) -> Mapping[str, Backend]: ...
    @property
    def router(self) -> Router: ...
    @property
    def servers(self) -> Mapping[c.ListenerId, Answered]: ...
    def entrance(self, listener_id: c.ListenerId) -> Serve:
        """What a listener's requests go through."""


@runtime_checkable
class Queueing(Protocol):
    """A backend at which requests wait for a place."""

    @property
    def queued(self) -> Sequence[str]:
        """The ids of those that do."""


class House(Protocol):
    """The running gateway."""

    @property
    def living(self) -> Sequence[Served]:
        """What has exchanges, or may have; the last is what is served."""

    @property
    def urls(self) -> Mapping[c.ListenerId, str]:
        """Where each listener is bound."""

    def drain(self, *, on: bool) -> None:
        """See ``gateway.admin.ports.Telling``."""


class Running(Struct, frozen=True):
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


class Overview:
    """Of ``house``, whose configuration is in the file of this name.

    ``figures`` are those of all its exchanges.
    """

    def __init__(self, house: House, filename: str, figures: Window, clock: Clock) -> None:
        self._house = house
        self._filename = filename
        self._window = figures
        self._clock = clock
        self._began = clock()

    async def config(self) -> Any:
        """See ``gateway.admin.ports.Telling``."""
        now = self._now
        return await shown(now.config, now.digest, self._filename)

    def status(self) -> Status:
        """See ``gateway.admin.ports.Telling``."""
        now = self._now
        seconds, figures = self._window.look()
        return Status(
            version=__version__,
            python=platform.python_version(),
            config=now.digest,
            uptime=self._clock() - self._began,
            draining=not now.router.ready,
            running=len(self._running()),
            recent=seconds,
            listeners=[*self._listeners()],
            models=[*_models(now)],
            figures=figures,
            backends={name: one.ready for name, one in now.backends.items()},
            workers={
                name: one.snapshot()
                for name, one in now.backends.items()
                if isinstance(one, WorkerSet)
            },
        )

    def requests(self) -> Sequence[Running]:
        """See ``gateway.admin.ports.Telling``."""
        queued = {
            waiter
            for made in self._house.living
            for one in made.backends.values()
            if isinstance(one, Queueing)
            for waiter in one.queued
        }
        told = (_told(one, queued=one.record.id in queued) for one in self._running())
        return sorted(told, key=lambda one: -one.age)

    def cancel(self, id: str) -> int:  # noqa: A002 - what it is called everywhere
        """See ``gateway.admin.ports.Telling``."""
        found = [one for one in self._running() if one.record.id == id]
        for one in found:
            one.stop()
        return len(found)

    def drain(self, *, on: bool) -> None:
        """See ``gateway.admin.ports.Telling``."""
        self._house.drain(on=on)

    def play(self, number: int) -> Serve | None:
        """See ``gateway.admin.ports.Telling``."""
        listener_ids = [*self._now.servers]
        return self._now.entrance(listener_ids[number]) if number < len(listener_ids) else None

    @property
    def _now(self) -> Served:
        return self._house.living[-1]

    def _running(self) -> set[Exchange]:
        answers = (one.answers for made in self._house.living for one in made.servers.values())
        return {exchange for one in answers for exchange in one.live}

    def _listeners(self) -> Iterator[Listener]:
        for listener_id, one in c.listeners_by_id(self._now.config).items():
            dialects = [Mounted(it.name, it.profile or "", it.prefix) for it in one.dialects]
            yield Listener(self._house.urls.get(listener_id, ""), dialects)


async def shown(config: c.Config, digest: str, filename: str) -> Mapping[str, Any]:
    """A configuration as it may be shown, and what its file holds now if it is in one."""
    found = await asyncio.to_thread(look, filename)
    there = None if found is None else found.digest.hex()[:_HASH]
    return {
        "hash": digest,
        "file": {"name": filename, "hash": there, "differs": there not in (None, digest)},
        "config": _masked(c.dump(config)),
    }


def _masked(node: Any) -> Any:
    match node:
        case dict():
            return {
                name: "***" if name in _MASKED and one is not None else _masked(one)
                for name, one in node.items()
            }
        case list():
            return [_masked(one) for one in node]
        case _:
            return node


def _models(now: Served) -> Iterator[Model]:
    for info in now.router.models():
        targets = now.config.models[info.name].targets()
        versions = [
            Version(one.name, targets[one.name].backend, one.served_model, one.share, one.ready)
            for one in info.versions
        ]
        yield Model(info.name, info.task, info.aliases, versions)


def _told(exchange: Exchange, *, queued: bool) -> Running:
    record = exchange.record
    return Running(
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
