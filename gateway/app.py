"""The one place where the parts meet. Everything is passed in; nothing is global."""

import asyncio
import itertools
import logging
import os
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from msgspec.structs import replace

from gateway import config as c
from gateway.admin import Admin, WorkerSet, obstacle
from gateway.core.errors import WorkerError
from gateway.core.ports import Backend, Warming
from gateway.explaining.dry import Explainer
from gateway.front import FRONTS, Front
from gateway.making import load
from gateway.recording.lines import Lines
from gateway.reload import Origin, Reloader, Told
from gateway.router import Router
from gateway.server import Surroundings
from gateway.shadow import Shadows
from gateway.snapshot import Snapshot
from gateway.telemetry import Record, log_line
from gateway.watching.kept import Kept

if TYPE_CHECKING:
    from gateway.recording.ledger import Ledger

log = logging.getLogger("interlingua")

_LAST_ROWS = 5.0
"""Seconds in which the last rows of usage must be written."""

Trust = Mapping[c.Seat, ssl.SSLContext | None]
"""Each listener's certificate; None where connections are plain."""


def surroundings(log: Lines | None = None) -> Surroundings:
    """The real clock, time and luck, ids that are this process's own, and a line of the log.

    Without a log, lines go to standard error at once.
    """
    tell = log_line if log is None else log.tell
    start = os.urandom(8).hex()
    numbers = itertools.count()
    return Surroundings(
        clock=time.monotonic,
        now=time.time,  # noqa: TID251 - here it is passed in
        new_id=lambda: f"{start}{next(numbers):08x}",
        draw=random.random,  # noqa: TID251 - as above
        observe=tell,
        shadows=Shadows(time.monotonic, tell),
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


def counted(
    outside: Surroundings, backends: Callable[[], Mapping[str, Backend]], digest: str
) -> tuple[Surroundings, Callable[[], bytes], Callable[[Told], None]]:
    """The surroundings in which exchanges are counted, the page of counts, and what counts reloads.

    ``digest`` is the configuration's.
    """
    from gateway.engines import Engine, Engines  # noqa: PLC0415 - nobody else needs its library
    from gateway.metrics import Crew, Metrics  # noqa: PLC0415 - as above
    from gateway.recording.lost import Lost  # noqa: PLC0415 - as above
    from gateway.reloads import Reloads  # noqa: PLC0415 - as above
    from gateway.shadow_counts import ShadowCounts  # noqa: PLC0415 - as above

    def crews() -> Mapping[str, Crew]:
        return {name: one for name, one in backends().items() if isinstance(one, Crew)}

    def engines() -> Mapping[str, Engine]:
        return {name: one for name, one in backends().items() if isinstance(one, Engine)}

    metrics = Metrics(outside.observe, crews)
    reloads = Reloads(digest, outside.now)
    shadows = ShadowCounts()
    outside.shadows.also(shadows.tell)
    metrics.also(reloads)
    metrics.also(shadows)
    metrics.also(Engines(engines))
    metrics.also(Lost(outside.lost))
    return replace(outside, observe=metrics.observe), metrics.page, reloads.tell


def kept(told: c.UsageRows | None, outside: Surroundings) -> tuple[Surroundings, "Ledger | None"]:
    """The surroundings in which usage is written down, and what writes it, if it is to be."""
    if told is None:
        return outside, None
    from gateway.recording.ledger import Ledger  # noqa: PLC0415 - nobody else needs its library

    ledger, observe = Ledger(told.sqlite, told.keep, outside.now), outside.observe

    def both(record: Record) -> None:
        observe(record)
        ledger.tell(record)

    lost = {**outside.lost, "usage_rows": ledger.lost}
    return replace(outside, observe=both, lost=lost), ledger


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
        page: Callable[[], bytes] = bytes
        tell: Callable[[Told], None] = _untold
        digest = origin.loaded.hash if origin else ""
        outside, self._ledger = kept(config.observe.usage, outside)
        if config.admin is not None:
            outside, page, tell = counted(outside, lambda: self.backends, digest)
        explained = Kept(outside.clock, outside.draw)
        self._explainer = Explainer(explained, lambda: self._now.by_address, outside.clock)
        self._outside = outside = replace(outside, explain=explained.watch)
        self._now = Snapshot(config, outside, digest)
        self._living = [self._now]
        """Those that have exchanges, or may have; the last is the one that is served."""
        self._retiring: set[asyncio.Task[None]] = set()
        self._closing: list[Backend] = []
        self._leaving: list[Front] = []
        self._fronts = {seat: self._make_front(self._now, seat) for seat in self._now.servers}
        self.reloader = None if origin is None else Reloader(origin, self.take, tell)
        self._pools: dict[str, WorkerSet] = {}
        self._show_pools()
        self._admin = None if config.admin is None else self._make_admin(config.admin, page)

    @property
    def backends(self) -> dict[str, Backend]:
        """Those that are asked now, by their names."""
        return self._now.backends

    @property
    def router(self) -> Router:
        """The table that requests follow now."""
        return self._now.router

    async def start(self, *, warmed: bool = False) -> list[str]:
        """Start the backends and bind the listeners; gives their URLs, the admin's last.

        With ``warmed`` nothing listens before every backend is at its best. Raises OSError, and
        WorkerError for one that never will be.
        """
        if self._ledger is not None:
            self._ledger.start()
        await asyncio.gather(*(backend.start() for backend in self.backends.values()))
        if warmed:
            slow = [one for one in self.backends.values() if isinstance(one, Warming)]
            await asyncio.gather(*(backend.warm() for backend in slow))
        urls = []
        trust = served(self._now.config)
        for seat, listener in c.seats(self._now.config).items():
            urls.append(await self._bind_one(self._fronts[seat], listener, trust[seat]))
        if self._admin is not None:
            urls.append(await self._admin.listen(self._among.admin if self._among else ""))
        return urls

    async def stop(self) -> None:
        """Take no more connections, let what runs come to its end, and let everything go."""
        if self.reloader is not None:
            await self.reloader.aclose()
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        self.router.ready = False
        drain = self._now.config.limits.drain
        fronts = [*self._fronts.values(), *self._leaving]
        await asyncio.gather(*(front.drain(drain) for front in fronts))
        await asyncio.gather(*(front.close() for front in fronts))
        await self._outside.shadows.aclose()
        left = (*self.backends.values(), *self._closing)
        await asyncio.gather(*(backend.aclose() for backend in left))
        if self._admin is not None:
            await self._admin.close()
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.close, _LAST_ROWS)

    # --- another configuration --------------------------------------------------------------------

    async def take(self, loaded: c.Loaded) -> None:
        """Serve this configuration from now on.

        What is new is started, warmed and bound before a request comes to it, and what runs keeps
        what it began with. Raises ConfigError, having changed nothing.
        """
        if wrong := [*c.fixed(self._now.config, loaded.config)]:
            raise loaded.refusal(*wrong)
        trust = served(loaded.config)
        now = Snapshot(loaded.config, self._outside, loaded.hash, former=self._now)
        new = {seat: self._make_front(now, seat) for seat in now.servers.keys() - self._fronts}
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

    async def _bind(self, new: Mapping[c.Seat, Front], trust: Trust, loaded: c.Loaded) -> None:
        """Bind the listeners that are new. Raises ConfigError."""
        for number, (seat, listener) in enumerate(c.seats(loaded.config).items()):
            if seat not in new:
                continue
            try:
                url = await self._bind_one(new[seat], listener, trust[seat])
            except OSError as error:
                why = f"the gateway can't listen there: {c.reason(error)}"
                raise loaded.refusal((("listeners", number, "address"), why)) from None
            log.info("listening on %s", url)

    async def _bind_one(
        self, front: Front, listener: c.Listener, tls: ssl.SSLContext | None
    ) -> str:
        return await bind(front, listener, tls, reuse_port=self._among is not None)

    def _added(self, now: Snapshot) -> Mapping[str, Backend]:
        """The backends that are not those of the configuration before."""
        here = {id(one) for one in self.backends.values()}
        return {name: one for name, one in now.backends.items() if id(one) not in here}

    def _swap(self, now: Snapshot, new: Mapping[c.Seat, Front], trust: Trust) -> None:
        """From here on requests meet ``now``: nothing is awaited in between."""
        old, self._now = self._now, now
        self._living = [*(one for one in self._living if one.running), now]
        gone = [self._fronts.pop(seat) for seat in old.servers.keys() - now.servers.keys()]
        self._leaving += gone
        limits = now.config.limits
        for seat, front in self._fronts.items():
            now.servers[seat].take_over(old.servers[seat])
            front.serve = now.entrance(seat)
            front.limit(header_limit=limits.header, connections=limits.connections)
            front.trust(trust[seat])
        self._fronts |= new
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
        holding = [now for now in self._living if now is not self._now and now.holds(ended)]
        await asyncio.gather(self._over(holding, drain), *(front.drain(drain) for front in gone))
        await asyncio.gather(*(front.close() for front in gone))
        self._leaving = [front for front in self._leaving if front not in gone]
        await asyncio.gather(*(one.aclose() for one in ended))
        self._closing = [one for one in self._closing if one not in ended]

    async def _over(self, holding: Sequence[Snapshot], within: float) -> None:
        """Wait for their exchanges and for the shadows of these, so many seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                for one in holding:
                    await one.over()
                await self._outside.shadows.over()

    # --- parts ------------------------------------------------------------------------------------

    def _make_front(self, now: Snapshot, seat: c.Seat) -> Front:
        limits, kind = now.config.limits, load(FRONTS[c.seats(now.config)[seat].front])
        made = kind(now.entrance(seat), header_limit=limits.header, connections=limits.connections)
        return cast("Front", made)

    def _show_pools(self) -> None:
        """To the admin, who holds on to the mapping."""
        self._pools.clear()
        self._pools.update(
            {name: one for name, one in self.backends.items() if isinstance(one, WorkerSet)}
        )

    def _make_admin(self, told: c.Admin, metrics: Callable[[], bytes]) -> Admin:
        return Admin(
            told.address,
            obstacle=lambda: obstacle(self.router, self.backends.values()),
            pools=self._pools,
            metrics=metrics,
            sha256=told.sha256,
            reload=(self._among or self.reloader).reload if self.reloader else None,
            explain=self._explainer,
        )


async def warm(name: str, backend: Backend, within: float) -> str:
    """Start a backend, and let it get ready for so many seconds; why it never will, or ""."""
    try:
        await backend.start()
        async with asyncio.timeout(within):
            if isinstance(backend, Warming):
                await backend.warm()
    except TimeoutError:
        log.warning("%s is not ready after %g s, and is taken as it is", name, within)
    except WorkerError as error:
        return error.message
    return ""


async def bind(
    front: Front, listener: c.Listener, tls: ssl.SSLContext | None, *, reuse_port: bool
) -> str:
    """Let it listen; gives its URL. Raises OSError."""
    host, _, port = listener.address.rpartition(":")
    bound = await front.listen(host.strip("[]"), int(port), tls, reuse_port=reuse_port)
    return f"{'https' if tls else 'http'}://{host}:{bound}"


def served(config: c.Config) -> Trust:
    """Every listener's certificate, as it is in its file now."""
    return {
        seat: c.served(listener.tls.cert, listener.tls.key) if listener.tls else None
        for seat, listener in c.seats(config).items()
    }


def _untold(told: Told) -> None:
    """Nobody counts."""
    del told
