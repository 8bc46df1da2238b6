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
from typing import TYPE_CHECKING, Final, Protocol, Self, cast, runtime_checkable

from msgspec.structs import replace

from backends.interfaces import Backend, SupportsWarmup
from gateway.admin.api import AdminServer, AdminServices, WorkerSet, get_unready_reason
from gateway.admin.status import RecentStats, StatusReporter
from gateway.config import listeners, loader, schema
from gateway.explain.dry_run import ExplainService
from gateway.explain.recorder import ExplanationStore
from gateway.http_server.listener import LISTENER_CLASSES, Listener
from gateway.observability.access_log import AccessLogWriter
from gateway.observability.record import write_log_line
from gateway.pipeline.handler import GatewayServices
from gateway.pipeline.shadow import ShadowManager
from gateway.ratelimit.limiter import CounterRegistry
from gateway.ratelimit.redis_limiter import LeasedCounter, LeaseRenewer
from gateway.routing.router import Router
from gateway.runtime.build import build_connection_limits, load_symbol
from gateway.runtime.reload import ConfigSource, Reloader, ReloadResult
from gateway.runtime.snapshot import ConfigSnapshot
from gateway.runtime.telemetry import (
    set_up_exporters,
    set_up_metrics,
    set_up_process_metrics,
    set_up_usage,
)
from protocols.core.errors import Overloaded, WorkerError

if TYPE_CHECKING:
    from gateway.observability.metrics.requests import MetricsCollector
    from gateway.observability.metrics.system import ProcessCollector
    from gateway.ratelimit.redis_limiter import RedisLeaseStore


# What must be there before a request: backends that are ready, listeners that are bound.

TlsContexts = Mapping[listeners.ListenerId, ssl.SSLContext | None]
"""Each listener's certificate; None where connections are plain."""
ADMIN_LISTENER: Final[listeners.ListenerId] = ("admin", 0)
"""The admin listener's, in the place of an address."""


class SocketSource(Protocol):
    """Sockets that listen already."""

    def take_sockets(self, listener_id: listeners.ListenerId) -> Sequence[socket.socket]:
        """The listener's, which are the taker's from now on; none where it has none."""


async def warm_backend(name: str, backend: Backend, within: float) -> str:
    """Start a backend, and let it get ready for so many seconds; why it never will, or ""."""
    try:
        await backend.start()
        async with asyncio.timeout(within):
            if isinstance(backend, SupportsWarmup):
                await backend.warm_up()
    except TimeoutError:
        log.warning("%s is not ready after %g s, and is taken as it is", name, within)
    except WorkerError as error:
        return error.message
    return ""


async def bind_listener(
    front: Listener,
    listener: schema.ListenerConfig,
    tls: ssl.SSLContext | None,
    *,
    reuse_port: bool,
    given: Sequence[socket.socket] = (),
) -> str:
    """Let it listen; gives its URL. Raises OSError."""
    host, _, port = listener.address.rpartition(":")
    bound = await front.listen(host.strip("[]"), int(port), tls, reuse_port=reuse_port, given=given)
    return f"{'https' if tls else 'http'}://{host}:{bound}"


def build_tls_contexts(config: schema.Config) -> TlsContexts:
    """Every listener's certificate, as it is in its file now."""
    return {
        listener_id: server_tls_context(listener.tls) if listener.tls else None
        for listener_id, listener in listeners.listeners_by_id(config).items()
    }


def server_tls_context(tls: schema.TlsConfig) -> ssl.SSLContext:
    """TLS with this certificate chain and key. Raises OSError for files that can't be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key, password=str)  # or it would ask at the terminal
    return context


# Limits that several gateways share: who lends them, and who asks for more.


class SharedRateLimits:
    """The store, and what asks it beside all requests."""

    def __init__(self, store: "RedisLeaseStore", leasing: LeaseRenewer) -> None:
        self._store = store
        self._renewer = leasing

    @classmethod
    def create(
        cls,
        state: schema.SharedStateConfig | None,
        outside: GatewayServices,
        counters: Callable[[], Sequence[LeasedCounter]],
    ) -> tuple[GatewayServices, Self | None]:
        """The surroundings in which limits are shared, and what shares them, if something is to.

        ``counters`` gives those of the configuration that is served.
        """
        if state is None:
            return outside, None
        from gateway.ratelimit.redis_limiter import (  # noqa: PLC0415 - redis may not be installed
            RedisLeaseStore,
            RedisLimitSettings,
        )

        ca = state.tls.ca if state.tls else None
        shared = RedisLimitSettings(
            state.redis.reveal(), state.on_failure, state.replicas, state.prefix, ca
        )
        store = RedisLeaseStore(shared, outside.new_id(), clock=outside.clock, draw=outside.draw)
        bell = asyncio.Event()
        leasing = LeaseRenewer(store, counters, bell, outside.clock, outside.draw)
        accounts = CounterRegistry(outside.clock, outside.wall_clock, store, bell.set)
        return replace(outside, counter_registry=accounts), cls(store, leasing)

    def register_metrics(self, metrics: "MetricsCollector") -> None:
        """Let these tell how it goes."""
        from gateway.observability.metrics.system import RateLimitStoreCollector  # noqa: PLC0415 - its library

        metrics.register(RateLimitStoreCollector(self._store))

    def start(self) -> None:
        """Borrow whatever is wanted, from now on."""
        self._renewer.start()

    async def aclose(self) -> None:
        """Tell what was used, and give back what is held."""
        await self._renewer.aclose()
        await self._store.aclose()


log = logging.getLogger("interlingua")

_USAGE_FLUSH_TIMEOUT = 5.0
"""Seconds in which the last rows of usage must be written."""
_EXPORT_FLUSH_TIMEOUT = 2.0
"""Seconds in which what is to be sent to collectors must be taken."""
_ERROR_FLUSH_TIMEOUT = 1.0
"""Seconds in which clients whose answers are cut must be told of it."""


def build_services(log: AccessLogWriter | None = None) -> GatewayServices:
    """The real clock, time and luck, ids that are this process's own, and a line of the log.

    Without a log, lines go to standard error at once.
    """
    tell = write_log_line if log is None else log.write_record
    start = os.urandom(8).hex()
    ids = (f"{start}{number:08x}" for number in itertools.count())
    return GatewayServices(
        clock=time.monotonic,
        wall_clock=time.time,  # noqa: TID251 - here it is passed in
        new_id=ids.__next__,
        draw=random.random,  # noqa: TID251 - as above
        observe_request=tell,
        shadow_manager=ShadowManager(time.monotonic, tell),
        counter_registry=CounterRegistry(time.monotonic, time.time),  # noqa: TID251 - as above
        dropped_counts={} if log is None else {"log_lines": log.count_dropped},
    )


@runtime_checkable
class ManuallyManaged(Protocol):
    """A backend whose workers the admin may have changed."""

    @property
    def manual_workers(self) -> Sequence[str]:
        """The URLs that the admin added or removed."""


class ProcessGroup(Protocol):
    """The other processes, where several serve the same listeners."""

    @property
    def admin_socket(self) -> str:
        """The path of the Unix socket that takes the admin listener's place in this one."""

    async def confirm_reload(self) -> None:
        """Wait until all can serve what this one can. Raises what keeps them from it."""

    async def reload(self) -> ReloadResult:
        """Let all of them reload."""


class Gateway:
    """A running gateway: listeners, router and backends made from one configuration.

    With its ``origin`` the configuration can be read anew, and another take its place. With
    ``among`` it shares its listeners with other processes, and takes another when they do.
    """

    def __init__(
        self,
        config: schema.Config,
        outside: GatewayServices,
        *,
        origin: ConfigSource | None = None,
        among: ProcessGroup | None = None,
    ) -> None:
        self._process_group = among
        tell: Callable[[ReloadResult], None] = _ignore_reload
        digest = origin.loaded.hash if origin else ""
        outside, self._usage_recorder = set_up_usage(config.observe.usage, outside)
        outside, self._exporters = set_up_exporters(config.observe, outside, os.environ)
        outside, self._shared_limits = SharedRateLimits.create(
            config.state, outside, self._list_leased_counters
        )
        metrics: MetricsCollector | None = None
        if config.admin is not None:
            outside, metrics, tell = set_up_metrics(outside, lambda: self.backends, digest)
        explained = ExplanationStore(outside.clock, outside.draw)
        self._explainer = ExplainService(
            explained, lambda: self._current.handlers_by_address, outside.clock
        )
        self._services = outside = replace(outside, explain_policy=explained.create_recorder)
        self._current = ConfigSnapshot(config, outside, digest)
        self.active_snapshots = [self._current]
        """Those that have exchanges, or may have; the last is the one that is served."""
        self.listener_urls: dict[listeners.ListenerId, str] = {}
        """Where each listener is bound."""
        self._is_draining = False
        self._retire_tasks: set[asyncio.Task[None]] = set()
        self._closing_backends: list[Backend] = []
        self._closing_listeners: list[Listener] = []
        self.listeners = {
            listener_id: self._make_listener(self._current, listener_id)
            for listener_id in self._current.handlers
        }
        self.reloader = None if origin is None else Reloader(origin, self.apply_config, tell)
        self._worker_sets: dict[str, WorkerSet] = {}
        self._update_worker_sets()
        self._admin_server: AdminServer | None = None
        self._process_metrics: ProcessCollector | None = None
        if config.admin is not None and metrics is not None:
            if self._shared_limits is not None:
                self._shared_limits.register_metrics(metrics)
            self._process_metrics = set_up_process_metrics(
                metrics, self, vllm=config.observe.metrics.vllm_compat
            )
            filename = origin.loaded.filename if origin else ""
            self._admin_server = self._make_admin_server(config.admin, metrics, filename)

    @property
    def backends(self) -> dict[str, Backend]:
        """Those that are asked now, by their names."""
        return self._current.backends

    def _list_leased_counters(self) -> Sequence[LeasedCounter]:
        """What is shared of the limits that hold now."""
        limiter = self._current.rate_limiter
        return () if limiter is None else limiter.leased_counters

    @property
    def router(self) -> Router:
        """The table that requests follow now."""
        return self._current.router

    async def start(self, given: SocketSource | None = None, *, warmed: bool = False) -> list[str]:
        """Start the backends and bind the listeners; gives their URLs, the admin's last.

        A listener that has sockets ``given`` listens there, and nothing is bound for it. With
        ``warmed`` nothing listens before every backend is at its best. Raises OSError, and
        WorkerError for one that never will be.
        """
        if self._usage_recorder is not None:
            self._usage_recorder.start()
        for sending in self._exporters:
            sending.start()
        if self._process_metrics is not None:
            self._process_metrics.start()
        if self._shared_limits is not None:
            self._shared_limits.start()
        await asyncio.gather(*(backend.start() for backend in self.backends.values()))
        if warmed:
            slow = [one for one in self.backends.values() if isinstance(one, SupportsWarmup)]
            await asyncio.gather(*(backend.warm_up() for backend in slow))
        urls = []
        trust = build_tls_contexts(self._current.config)
        for listener_id, listener in listeners.listeners_by_id(self._current.config).items():
            there = given.take_sockets(listener_id) if given else ()
            front, tls = self.listeners[listener_id], trust[listener_id]
            self.listener_urls[listener_id] = await self._bind_listener(front, listener, tls, there)
            urls.append(self.listener_urls[listener_id])
        if self._admin_server is not None:
            there = given.take_sockets(ADMIN_LISTENER) if given else ()
            path = self._process_group.admin_socket if self._process_group else ""
            urls.append(await self._admin_server.listen(path, there))
        return urls

    @property
    def socket_fds(self) -> Mapping[listeners.ListenerId, Sequence[int]]:
        """The descriptors of each listener's sockets, and of the admin's."""
        found = {listener_id: front.socket_fds for listener_id, front in self.listeners.items()}
        return (
            found
            if self._admin_server is None
            else {**found, ADMIN_LISTENER: self._admin_server.socket_fds}
        )

    def stop_accepting(self) -> None:
        """Take no more connections. Those that are there go on."""
        for front in self.listeners.values():
            front.stop_accepting()
        if self._admin_server is not None:
            self._admin_server.stop_accepting()

    def set_draining(self, *, on: bool = True) -> None:
        """Say to whoever asks that no more requests should come; those that do are served.

        Each answer is then the last of its connection. Without ``on``, they may come again. A
        reload leaves it as it is.
        """
        self._is_draining = on
        self.router.ready = not on
        for front in self.listeners.values():
            front.is_draining = on

    async def stop(self, *, lame_duck: bool = False) -> None:
        """Take no more connections, let what runs come to its end, and let everything go.

        As a ``lame_duck`` it first drains for as long as the configuration says. What outlasts
        ``limits.drain`` is told that it is cut.
        """
        if self.reloader is not None:
            await self.reloader.aclose()
        for task in self._retire_tasks:
            task.cancel()
        await asyncio.gather(*self._retire_tasks, return_exceptions=True)
        self.set_draining()
        limits = self._current.config.limits
        if lame_duck:
            await asyncio.sleep(limits.lame_duck)
        fronts = [*self.listeners.values(), *self._closing_listeners]
        await asyncio.gather(*(front.drain(limits.drain) for front in fronts))
        for one in self.active_snapshots:
            one.stop_requests(Overloaded("the gateway stops"))
        await asyncio.gather(*(front.drain(_ERROR_FLUSH_TIMEOUT) for front in fronts))
        await asyncio.gather(*(front.close() for front in fronts))
        await self._services.shadow_manager.aclose()
        await self._current.aclose()
        if self._shared_limits is not None:
            await self._shared_limits.aclose()
        left = (*self.backends.values(), *self._closing_backends)
        await asyncio.gather(*(backend.aclose() for backend in left))
        if self._admin_server is not None:
            await self._admin_server.close()
        if self._process_metrics is not None:
            self._process_metrics.stop()
        closing = (asyncio.to_thread(one.close, _EXPORT_FLUSH_TIMEOUT) for one in self._exporters)
        await asyncio.gather(*closing)
        if self._usage_recorder is not None:
            await asyncio.to_thread(self._usage_recorder.close, _USAGE_FLUSH_TIMEOUT)

    # --- another configuration --------------------------------------------------------------------

    async def apply_config(self, loaded: loader.LoadedConfig) -> None:
        """Serve this configuration from now on.

        What is new is started, warmed and bound before a request comes to it, and what runs keeps
        what it began with. Raises ConfigError, having changed nothing.
        """
        if wrong := [*listeners.restart_required(self._current.config, loaded.config)]:
            raise loaded.build_error(*wrong)
        trust = build_tls_contexts(loaded.config)
        now = ConfigSnapshot(loaded.config, self._services, loaded.hash, former=self._current)
        new = {
            listener_id: self._make_listener(now, listener_id)
            for listener_id in now.handlers.keys() - self.listeners
        }
        try:
            await self._warm_backends(now, loaded)
            await self._bind_new_listeners(new, trust, loaded)
            if self._process_group is not None:
                await self._process_group.confirm_reload()
        except BaseException:
            await asyncio.gather(*(front.close() for front in new.values()))
            await asyncio.gather(*(one.aclose() for one in self._find_new_backends(now).values()))
            raise
        self._swap_snapshot(now, new, trust)

    async def _warm_backends(self, now: ConfigSnapshot, loaded: loader.LoadedConfig) -> None:
        """Start the backends that are new, and let them get ready. Raises ConfigError."""
        added, within = self._find_new_backends(now), now.config.limits.warm
        whys = await asyncio.gather(
            *(warm_backend(name, one, within) for name, one in added.items())
        )
        said = zip(added, whys, strict=True)
        wrong = [(("backends", name), f"it can't be used: {why}") for name, why in said if why]
        if wrong:
            raise loaded.build_error(*wrong)

    async def _bind_new_listeners(
        self,
        new: Mapping[listeners.ListenerId, Listener],
        trust: TlsContexts,
        loaded: loader.LoadedConfig,
    ) -> None:
        """Bind the listeners that are new. Raises ConfigError."""
        for number, (listener_id, listener) in enumerate(
            listeners.listeners_by_id(loaded.config).items()
        ):
            if listener_id not in new:
                continue
            try:
                self.listener_urls[listener_id] = await self._bind_listener(
                    new[listener_id], listener, trust[listener_id]
                )
            except OSError as error:
                why = f"the gateway can't listen there: {error.strerror or error}"
                raise loaded.build_error((("listeners", number, "address"), why)) from None
            log.info("listening on %s", self.listener_urls[listener_id])

    async def _bind_listener(
        self,
        front: Listener,
        listener: schema.ListenerConfig,
        tls: ssl.SSLContext | None,
        given: Sequence[socket.socket] = (),
    ) -> str:
        return await bind_listener(
            front, listener, tls, reuse_port=self._process_group is not None, given=given
        )

    def _find_new_backends(self, now: ConfigSnapshot) -> Mapping[str, Backend]:
        """The backends that are not those of the configuration before."""
        here = {id(one) for one in self.backends.values()}
        return {name: one for name, one in now.backends.items() if id(one) not in here}

    def _swap_snapshot(
        self, now: ConfigSnapshot, new: Mapping[listeners.ListenerId, Listener], trust: TlsContexts
    ) -> None:
        """From here on requests meet ``now``: nothing is awaited in between."""
        old, self._current = self._current, now
        now.router.ready = not self._is_draining
        self.active_snapshots = [*(one for one in self.active_snapshots if one.running_count), now]
        gone = [
            self.listeners.pop(listener_id)
            for listener_id in old.handlers.keys() - now.handlers.keys()
        ]
        self._closing_listeners += gone
        limits = build_connection_limits(now.config.limits)
        for listener_id, front in self.listeners.items():
            now.handlers[listener_id].adopt_running(old.handlers[listener_id])
            front.handle_request = now.get_handler(listener_id)
            front.set_limits(limits)
            front.set_tls_context(trust[listener_id])
        self.listeners |= new
        self._update_worker_sets()
        if self._admin_server is not None and now.config.admin is not None:
            self._admin_server.set_key(now.config.admin.sha256)
        ended = {
            name: one for name, one in old.backends.items() if one is not now.backends.get(name)
        }
        self._closing_backends += ended.values()
        for name, backend in ended.items():
            for url in backend.manual_workers if isinstance(backend, ManuallyManaged) else ():
                log.warning("%s: what the admin said of %s ends with this reload", name, url)
        retiring = self._retire_backends(list(ended.values()), gone, old.config.limits.drain)
        task = asyncio.get_running_loop().create_task(retiring)
        self._retire_tasks.add(task)
        task.add_done_callback(self._retire_tasks.discard)

    async def _retire_backends(
        self, ended: list[Backend], gone: Sequence[Listener], drain: float
    ) -> None:
        """Let go of these, once the exchanges that they may have are over or had their time."""
        holding = [
            now
            for now in self.active_snapshots
            if now is not self._current and now.has_any_backend(ended)
        ]
        await asyncio.gather(
            self._wait_idle(holding, drain), *(front.drain(drain) for front in gone)
        )
        await asyncio.gather(*(front.close() for front in gone))
        self._closing_listeners = [front for front in self._closing_listeners if front not in gone]
        await asyncio.gather(*(one.aclose() for one in ended))
        self._closing_backends = [one for one in self._closing_backends if one not in ended]
        gc.collect()  # a configuration holds itself, and the collector would let it wait for long

    async def _wait_idle(self, holding: Sequence[ConfigSnapshot], within: float) -> None:
        """Wait for their exchanges and for the shadows of these, so many seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                for one in holding:
                    await one.wait_idle()
                await self._services.shadow_manager.wait_idle()

    # --- parts ------------------------------------------------------------------------------------

    def _make_listener(self, now: ConfigSnapshot, listener_id: listeners.ListenerId) -> Listener:
        kind = load_symbol(
            LISTENER_CLASSES[listeners.listeners_by_id(now.config)[listener_id].front]
        )
        made = cast(
            "Listener",
            kind(now.get_handler(listener_id), build_connection_limits(now.config.limits)),
        )
        made.is_draining = self._is_draining
        return made

    def _update_worker_sets(self) -> None:
        """To the admin, who holds on to the mapping."""
        self._worker_sets.clear()
        self._worker_sets.update(
            {name: one for name, one in self.backends.items() if isinstance(one, WorkerSet)}
        )

    def _make_admin_server(
        self, told: schema.AdminConfig, metrics: "MetricsCollector", filename: str
    ) -> AdminServer:
        clock = self._services.clock
        behind = AdminServices(
            get_unready_reason=lambda: get_unready_reason(self.router, self.backends.values()),
            worker_sets=self._worker_sets,
            render_metrics=metrics.render_page,
            reload_config=(self._process_group or self.reloader).reload if self.reloader else None,
            explain_service=self._explainer,
            status_service=StatusReporter(
                self, filename, RecentStats(metrics.collect_stats, clock), clock
            ),
        )
        return AdminServer(told.address, behind, sha256=told.sha256)


def _ignore_reload(told: ReloadResult) -> None:
    """Nobody counts."""
    del told
