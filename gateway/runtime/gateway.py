"""The running gateway: starts, reloads, drains and stops listeners and backends."""

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
from gateway.http_server.overload import BodyBudget
from gateway.observability.access_log import AccessLogWriter
from gateway.observability.record import write_log_line
from gateway.pipeline.handler import GatewayServices
from gateway.pipeline.shadow import ShadowManager
from gateway.ratelimit.limiter import CounterRegistry
from gateway.ratelimit.redis_limiter import LeasedCounter, LeaseRenewer
from gateway.routing.router import Router
from gateway.runtime.build import build_connection_limits, compute_body_budget, load_symbol
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


# Backends and listeners must be ready before requests arrive.

TlsContexts = Mapping[listeners.ListenerId, ssl.SSLContext | None]
"""The TLS context of each listener; None without TLS."""
ADMIN_LISTENER: Final[listeners.ListenerId] = ("admin", 0)
"""The id of the admin listener."""


class SocketSource(Protocol):
    """Inherited listening sockets."""

    def take_sockets(self, listener_id: listeners.ListenerId) -> Sequence[socket.socket]:
        """Hand over the sockets of a listener to the caller; empty if it has none."""


async def warm_backend(name: str, backend: Backend, within: float) -> str:
    """Start a backend and warm it up for at most ``within`` seconds; returns the error or ""."""
    try:
        await backend.start()
        async with asyncio.timeout(within):
            if isinstance(backend, SupportsWarmup):
                await backend.warm_up()
    except TimeoutError:
        log.warning("%s is not ready after %g s and is used as it is", name, within)
    except WorkerError as error:
        return error.message
    return ""


async def bind_listener(
    listener: Listener,
    listener_config: schema.ListenerConfig,
    tls: ssl.SSLContext | None,
    *,
    reuse_port: bool,
    given: Sequence[socket.socket] = (),
) -> str:
    """Bind a listener; returns its URL. Raises OSError."""
    host, _, port = listener_config.address.rpartition(":")
    bound = await listener.listen(
        host.strip("[]"), int(port), tls, reuse_port=reuse_port, given=given
    )
    return f"{'https' if tls else 'http'}://{host}:{bound}"


def build_tls_contexts(config: schema.Config) -> TlsContexts:
    """Load the certificates of all listeners. Raises OSError."""
    return {
        listener_id: server_tls_context(listener.tls) if listener.tls else None
        for listener_id, listener in listeners.listeners_by_id(config).items()
    }


def server_tls_context(tls: schema.TlsConfig) -> ssl.SSLContext:
    """Create a TLS context. Raises OSError for unusable certificate or key files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(
        tls.cert, tls.key, password=str
    )  # otherwise OpenSSL asks for a password on the terminal
    return context


# Rate limits shared by several gateways.


class SharedRateLimits:
    """The lease store, and the task that renews leases in the background."""

    def __init__(self, store: "RedisLeaseStore", renewer: LeaseRenewer) -> None:
        self._store = store
        self._renewer = renewer

    @classmethod
    def create(
        cls,
        state: schema.SharedStateConfig | None,
        outside: GatewayServices,
        get_counters: Callable[[], Sequence[LeasedCounter]],
    ) -> tuple[GatewayServices, Self | None]:
        """Set up shared limits, if configured. Returns the services and the shared limits.

        ``get_counters`` gives the leased counters of the current configuration.
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
        wake = asyncio.Event()
        renewer = LeaseRenewer(store, get_counters, wake, outside.clock, outside.draw)
        registry = CounterRegistry(outside.clock, outside.wall_clock, store, wake.set)
        return replace(outside, counter_registry=registry), cls(store, renewer)

    def register_metrics(self, metrics: "MetricsCollector") -> None:
        """Add the metrics of the store."""
        from gateway.observability.metrics.system import RateLimitStoreCollector  # noqa: PLC0415 - its library

        metrics.register(RateLimitStoreCollector(self._store))

    def start(self) -> None:
        """Start renewing leases."""
        self._renewer.start()

    async def aclose(self) -> None:
        """Report usage, return the leases and close the store."""
        await self._renewer.aclose()
        await self._store.aclose()


log = logging.getLogger("interlingua")

_USAGE_FLUSH_TIMEOUT = 5.0
"""Seconds to write the last usage rows."""
_EXPORT_FLUSH_TIMEOUT = 2.0
"""Seconds to export the last traces and metrics."""
_ERROR_FLUSH_TIMEOUT = 1.0
"""Seconds to send errors to clients whose requests are stopped."""


def build_services(log: AccessLogWriter | None = None) -> GatewayServices:
    """Build services with the real clocks, random numbers and unique request ids.

    Without ``log``, records go to standard error directly.
    """
    observe_request = write_log_line if log is None else log.write_record
    start = os.urandom(8).hex()
    ids = (f"{start}{number:08x}" for number in itertools.count())
    return GatewayServices(
        clock=time.monotonic,
        wall_clock=time.time,  # noqa: TID251 - here it is passed in
        new_id=ids.__next__,
        draw=random.random,  # noqa: TID251 - as above
        observe_request=observe_request,
        shadow_manager=ShadowManager(time.monotonic, observe_request),
        counter_registry=CounterRegistry(time.monotonic, time.time),  # noqa: TID251 - as above
        dropped_counts={} if log is None else {"log_lines": log.count_dropped},
    )


@runtime_checkable
class ManuallyManaged(Protocol):
    """A backend whose workers the admin API can change."""

    @property
    def manual_workers(self) -> Sequence[str]:
        """The URLs of workers that were added or removed by the admin API."""


class ProcessGroup(Protocol):
    """The group of serving processes that share listeners."""

    @property
    def admin_socket(self) -> str:
        """The path of the Unix socket that replaces the admin listener in this process."""

    async def confirm_reload(self) -> None:
        """Wait until all processes have prepared the reload. Raises if one of them cannot."""

    async def reload(self) -> ReloadResult:
        """Reload all processes."""


class Gateway:
    """A running gateway: listeners, router and backends of the current configuration.

    ``origin`` allows reloads. With ``process_group``, the gateway shares its listeners with other
    processes and reloads together with them.
    """

    def __init__(
        self,
        config: schema.Config,
        outside: GatewayServices,
        *,
        origin: ConfigSource | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._process_group = process_group
        observe_reload: Callable[[ReloadResult], None] = _ignore_reload
        digest = origin.loaded.hash if origin else ""
        outside, self._usage_recorder = set_up_usage(config.observe.usage, outside)
        outside, self._exporters = set_up_exporters(config.observe, outside, os.environ)
        outside, self._shared_limits = SharedRateLimits.create(
            config.state, outside, self._list_leased_counters
        )
        metrics: MetricsCollector | None = None
        if config.admin is not None:
            outside, metrics, observe_reload = set_up_metrics(
                outside, lambda: self.backends, digest
            )
        explained = ExplanationStore(outside.clock, outside.draw)
        self._explainer = ExplainService(
            explained, lambda: self._current.handlers_by_address, outside.clock
        )
        self._services = outside = replace(outside, explain_policy=explained.create_recorder)
        self._current = ConfigSnapshot(config, outside, digest)
        self.active_snapshots = [self._current]
        """Snapshots that may have running requests; the last one is current."""
        self.listener_urls: dict[listeners.ListenerId, str] = {}
        """The URL of each bound listener."""
        self._is_draining = False
        self._body_budget = BodyBudget(compute_body_budget(config.limits))
        self._retire_tasks: set[asyncio.Task[None]] = set()
        self._closing_backends: list[Backend] = []
        self._closing_listeners: list[Listener] = []
        self.listeners = {
            listener_id: self._make_listener(self._current, listener_id)
            for listener_id in self._current.handlers
        }
        self.reloader = (
            None if origin is None else Reloader(origin, self.apply_config, observe_reload)
        )
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
        """The current backends by name."""
        return self._current.backends

    @property
    def admin_server(self) -> AdminServer | None:
        """The admin listener, if there is one."""
        return self._admin_server

    def _list_leased_counters(self) -> Sequence[LeasedCounter]:
        """The leased counters of the current rate limiter."""
        limiter = self._current.rate_limiter
        return () if limiter is None else limiter.leased_counters

    @property
    def router(self) -> Router:
        """The current router."""
        return self._current.router

    async def start(
        self, inherited: SocketSource | None = None, *, warmed: bool = False
    ) -> list[str]:
        """Start the backends and bind the listeners; returns the URLs, the admin listener's last.

        Listeners with ``inherited`` sockets use them and bind nothing. With ``warmed``, all
        backends finish their warmup before a listener is bound. Raises OSError, or WorkerError for
        a backend that cannot start.
        """
        if self._usage_recorder is not None:
            self._usage_recorder.start()
        for exporter in self._exporters:
            exporter.start()
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
        for listener_id, listener_config in listeners.listeners_by_id(self._current.config).items():
            sockets = inherited.take_sockets(listener_id) if inherited else ()
            listener, tls = self.listeners[listener_id], trust[listener_id]
            self.listener_urls[listener_id] = await self._bind_listener(
                listener, listener_config, tls, sockets
            )
            urls.append(self.listener_urls[listener_id])
        if self._admin_server is not None:
            sockets = inherited.take_sockets(ADMIN_LISTENER) if inherited else ()
            path = self._process_group.admin_socket if self._process_group else ""
            urls.append(await self._admin_server.listen(path, sockets))
        return urls

    @property
    def socket_fds(self) -> Mapping[listeners.ListenerId, Sequence[int]]:
        """The file descriptors of all listening sockets."""
        fds = {listener_id: listener.socket_fds for listener_id, listener in self.listeners.items()}
        return (
            fds
            if self._admin_server is None
            else {**fds, ADMIN_LISTENER: self._admin_server.socket_fds}
        )

    def stop_accepting(self) -> None:
        """Accept no more connections; open connections stay."""
        for listener in self.listeners.values():
            listener.stop_accepting()
        if self._admin_server is not None:
            self._admin_server.stop_accepting()

    def set_draining(self, *, on: bool = True) -> None:
        """Start or stop draining: readiness fails, and responses close their connections.

        Requests are still answered. A reload does not change it.
        """
        self._is_draining = on
        self.router.ready = not on
        for listener in self.listeners.values():
            listener.is_draining = on

    async def stop(self, *, lame_duck: bool = False) -> None:
        """Stop gracefully: accept no more connections, finish running requests, close everything.

        With ``lame_duck``, the gateway first drains for the configured shutdown delay. Requests
        that outlast the drain timeout get an error.
        """
        if self.reloader is not None:
            await self.reloader.aclose()
        for task in self._retire_tasks:
            task.cancel()
        await asyncio.gather(*self._retire_tasks, return_exceptions=True)
        self.set_draining()
        limits = self._current.config.limits
        if lame_duck:
            await asyncio.sleep(limits.shutdown_delay)
        active_listeners = [*self.listeners.values(), *self._closing_listeners]
        await asyncio.gather(
            *(listener.drain(limits.drain_timeout) for listener in active_listeners)
        )
        for one in self.active_snapshots:
            one.stop_requests(Overloaded("the gateway stops"))
        await asyncio.gather(
            *(listener.drain(_ERROR_FLUSH_TIMEOUT) for listener in active_listeners)
        )
        await asyncio.gather(*(listener.close() for listener in active_listeners))
        await self._services.shadow_manager.aclose()
        await self._current.aclose()
        if self._shared_limits is not None:
            await self._shared_limits.aclose()
        backends = (*self.backends.values(), *self._closing_backends)
        await asyncio.gather(*(backend.aclose() for backend in backends))
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
        """Replace the current configuration.

        New backends and listeners are started before they get requests; running requests keep the
        old configuration. Raises ConfigError and changes nothing if the new one cannot be used.
        """
        if wrong := [*listeners.restart_required(self._current.config, loaded.config)]:
            raise loaded.build_error(*wrong)
        trust = build_tls_contexts(loaded.config)
        now = ConfigSnapshot(loaded.config, self._services, loaded.hash, previous=self._current)
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
            await asyncio.gather(*(listener.close() for listener in new.values()))
            await asyncio.gather(*(one.aclose() for one in self._find_new_backends(now).values()))
            raise
        self._swap_snapshot(now, new, trust)

    async def _warm_backends(self, now: ConfigSnapshot, loaded: loader.LoadedConfig) -> None:
        """Start and warm up new backends. Raises ConfigError."""
        added, within = self._find_new_backends(now), now.config.limits.warmup_timeout
        errors = await asyncio.gather(
            *(warm_backend(name, one, within) for name, one in added.items())
        )
        results = zip(added, errors, strict=True)
        wrong = [
            (("backends", name), f"it can't be used: {error}") for name, error in results if error
        ]
        if wrong:
            raise loaded.build_error(*wrong)

    async def _bind_new_listeners(
        self,
        new: Mapping[listeners.ListenerId, Listener],
        trust: TlsContexts,
        loaded: loader.LoadedConfig,
    ) -> None:
        """Bind new listeners. Raises ConfigError."""
        for number, (listener_id, listener_config) in enumerate(
            listeners.listeners_by_id(loaded.config).items()
        ):
            if listener_id not in new:
                continue
            try:
                self.listener_urls[listener_id] = await self._bind_listener(
                    new[listener_id], listener_config, trust[listener_id]
                )
            except OSError as error:
                why = f"the gateway can't listen there: {error.strerror or error}"
                raise loaded.build_error((("listeners", number, "address"), why)) from None
            log.info("listening on %s", self.listener_urls[listener_id])

    async def _bind_listener(
        self,
        listener: Listener,
        listener_config: schema.ListenerConfig,
        tls: ssl.SSLContext | None,
        given: Sequence[socket.socket] = (),
    ) -> str:
        return await bind_listener(
            listener, listener_config, tls, reuse_port=self._process_group is not None, given=given
        )

    def _find_new_backends(self, now: ConfigSnapshot) -> Mapping[str, Backend]:
        """The backends that the current configuration does not have."""
        here = {id(one) for one in self.backends.values()}
        return {name: one for name, one in now.backends.items() if id(one) not in here}

    def _swap_snapshot(
        self, now: ConfigSnapshot, new: Mapping[listeners.ListenerId, Listener], trust: TlsContexts
    ) -> None:
        """Make ``now`` the current snapshot, atomically for requests."""
        old, self._current = self._current, now
        now.router.ready = not self._is_draining
        self.active_snapshots = [*(one for one in self.active_snapshots if one.running_count), now]
        gone = [
            self.listeners.pop(listener_id)
            for listener_id in old.handlers.keys() - now.handlers.keys()
        ]
        self._closing_listeners += gone
        limits = build_connection_limits(now.config.limits)
        self._body_budget.limit = compute_body_budget(now.config.limits)
        for listener_id, listener in self.listeners.items():
            now.handlers[listener_id].adopt_running(old.handlers[listener_id])
            listener.handle_request = now.get_handler(listener_id)
            listener.set_limits(limits)
            listener.set_tls_context(trust[listener_id])
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
                log.warning("%s: the admin API's change of %s ends with this reload", name, url)
        retiring = self._retire_backends(
            list(ended.values()), gone, old.config.limits.drain_timeout
        )
        task = asyncio.get_running_loop().create_task(retiring)
        self._retire_tasks.add(task)
        task.add_done_callback(self._retire_tasks.discard)

    async def _retire_backends(
        self, ended: list[Backend], gone: Sequence[Listener], drain: float
    ) -> None:
        """Close backends and listeners when their requests end, or after ``drain`` seconds."""
        holding = [
            now
            for now in self.active_snapshots
            if now is not self._current and now.has_any_backend(ended)
        ]
        await asyncio.gather(
            self._wait_idle(holding, drain), *(listener.drain(drain) for listener in gone)
        )
        await asyncio.gather(*(listener.close() for listener in gone))
        self._closing_listeners = [
            listener for listener in self._closing_listeners if listener not in gone
        ]
        await asyncio.gather(*(one.aclose() for one in ended))
        self._closing_backends = [one for one in self._closing_backends if one not in ended]
        gc.collect()  # an old snapshot is a reference cycle

    async def _wait_idle(self, holding: Sequence[ConfigSnapshot], within: float) -> None:
        """Wait for the requests of these snapshots and their shadow traffic, ``within`` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                for one in holding:
                    await one.wait_idle()
                await self._services.shadow_manager.wait_idle()

    # --- parts ------------------------------------------------------------------------------------

    def _make_listener(self, now: ConfigSnapshot, listener_id: listeners.ListenerId) -> Listener:
        kind = load_symbol(
            LISTENER_CLASSES[listeners.listeners_by_id(now.config)[listener_id].http_server]
        )
        made = cast(
            "Listener",
            kind(
                now.get_handler(listener_id),
                build_connection_limits(now.config.limits),
                self._body_budget,
            ),
        )
        made.is_draining = self._is_draining
        return made

    def _update_worker_sets(self) -> None:
        """Update the mapping that the admin API shares."""
        self._worker_sets.clear()
        self._worker_sets.update(
            {name: one for name, one in self.backends.items() if isinstance(one, WorkerSet)}
        )

    def _make_admin_server(
        self, config: schema.AdminConfig, metrics: "MetricsCollector", filename: str
    ) -> AdminServer:
        clock = self._services.clock
        services = AdminServices(
            get_unready_reason=lambda: get_unready_reason(self.router, self.backends.values()),
            worker_sets=self._worker_sets,
            render_metrics=metrics.render_page,
            reload_config=(self._process_group or self.reloader).reload if self.reloader else None,
            explain_service=self._explainer,
            status_service=StatusReporter(
                self, filename, RecentStats(metrics.collect_stats, clock), clock
            ),
        )
        return AdminServer(config.address, services, sha256=config.sha256)


def _ignore_reload(result: ReloadResult) -> None:
    """Do nothing: metrics are off."""
    del result
