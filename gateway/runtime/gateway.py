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
from asyncio import to_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from msgspec.structs import replace

from backends.interfaces import Backend, SupportsWarmup
from gateway.auth.failed_keys import FailedKeyThrottle
from gateway.config import listeners, loader, schema
from gateway.explain.dry_run import ExplainService
from gateway.explain.explanation_store import ExplainStage, ExplanationStore
from gateway.http_server.listener import Listener
from gateway.http_server.overload import TrustedProxies
from gateway.memory import MemoryBudget
from gateway.observability.access_log import AccessLogWriter
from gateway.observability.record import write_log_line
from gateway.pipeline.answer_judge import JudgeStage
from gateway.pipeline.services import GatewayServices, HandlerSettings
from gateway.pipeline.shadow import ShadowManager, ShadowStage
from gateway.pipeline.state import Stage
from gateway.ratelimit.counters import CounterRegistry
from gateway.ratelimit.leases import LeasedCounter
from gateway.routing.failed_models import list_failed_models, list_loading_models
from gateway.routing.router import Router
from gateway.runtime.build import build_response_store, cap_connections, compute_memory_limit
from gateway.runtime.reload import ConfigSource, Reloader, ReloadResult
from gateway.runtime.rollout import RolloutManager
from gateway.runtime.shared_limits import SharedRateLimits
from gateway.runtime.shutdown import Service, ServiceStack, drain_listeners, drain_snapshots
from gateway.runtime.snapshot import ConfigSnapshot
from gateway.runtime.start_up import TlsContexts, build_tls_contexts, warm_backend
from gateway.runtime.telemetry import (
    set_up_exporters,
    set_up_metrics,
    set_up_process_metrics,
    set_up_recording,
    set_up_usage,
)
from gateway.store.references import ReferenceLoader
from gateway.store.response_store import MemoryResponseStore
from protocols.core.errors import WorkerError

if TYPE_CHECKING:
    from gateway.admin.api import AdminServer
    from gateway.admin.services import WorkerSet
    from gateway.observability.metrics.requests import MetricsCollector
    from gateway.observability.metrics.system import ProcessCollector


ADMIN_LISTENER: Final[listeners.ListenerId] = ("admin", 0)
"""The id of the admin listener."""


class SocketSource(Protocol):
    """Inherited listening sockets."""

    @property
    def has_sockets(self) -> bool:
        """Whether there are any."""

    def take_sockets(self, listener_id: listeners.ListenerId) -> Sequence[socket.socket]:
        """Hand over the sockets of a listener to the caller; empty if it has none."""


log = logging.getLogger("interlingua")

_USAGE_FLUSH_TIMEOUT = 5.0
"""Seconds to write the last usage rows."""
_RECORDING_FLUSH_TIMEOUT = 5.0
"""Seconds to write the last recorded requests."""
_EXPORT_FLUSH_TIMEOUT = 2.0
"""Seconds to export the last traces and metrics."""


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
        failed_keys=FailedKeyThrottle(time.monotonic),
        dropped_counts={} if log is None else {"log_lines": log.count_dropped},
    )


def set_up_response_store(
    config: schema.ResponseStoreConfig,
    services: GatewayServices,
    process_group: "ProcessGroup | None",
) -> GatewayServices:
    """Set up the store of responses, if they are stored. Returns the services."""
    store = build_response_store(config, services.wall_clock)
    if process_group is not None and isinstance(store, MemoryResponseStore):
        log.info(
            "each process stores its own responses; give stored_responses an sqlite file or a "
            "redis server for those of all"
        )
    return replace(services, reference_loader=None if store is None else ReferenceLoader(store))


@runtime_checkable
class ManuallyManaged(Protocol):
    """A backend whose workers the admin API can change."""

    @property
    def manual_workers(self) -> Sequence[str]:
        """The URLs of workers that were added or removed by the admin API."""


def add_stages(services: GatewayServices, explanations: ExplanationStore) -> GatewayServices:
    """The services with the stages of explanations and of shadows, which observe last."""

    def build_explain_stage(router: Router, settings: HandlerSettings) -> Stage:
        return ExplainStage(explanations, router, settings)

    def build_shadow_stage(router: Router, _: HandlerSettings) -> Stage:
        manager, judge = services.shadow_manager, services.answer_judge
        if judge is None:
            return ShadowStage(router, manager)
        reader = JudgeStage(router, judge, services.draw, manager.memory)
        return ShadowStage(router, manager, reader.read_copy)

    factories = (*services.stage_factories, build_explain_stage, build_shadow_stage)
    return replace(services, stage_factories=factories)


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
        services: GatewayServices,
        *,
        origin: ConfigSource | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._process_group = process_group
        self.memory = MemoryBudget(compute_memory_limit(config.limits))
        observe_reload: Callable[[ReloadResult], None] = _ignore_reload
        digest = origin.loaded.hash if origin else ""
        services, self._usage_recorder = set_up_usage(config.observe, services)
        services, self._request_recorder = set_up_recording(services, self.memory)
        services, self._exporters = set_up_exporters(config.observe, services, os.environ)
        services, self._shared_limits = SharedRateLimits.create(
            config.state, services, self._list_leased_counters
        )
        services = set_up_response_store(config.stored_responses, services, process_group)
        metrics: MetricsCollector | None = None
        if config.admin is not None:
            services, metrics, observe_reload = set_up_metrics(
                services, lambda: self.backends, digest
            )
        explanations = ExplanationStore(services.clock, services.draw)
        self._explainer = ExplainService(
            explanations, lambda: self._current.handlers_by_address, services.clock
        )
        self._services = services = add_stages(services, explanations)
        self._current = ConfigSnapshot(config, services, digest)
        self.active_snapshots = [self._current]
        """Snapshots that may have running requests; the last one is current."""
        self.config_data = origin.loaded.data if origin else b""
        """The text that the current configuration was loaded from."""
        self.listener_urls: dict[listeners.ListenerId, str] = {}
        """The URL of each bound listener."""
        self._is_draining = False
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
        self._service_stack = ServiceStack(self._list_services())

    def __repr__(self) -> str:
        state = "draining" if self._is_draining else "serving"
        return f"<Gateway {state}, {[*self.listener_urls.values()]}, {[*self.backends]}>"

    @cached_property
    def _rollouts(self) -> RolloutManager:
        return RolloutManager(lambda: self._current, self._services)

    def _list_services(self) -> Iterator[Service]:
        """What runs beside the listeners, in the order of its start; it stops in reverse order.

        What reports on requests stops after what serves them, and the admin API after the backends
        that it shows.
        """
        recorder, usage, limits = self._request_recorder, self._usage_recorder, self._shared_limits
        yield Service(lambda: to_thread(recorder.close, _RECORDING_FLUSH_TIMEOUT), recorder.start)
        if usage is not None:
            yield Service(lambda: to_thread(usage.close, _USAGE_FLUSH_TIMEOUT), usage.start)
        if self._exporters:
            yield Service(self._close_exporters)
        if (process := self._process_metrics) is not None:
            yield Service(process.stop, process.start)
        if self._admin_server is not None:
            yield Service(self._admin_server.close)  # ``start`` binds it last
        yield Service(self._rollouts.aclose, self._rollouts.start)
        yield Service(self._close_backends, self._start_backends)
        if (loader := self._services.reference_loader) is not None:
            yield Service(loader.store.aclose)
        if limits is not None:
            yield Service(limits.aclose, limits.start)
        yield Service(self._close_snapshot)
        yield Service(self._services.shadow_manager.aclose)
        if (judge := self._services.answer_judge) is not None:
            yield Service(judge.aclose)

    async def _start_backends(self) -> None:
        await asyncio.gather(*(backend.start() for backend in self.backends.values()))

    async def _close_backends(self) -> None:
        backends = (*self.backends.values(), *self._closing_backends)
        await asyncio.gather(*(backend.aclose() for backend in backends))

    async def _close_snapshot(self) -> None:
        await self._current.aclose()

    async def _close_exporters(self) -> None:
        closing = (to_thread(one.close, _EXPORT_FLUSH_TIMEOUT) for one in self._exporters)
        await asyncio.gather(*closing)

    @property
    def backends(self) -> dict[str, Backend]:
        """The current backends by name."""
        return self._current.backends

    @property
    def admin_server(self) -> "AdminServer | None":
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

        With ``warmed``, it returns when all backends have finished their warmup. Until then, the
        listeners refuse what is for a model that is not loaded. Raises OSError, or WorkerError for
        a backend that cannot start.

        Listeners with ``inherited`` sockets use them and bind nothing. Since another process serves
        on them, the backends are warm before; one that can't be loaded is used as it is then.
        """
        await self._service_stack.start()
        if inherited is not None and inherited.has_sockets:
            await self._warm_up(raises=warmed)
        urls = await self._bind_all(inherited)
        if warmed:
            await self._warm_up()
        return urls

    async def _warm_up(self, *, raises: bool = True) -> None:
        """Wait until all backends are warm. Raises WorkerError, if at all, for the first failed."""

        async def warm_up(backend: SupportsWarmup) -> None:
            with suppress(*(() if raises else (WorkerError,))):
                await backend.warm_up()

        backends = [one for one in self.backends.values() if isinstance(one, SupportsWarmup)]
        await asyncio.gather(*map(warm_up, backends))

    def list_loading_models(self) -> Mapping[str, str]:
        """How far each model is that is not loaded yet, by their names."""
        return list_loading_models(self._current.config, self.backends)

    async def _bind_all(self, inherited: SocketSource | None) -> list[str]:
        """Bind all listeners; returns their URLs. Raises OSError."""
        urls = []
        tls_contexts = build_tls_contexts(self._current.config)
        for listener_id, listener_config in listeners.listeners_by_id(self._current.config).items():
            sockets = inherited.take_sockets(listener_id) if inherited else ()
            listener, tls = self.listeners[listener_id], tls_contexts[listener_id]
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

    async def stop(self, *, use_shutdown_delay: bool = False) -> None:
        """Shut down gracefully; see ``gateway.runtime.shutdown``."""
        if self.reloader is not None:
            await self.reloader.aclose()
        for task in self._retire_tasks:
            task.cancel()
        await asyncio.gather(*self._retire_tasks, return_exceptions=True)
        self.set_draining()
        limits = self._current.config.limits
        if use_shutdown_delay:
            await asyncio.sleep(limits.shutdown_delay)
        active_listeners = [*self.listeners.values(), *self._closing_listeners]
        await drain_listeners(active_listeners, self.active_snapshots, limits.drain_timeout)
        await self._service_stack.aclose()

    # --- another configuration --------------------------------------------------------------------

    async def apply_config(self, loaded: loader.LoadedConfig) -> None:
        """Replace the current configuration.

        New backends and listeners are started before they get requests; running requests keep the
        old configuration. Raises ConfigError and changes nothing if the new one cannot be used.
        """
        if issues := [*listeners.restart_required(self._current.config, loaded.config)]:
            raise loaded.build_error(*issues)
        tls_contexts = build_tls_contexts(loaded.config)
        snapshot = ConfigSnapshot(
            loaded.config, self._services, loaded.hash, previous=self._current
        )
        new_listeners = {
            listener_id: self._make_listener(snapshot, listener_id)
            for listener_id in snapshot.handlers.keys() - self.listeners
        }
        try:
            await self._warm_backends(snapshot, loaded)
            await self._bind_new_listeners(new_listeners, tls_contexts, loaded)
            if self._process_group is not None:
                await self._process_group.confirm_reload()
        except BaseException:
            await asyncio.gather(*(listener.close() for listener in new_listeners.values()))
            await asyncio.gather(
                *(one.aclose() for one in self._find_new_backends(snapshot).values())
            )
            raise
        self._swap_snapshot(snapshot, new_listeners, tls_contexts)
        self.config_data = loaded.data

    async def _warm_backends(self, snapshot: ConfigSnapshot, loaded: loader.LoadedConfig) -> None:
        """Start and warm up new backends. Raises ConfigError."""
        added, timeout = self._find_new_backends(snapshot), snapshot.config.limits.warmup_timeout
        errors = await asyncio.gather(
            *(warm_backend(name, one, timeout) for name, one in added.items())
        )
        results = zip(added, errors, strict=True)
        issues = [
            (("backends", name), f"it can't be used: {error}") for name, error in results if error
        ]
        if issues:
            raise loaded.build_error(*issues)

    async def _bind_new_listeners(
        self,
        new_listeners: Mapping[listeners.ListenerId, Listener],
        tls_contexts: TlsContexts,
        loaded: loader.LoadedConfig,
    ) -> None:
        """Bind new listeners. Raises ConfigError."""
        for number, (listener_id, listener_config) in enumerate(
            listeners.listeners_by_id(loaded.config).items()
        ):
            if listener_id not in new_listeners:
                continue
            try:
                self.listener_urls[listener_id] = await self._bind_listener(
                    new_listeners[listener_id], listener_config, tls_contexts[listener_id]
                )
            except OSError as error:
                message = f"the gateway can't listen there: {error.strerror or error}"
                raise loaded.build_error((("listeners", number, "address"), message)) from None
            log.info("listening on %s", self.listener_urls[listener_id])

    async def _bind_listener(
        self,
        listener: Listener,
        listener_config: schema.ListenerConfig,
        tls: ssl.SSLContext | None,
        sockets: Sequence[socket.socket] = (),
    ) -> str:
        """Bind a listener; returns its URL. Raises OSError."""
        host, _, port = listener_config.address.rpartition(":")
        reuse_port = self._process_group is not None
        bound = await listener.listen(
            host.strip("[]"), int(port), tls, reuse_port=reuse_port, sockets=sockets
        )
        return f"{'https' if tls else 'http'}://{host}:{bound}"

    def _find_new_backends(self, snapshot: ConfigSnapshot) -> Mapping[str, Backend]:
        """The backends that the current configuration does not have."""
        current_ids = {id(one) for one in self.backends.values()}
        return {name: one for name, one in snapshot.backends.items() if id(one) not in current_ids}

    def _swap_snapshot(
        self,
        snapshot: ConfigSnapshot,
        new_listeners: Mapping[listeners.ListenerId, Listener],
        tls_contexts: TlsContexts,
    ) -> None:
        """Make ``snapshot`` the current one, atomically for requests."""
        self._rollouts.apply(snapshot.config, snapshot.router)
        previous, self._current = self._current, snapshot
        self._request_recorder.start()
        snapshot.router.ready = not self._is_draining
        self.active_snapshots = [
            *(one for one in self.active_snapshots if one.running_count),
            snapshot,
        ]
        removed_listeners = [
            self.listeners.pop(listener_id)
            for listener_id in previous.handlers.keys() - snapshot.handlers.keys()
        ]
        self._closing_listeners += removed_listeners
        limits = cap_connections(snapshot.config.limits)
        self.memory.limit = compute_memory_limit(snapshot.config.limits)
        for listener_id, listener in self.listeners.items():
            snapshot.handlers[listener_id].adopt_running(previous.handlers[listener_id])
            listener.handle_request = snapshot.get_handler(listener_id)
            listener.set_limits(limits)
            _configure_proxies(listener, snapshot, listener_id)
            listener.set_tls_context(tls_contexts[listener_id])
        self.listeners |= new_listeners
        self._update_worker_sets()
        if self._admin_server is not None and snapshot.config.admin is not None:
            self._admin_server.configure_key(snapshot.config.admin)
        ended_backends = {
            name: one
            for name, one in previous.backends.items()
            if one is not snapshot.backends.get(name)
        }
        self._closing_backends += ended_backends.values()
        for name, backend in ended_backends.items():
            for url in backend.manual_workers if isinstance(backend, ManuallyManaged) else ():
                log.warning("%s: the admin API's change of %s ends with this reload", name, url)
        retiring = self._retire_backends(
            list(ended_backends.values()), removed_listeners, previous.config.limits.drain_timeout
        )
        task = asyncio.get_running_loop().create_task(retiring)
        self._retire_tasks.add(task)
        task.add_done_callback(self._retire_tasks.discard)

    async def _retire_backends(
        self, backends: list[Backend], removed_listeners: Sequence[Listener], drain_timeout: float
    ) -> None:
        """Close backends and listeners when their requests end, or after ``drain`` seconds."""
        snapshots = [
            snapshot
            for snapshot in self.active_snapshots
            if snapshot is not self._current and snapshot.has_any_backend(backends)
        ]
        await asyncio.gather(
            drain_snapshots(snapshots, self._services.list_background(), drain_timeout),
            *(listener.drain(drain_timeout) for listener in removed_listeners),
        )
        await asyncio.gather(*(listener.close() for listener in removed_listeners))
        self._closing_listeners = [
            listener for listener in self._closing_listeners if listener not in removed_listeners
        ]
        await asyncio.gather(*(one.aclose() for one in backends))
        self._closing_backends = [one for one in self._closing_backends if one not in backends]
        gc.collect()  # an old snapshot is a reference cycle

    # --- parts ------------------------------------------------------------------------------------

    def _make_listener(
        self, snapshot: ConfigSnapshot, listener_id: listeners.ListenerId
    ) -> Listener:
        listener = Listener(
            snapshot.get_handler(listener_id),
            cap_connections(snapshot.config.limits),
            self.memory,
        )
        listener.is_draining = self._is_draining
        _configure_proxies(listener, snapshot, listener_id)
        return listener

    def _update_worker_sets(self) -> None:
        """Update the mapping that the admin API shares."""
        if self._current.config.admin is None:
            return
        from gateway.admin.services import WorkerSet  # noqa: PLC0415 - aiohttp takes 10 MB

        self._worker_sets.clear()
        self._worker_sets.update(
            {name: one for name, one in self.backends.items() if isinstance(one, WorkerSet)}
        )

    def _make_admin_server(
        self, config: schema.AdminConfig, metrics: "MetricsCollector", filename: str
    ) -> "AdminServer":
        from gateway.admin.api import AdminServer  # noqa: PLC0415 - as above
        from gateway.admin.evidence import EvidenceService  # noqa: PLC0415 - as above
        from gateway.admin.services import (  # noqa: PLC0415 - as above
            AdminServices,
            get_unready_reason,
        )
        from gateway.admin.status import StatusReporter  # noqa: PLC0415 - as above
        from gateway.admin.usage import UsageApi  # noqa: PLC0415 - as above
        from gateway.evidence.experiments import list_experiments  # noqa: PLC0415 - as above
        from gateway.evidence.rollout_report import list_rollouts  # noqa: PLC0415 - as above
        from gateway.evidence.sources import SEGMENT_LABELS  # noqa: PLC0415 - as above

        self._rollouts.register_metrics(metrics)
        sources = (lambda: self._current.config), self._services.clock

        def list_failed() -> Sequence[str]:
            return list_failed_models(self._current.config, self.backends)

        services = AdminServices(
            get_unready_reason=lambda: get_unready_reason(
                self.router,
                self.backends,
                list_failed() if self._current.config.health == "strict" else (),
            ),
            list_failed_models=list_failed,
            worker_sets=self._worker_sets,
            render_metrics=metrics.render_page,
            reload_config=(self._process_group or self.reloader).reload if self.reloader else None,
            explain_service=self._explainer,
            list_experiments=EvidenceService(
                "experiments", list_experiments, *sources, {"by": SEGMENT_LABELS}
            ).handle,
            list_rollouts=EvidenceService("rollouts", list_rollouts, *sources, max_age=1.0).handle,
            list_listener_urls=lambda: [*self.listener_urls.values()],
            usage_api=UsageApi(lambda: self._current.config.observe, self._services.wall_clock),
            status_service=StatusReporter(self, filename, metrics, self._services.clock),
        )
        return AdminServer(config, services)


def _configure_proxies(
    listener: Listener, snapshot: ConfigSnapshot, listener_id: listeners.ListenerId
) -> None:
    """Set which proxies name the clients of a listener's new connections."""
    config = listeners.listeners_by_id(snapshot.config)[listener_id]
    trusted = TrustedProxies(config.trusted_proxies)
    listener.set_proxies(trusted, requires_header=config.proxy_protocol is not None)


def _ignore_reload(result: ReloadResult) -> None:
    """Do nothing: metrics are off."""
    del result
