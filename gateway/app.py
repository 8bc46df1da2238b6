"""The one place where the parts meet. Everything is passed in; nothing is global."""

import asyncio
import gc
import itertools
import logging
import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from msgspec.structs import replace

from gateway import config as c
from gateway.admin import Admin, Behind, Overview, Window, WorkerSet, obstacle
from gateway.core.errors import Overloaded
from gateway.core.ports import Backend, Warming
from gateway.counted import counted, exported, kept, overseen
from gateway.explaining.dry import Explainer
from gateway.front import FRONTS, Front
from gateway.lending import Lending
from gateway.limits.accounts import Accounts
from gateway.limits.lent import Lent
from gateway.making import load, make_limits
from gateway.opening import ADMIN, Given, Trust, bind, served, warm
from gateway.recording.lines import Lines
from gateway.reload import Origin, Reloader, Told
from gateway.router import Router
from gateway.server import Surroundings
from gateway.shadow import Shadows
from gateway.snapshot import Snapshot
from gateway.telemetry import log_line
from gateway.watching.kept import Kept

if TYPE_CHECKING:
    from gateway.metrics import Metrics
    from gateway.metrics.process import Process

log = logging.getLogger("interlingua")

_LAST_ROWS = 5.0
"""Seconds in which the last rows of usage must be written."""
_LAST_SPANS = 2.0
"""Seconds in which what is to be sent to collectors must be taken."""
_LAST_WORDS = 1.0
"""Seconds in which clients whose answers are cut must be told of it."""


def surroundings(log: Lines | None = None) -> Surroundings:
    """The real clock, time and luck, ids that are this process's own, and a line of the log.

    Without a log, lines go to standard error at once.
    """
    tell = log_line if log is None else log.tell
    start = os.urandom(8).hex()
    ids = (f"{start}{number:08x}" for number in itertools.count())
    return Surroundings(
        clock=time.monotonic,
        now=time.time,  # noqa: TID251 - here it is passed in
        new_id=ids.__next__,
        draw=random.random,  # noqa: TID251 - as above
        observe=tell,
        shadows=Shadows(time.monotonic, tell),
        accounts=Accounts(time.monotonic, time.time),  # noqa: TID251 - as above
        lost={} if log is None else {"log_lines": log.lost},
    )


@runtime_checkable
class Handmade(Protocol):
    """A backend whose workers the admin may have changed."""

    @property
    def by_hand(self) -> Sequence[str]:
        """The URLs that the admin added or removed."""


class Among(Protocol):
    """The other processes, where several serve the same listeners."""

    @property
    def admin(self) -> str:
        """The path of the Unix socket that takes the admin listener's place in this one."""

    async def agree(self) -> None:
        """Wait until all can serve what this one can. Raises what keeps them from it."""

    async def reload(self) -> Told:
        """Let all of them reload."""


class App:
    """A running gateway: listeners, router and backends made from one configuration.

    With its ``origin`` the configuration can be read anew, and another take its place. With
    ``among`` it shares its listeners with other processes, and takes another when they do.
    """

    def __init__(
        self,
        config: c.Config,
        outside: Surroundings,
        *,
        origin: Origin | None = None,
        among: Among | None = None,
    ) -> None:
        self._among = among
        tell: Callable[[Told], None] = _untold
        digest = origin.loaded.hash if origin else ""
        outside, self._ledger = kept(config.observe.usage, outside)
        outside, self._sending = exported(config.observe, outside, os.environ)
        outside, self._lending = Lending.around(config.state, outside, self._lent)
        metrics: Metrics | None = None
        if config.admin is not None:
            outside, metrics, tell = counted(outside, lambda: self.backends, digest)
        explained = Kept(outside.clock, outside.draw)
        self._explainer = Explainer(explained, lambda: self._now.by_address, outside.clock)
        self._outside = outside = replace(outside, explain=explained.watch)
        self._now = Snapshot(config, outside, digest)
        self.living = [self._now]
        """Those that have exchanges, or may have; the last is the one that is served."""
        self.urls: dict[c.ListenerId, str] = {}
        """Where each listener is bound."""
        self._draining = False
        self._retiring: set[asyncio.Task[None]] = set()
        self._closing: list[Backend] = []
        self._leaving: list[Front] = []
        self.fronts = {
            listener_id: self._make_front(self._now, listener_id)
            for listener_id in self._now.servers
        }
        self.reloader = None if origin is None else Reloader(origin, self.take, tell)
        self._pools: dict[str, WorkerSet] = {}
        self._show_pools()
        self._admin: Admin | None = None
        self._process: Process | None = None
        if config.admin is not None and metrics is not None:
            if self._lending is not None:
                self._lending.tell(metrics)
            self._process = overseen(metrics, self, vllm=config.observe.metrics.vllm_compat)
            filename = origin.loaded.filename if origin else ""
            self._admin = self._make_admin(config.admin, metrics, filename)

    @property
    def backends(self) -> dict[str, Backend]:
        """Those that are asked now, by their names."""
        return self._now.backends

    def _lent(self) -> Sequence[Lent]:
        """What is shared of the limits that hold now."""
        limiter = self._now.limiter
        return () if limiter is None else limiter.lent

    @property
    def router(self) -> Router:
        """The table that requests follow now."""
        return self._now.router

    async def start(self, given: Given | None = None, *, warmed: bool = False) -> list[str]:
        """Start the backends and bind the listeners; gives their URLs, the admin's last.

        A listener that has sockets ``given`` listens there, and nothing is bound for it. With
        ``warmed`` nothing listens before every backend is at its best. Raises OSError, and
        WorkerError for one that never will be.
        """
        if self._ledger is not None:
            self._ledger.start()
        for sending in self._sending:
            sending.start()
        if self._process is not None:
            self._process.start()
        if self._lending is not None:
            self._lending.start()
        await asyncio.gather(*(backend.start() for backend in self.backends.values()))
        if warmed:
            slow = [one for one in self.backends.values() if isinstance(one, Warming)]
            await asyncio.gather(*(backend.warm() for backend in slow))
        urls = []
        trust = served(self._now.config)
        for listener_id, listener in c.listeners_by_id(self._now.config).items():
            there = given.take(listener_id) if given else ()
            front, tls = self.fronts[listener_id], trust[listener_id]
            self.urls[listener_id] = await self._bind_one(front, listener, tls, there)
            urls.append(self.urls[listener_id])
        if self._admin is not None:
            there = given.take(ADMIN) if given else ()
            path = self._among.admin if self._among else ""
            urls.append(await self._admin.listen(path, there))
        return urls

    @property
    def listening(self) -> Mapping[c.ListenerId, Sequence[int]]:
        """The descriptors of each listener's sockets, and of the admin's."""
        found = {listener_id: front.listening for listener_id, front in self.fronts.items()}
        return found if self._admin is None else {**found, ADMIN: self._admin.listening}

    def shut(self) -> None:
        """Take no more connections. Those that are there go on."""
        for front in self.fronts.values():
            front.shut()
        if self._admin is not None:
            self._admin.shut()

    def drain(self, *, on: bool = True) -> None:
        """Say to whoever asks that no more requests should come; those that do are served.

        Each answer is then the last of its connection. Without ``on``, they may come again. A
        reload leaves it as it is.
        """
        self._draining = on
        self.router.ready = not on
        for front in self.fronts.values():
            front.leaving = on

    async def stop(self, *, lame_duck: bool = False) -> None:
        """Take no more connections, let what runs come to its end, and let everything go.

        As a ``lame_duck`` it first drains for as long as the configuration says. What outlasts
        ``limits.drain`` is told that it is cut.
        """
        if self.reloader is not None:
            await self.reloader.aclose()
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        self.drain()
        limits = self._now.config.limits
        if lame_duck:
            await asyncio.sleep(limits.lame_duck)
        fronts = [*self.fronts.values(), *self._leaving]
        await asyncio.gather(*(front.drain(limits.drain) for front in fronts))
        for one in self.living:
            one.end(Overloaded("the gateway stops"))
        await asyncio.gather(*(front.drain(_LAST_WORDS) for front in fronts))
        await asyncio.gather(*(front.close() for front in fronts))
        await self._outside.shadows.aclose()
        await self._now.aclose()
        if self._lending is not None:
            await self._lending.aclose()
        left = (*self.backends.values(), *self._closing)
        await asyncio.gather(*(backend.aclose() for backend in left))
        if self._admin is not None:
            await self._admin.close()
        if self._process is not None:
            self._process.stop()
        closing = (asyncio.to_thread(one.close, _LAST_SPANS) for one in self._sending)
        await asyncio.gather(*closing)
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.close, _LAST_ROWS)

    # --- another configuration --------------------------------------------------------------------

    async def take(self, loaded: c.Loaded) -> None:
        """Serve this configuration from now on.

        What is new is started, warmed and bound before a request comes to it, and what runs keeps
        what it began with. Raises ConfigError, having changed nothing.
        """
        if wrong := [*c.restart_required(self._now.config, loaded.config)]:
            raise loaded.refusal(*wrong)
        trust = served(loaded.config)
        now = Snapshot(loaded.config, self._outside, loaded.hash, former=self._now)
        new = {
            listener_id: self._make_front(now, listener_id)
            for listener_id in now.servers.keys() - self.fronts
        }
        try:
            await self._warm(now, loaded)
            await self._bind(new, trust, loaded)
            if self._among is not None:
                await self._among.agree()
        except BaseException:
            await asyncio.gather(*(front.close() for front in new.values()))
            await asyncio.gather(*(one.aclose() for one in self._added(now).values()))
            raise
        self._swap(now, new, trust)

    async def _warm(self, now: Snapshot, loaded: c.Loaded) -> None:
        """Start the backends that are new, and let them get ready. Raises ConfigError."""
        added, within = self._added(now), now.config.limits.warm
        whys = await asyncio.gather(*(warm(name, one, within) for name, one in added.items()))
        said = zip(added, whys, strict=True)
        wrong = [(("backends", name), f"it can't be used: {why}") for name, why in said if why]
        if wrong:
            raise loaded.refusal(*wrong)

    async def _bind(
        self, new: Mapping[c.ListenerId, Front], trust: Trust, loaded: c.Loaded
    ) -> None:
        """Bind the listeners that are new. Raises ConfigError."""
        for number, (listener_id, listener) in enumerate(c.listeners_by_id(loaded.config).items()):
            if listener_id not in new:
                continue
            try:
                self.urls[listener_id] = await self._bind_one(
                    new[listener_id], listener, trust[listener_id]
                )
            except OSError as error:
                why = f"the gateway can't listen there: {error.strerror or error}"
                raise loaded.refusal((("listeners", number, "address"), why)) from None
            log.info("listening on %s", self.urls[listener_id])

    async def _bind_one(
        self,
        front: Front,
        listener: c.Listener,
        tls: ssl.SSLContext | None,
        given: Sequence[socket.socket] = (),
    ) -> str:
        return await bind(front, listener, tls, reuse_port=self._among is not None, given=given)

    def _added(self, now: Snapshot) -> Mapping[str, Backend]:
        """The backends that are not those of the configuration before."""
        here = {id(one) for one in self.backends.values()}
        return {name: one for name, one in now.backends.items() if id(one) not in here}

    def _swap(self, now: Snapshot, new: Mapping[c.ListenerId, Front], trust: Trust) -> None:
        """From here on requests meet ``now``: nothing is awaited in between."""
        old, self._now = self._now, now
        now.router.ready = not self._draining
        self.living = [*(one for one in self.living if one.running), now]
        gone = [
            self.fronts.pop(listener_id) for listener_id in old.servers.keys() - now.servers.keys()
        ]
        self._leaving += gone
        limits = make_limits(now.config.limits)
        for listener_id, front in self.fronts.items():
            now.servers[listener_id].take_over(old.servers[listener_id])
            front.serve = now.entrance(listener_id)
            front.limit(limits)
            front.trust(trust[listener_id])
        self.fronts |= new
        self._show_pools()
        if self._admin is not None and now.config.admin is not None:
            self._admin.rekey(now.config.admin.sha256)
        ended = {
            name: one for name, one in old.backends.items() if one is not now.backends.get(name)
        }
        self._closing += ended.values()
        for name, backend in ended.items():
            for url in backend.by_hand if isinstance(backend, Handmade) else ():
                log.warning("%s: what the admin said of %s ends with this reload", name, url)
        retiring = self._retire(list(ended.values()), gone, old.config.limits.drain)
        task = asyncio.get_running_loop().create_task(retiring)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retire(self, ended: list[Backend], gone: Sequence[Front], drain: float) -> None:
        """Let go of these, once the exchanges that they may have are over or had their time."""
        holding = [now for now in self.living if now is not self._now and now.holds(ended)]
        await asyncio.gather(self._over(holding, drain), *(front.drain(drain) for front in gone))
        await asyncio.gather(*(front.close() for front in gone))
        self._leaving = [front for front in self._leaving if front not in gone]
        await asyncio.gather(*(one.aclose() for one in ended))
        self._closing = [one for one in self._closing if one not in ended]
        gc.collect()  # a configuration holds itself, and the collector would let it wait for long

    async def _over(self, holding: Sequence[Snapshot], within: float) -> None:
        """Wait for their exchanges and for the shadows of these, so many seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                for one in holding:
                    await one.over()
                await self._outside.shadows.over()

    # --- parts ------------------------------------------------------------------------------------

    def _make_front(self, now: Snapshot, listener_id: c.ListenerId) -> Front:
        kind = load(FRONTS[c.listeners_by_id(now.config)[listener_id].front])
        made = cast("Front", kind(now.entrance(listener_id), make_limits(now.config.limits)))
        made.leaving = self._draining
        return made

    def _show_pools(self) -> None:
        """To the admin, who holds on to the mapping."""
        self._pools.clear()
        self._pools.update(
            {name: one for name, one in self.backends.items() if isinstance(one, WorkerSet)}
        )

    def _make_admin(self, told: c.Admin, metrics: "Metrics", filename: str) -> Admin:
        clock = self._outside.clock
        behind = Behind(
            obstacle=lambda: obstacle(self.router, self.backends.values()),
            pools=self._pools,
            metrics=metrics.page,
            reload=(self._among or self.reloader).reload if self.reloader else None,
            explain=self._explainer,
            overview=Overview(self, filename, Window(metrics.arms, clock), clock),
        )
        return Admin(told.address, behind, sha256=told.sha256)


def _untold(told: Told) -> None:
    """Nobody counts."""
    del told
