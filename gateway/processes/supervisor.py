"""Who looks after the processes: starts them, restarts one that died, reloads and stops them all.

It reads the configuration, holds the ports and has the admin listener, but serves no request.
"""

import asyncio
import logging
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import click
from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway import config as c
from gateway.admin.overview import shown
from gateway.config import Complaint, ConfigError, Loaded
from gateway.metrics.processes import PROCESSES, RESTARTS
from gateway.processes.desk import Desk
from gateway.processes.following import Following
from gateway.processes.line import Begin, Prepare, Prepared, Seated, Verdict
from gateway.processes.member import Member
from gateway.processes.ports import Held
from gateway.processes.shares import undivided
from gateway.processes.text import Reading, Text
from gateway.reload import Origin, Reloader
from gateway.reloads import Reloads

log = logging.getLogger("interlingua")

_MOST: Final = 5
"""So many starts fail in a row, and nobody serves: then no more are tried."""
_PAUSE: Final = 0.1
_LONGEST: Final = 30.0
"""Seconds before another takes a place: at first, and at most."""
_STEADY: Final = 10.0
"""A process that lived for so many seconds was started well."""
_SLACK: Final = 5.0
"""Seconds that a process may take to reload, beside those that its backends may."""


class Plan(Struct, frozen=True):
    """What is served at first and by how many, what reads it anew, and the file that is watched."""

    first: Loaded
    reading: Reading
    processes: int
    watched: str | None = None
    log_level: str = "INFO"


class Supervisor(Collector):
    """Of the processes that ``plan`` asks for."""

    def __init__(self, plan: Plan, folder: str) -> None:
        """``folder`` is for the processes' admin sockets: nobody else may enter it."""
        self._plan = plan
        self._folder = Path(folder)
        self._loaded, self._text = plan.first, plan.reading.text
        self._held = Held()
        self._members: list[Member] = []
        self._born = self._failures = 0
        self._turn = asyncio.Lock()
        """Whose it is may start a process, or change what they serve."""
        self._stopping = asyncio.Event()
        self._why = ""
        """What keeps all of it from going on."""
        self._tasks = asyncio.TaskGroup()
        reloads = Reloads(plan.first.hash, time.time)  # noqa: TID251 - here it is passed in
        self._reloader = Reloader(Origin(plan.first, plan.reading), self._take, reloads.tell)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(reloads)
        registry.register(self)
        admin, own = plan.first.config.admin, partial(generate_latest, registry)
        self._desk: Desk | None = None
        if admin is not None:
            self._desk = Desk(admin.address, self._serving, own, self._shown)

    async def run(self) -> int:
        """Serve until told to stop; gives the command's exit code."""
        following = Following(self._reloader, self._plan.watched)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._stop, name)
        loop.add_signal_handler(signal.SIGHUP, following.changed.set)
        async with self._tasks:
            await self._open()
            tasks = [self._tasks.create_task(following.run())]
            tasks += [self._tasks.create_task(self._keep(one)) for one in self._members]
            await self._stopping.wait()
            for task in tasks:
                task.cancel()
            await self._close()
        if self._why:
            click.echo(f"interlingua can't serve: {self._why}", err=True)
        return 1 if self._why else 0

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        serving = len(self._serving())
        yield PROCESSES.family([((), serving)])
        yield RESTARTS.family([((), max(0, self._born - self._plan.processes))])

    async def _shown(self) -> object:
        return await shown(self._loaded.config, self._loaded.hash, self._loaded.filename)

    def _serving(self) -> list[Member]:
        return [one for one in self._members if one.ready is not None]

    # --- from the start to the end ----------------------------------------------------------------

    async def _open(self) -> None:
        """Start all of them and listen, or give up."""
        try:
            for listener_id in c.listeners_by_id(self._loaded.config):
                self._held.take(listener_id)
            whys = await asyncio.gather(*(self._start() for _ in range(self._plan.processes)))
            if why := next(filter(None, whys), ""):
                self._give_up(why)
                return
            urls = [*self._urls()]
            if self._desk is not None:
                urls.append(await self._desk.listen())
        except OSError as error:
            self._give_up(str(error))
            return
        told = next((one.ready.models for one in self._members if one.ready), ())
        names, places = ", ".join(told) or "any", " and ".join(urls)
        count = self._plan.processes
        click.echo(f"interlingua serves {names} on {places} ({count} processes)", err=True)

    async def _close(self) -> None:
        """Wait until what runs in them has ended."""
        await self._reloader.aclose()
        await asyncio.gather(*(one.ended() for one in self._members))
        if self._desk is not None:
            await self._desk.close()
        self._held.keep(frozenset())

    def _give_up(self, why: str) -> None:
        if not self._stopping.is_set():
            self._why = why
            self._drain(signal.SIGINT)

    def _stop(self, name: signal.Signals) -> None:
        """A signal has come; a second one ends all at once."""
        if not self._stopping.is_set():
            said = "interlingua stops when what runs has ended; signal again to stop at once"
            click.echo(said, err=True)
            self._drain(name)
            return
        for one in self._members:
            one.send(signal.SIGKILL)
        signal.signal(name, signal.SIG_DFL)
        signal.raise_signal(name)

    def _drain(self, name: signal.Signals) -> None:
        """Let each come to its end. It must be told once: the second time ends it."""
        self._stopping.set()
        for one in self._members:
            one.send(name)

    def _urls(self) -> Sequence[str]:
        return next((one.ready.urls for one in self._members if one.ready), ())

    # --- each process -----------------------------------------------------------------------------

    async def _start(self) -> str:
        """Start one more; why it does not serve, or ""."""
        self._born += 1
        admin = "" if self._desk is None else str(self._folder / str(self._born))
        draining = self._desk is not None and self._desk.draining
        member = await Member.born(admin)
        self._members.append(member)
        self._tasks.create_task(member.hear(self._reloader.reload))
        count, level = self._plan.processes, self._plan.log_level
        begin = Begin(self._text, count, self._seated(), admin, level, draining)
        if self._stopping.is_set():
            member.send(signal.SIGTERM)
        return await member.begin(begin)

    async def _keep(self, member: Member) -> None:
        """Start another in this one's place when it ends, and in that one's."""
        loop = asyncio.get_running_loop()
        pause = _PAUSE
        while True:
            began = loop.time()
            end = await member.ended()
            self._members.remove(member)
            if self._desk is not None:
                self._desk.bury(member)
            pause = _PAUSE if loop.time() - began > _STEADY else min(2 * pause, _LONGEST)
            log.error("a process ended with %s; another takes its place in %g s", end, pause)
            await asyncio.sleep(pause)
            async with self._turn:
                why = await self._start()
            member = self._members[-1]
            self._failures = self._failures + 1 if why else 0
            if why:
                log.error("a process can't serve: %s", why)
            if self._failures >= _MOST and not self._serving():
                self._give_up(f"no process does any more, and the last one said: {why}")

    # --- another configuration --------------------------------------------------------------------

    async def _take(self, loaded: Loaded) -> None:
        """Let all of them serve this from now on. Raises ConfigError, and all stays as it was."""
        if wrong := [
            *c.restart_required(self._loaded.config, loaded.config),
            *undivided(loaded.config),
        ]:
            raise loaded.refusal(*wrong)
        async with self._turn:
            self._hold(loaded)
            text = self._plan.reading.text
            complaints = await self._agreed(text, loaded.config.limits.warm + _SLACK)
            if complaints:
                self._held.keep(frozenset(c.listeners_by_id(self._loaded.config)))
                raise ConfigError(loaded.filename, complaints, loaded.files)
            self._loaded, self._text = loaded, text
            self._held.keep(frozenset(c.listeners_by_id(loaded.config)))

    def _hold(self, loaded: Loaded) -> None:
        """Hold the ports that are new. Raises ConfigError."""
        for number, listener_id in enumerate(c.listeners_by_id(loaded.config)):
            if listener_id in self._held.ports:
                continue
            try:
                self._held.take(listener_id)
            except OSError as error:
                self._held.keep(frozenset(c.listeners_by_id(self._loaded.config)))
                why = f"the gateway can't listen there: {error.strerror or error}"
                raise loaded.refusal((("listeners", number, "address"), why)) from None

    async def _agreed(self, text: Text, within: float) -> Sequence[Complaint]:
        """Let all prepare this, and serve it if all can; what keeps one of them from it."""
        serving = self._serving()
        prepare = Prepare(text, self._seated())
        replies = await asyncio.gather(*(one.ask(prepare, within) for one in serving))
        said = {
            one: it for one, it in zip(serving, replies, strict=True) if isinstance(it, Prepared)
        }
        complaints = next((it.complaints for it in said.values() if it.complaints), ())
        ready = [one for one, it in said.items() if not it.complaints]
        verdict = Verdict(not complaints)
        await asyncio.gather(*(one.ask(verdict, _SLACK) for one in ready))
        return complaints

    def _seated(self) -> Sequence[Seated]:
        return [Seated(*listener_id, port) for listener_id, port in self._held.ports.items()]


def supervise(plan: Plan) -> int:
    """Serve what the plan says until told to stop; gives the command's exit code."""
    if wrong := [*undivided(plan.first.config)]:
        click.echo(str(plan.first.refusal(*wrong)), err=True)
        return 1
    with tempfile.TemporaryDirectory(prefix="interlingua") as folder:
        return asyncio.run(Supervisor(plan, folder).run())
