"""The supervisor of the serving processes: starts, restarts, reloads and stops them.

It loads the configuration, reserves the ports and runs the admin listener, but serves no requests.
"""

import asyncio
import logging
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backends.log_format import LogFormat, format_notice
from gateway.config import listeners
from gateway.config.errors import ConfigError, ConfigIssue
from gateway.config.loader import LoadedConfig
from gateway.config.source import ConfigReader, ConfigText
from gateway.multiprocess.ipc import (
    CommitReload,
    ListenerPort,
    PrepareReload,
    ReloadPrepared,
    StartCommand,
)
from gateway.multiprocess.partition import ListenerPorts, find_unpartitionable
from gateway.multiprocess.serving_process import ServingProcess
from gateway.observability.metrics.reloads import ReloadCollector
from gateway.observability.metrics.system import PROCESS_RESTARTS, SERVING_PROCESSES
from gateway.runtime.reload import ConfigSource, Reloader, ReloadTrigger
from gateway.runtime.shutdown import SHUTDOWN_MESSAGE
from gateway.terminal import print_text

if TYPE_CHECKING:
    from gateway.multiprocess.admin_proxy import AdminProxy

# Reservation of the ports that all processes bind.


class PortReservations:
    """Reserves each listener's port with a bound socket that does not listen."""

    def __init__(self) -> None:
        self._sockets: dict[listeners.ListenerId, socket.socket] = {}

    @property
    def ports(self) -> ListenerPorts:
        """The reserved ports."""
        return {listener_id: one.getsockname()[1] for listener_id, one in self._sockets.items()}

    def reserve(self, listener_id: listeners.ListenerId) -> None:
        """Reserve a listener's port; 0 is any free port. Raises OSError."""
        host, _, port = listener_id[0].rpartition(":")
        self._sockets[listener_id] = _reserve_port(host.strip("[]"), int(port))

    def release_others(self, listener_ids: frozenset[listeners.ListenerId]) -> None:
        """Release the ports of all other listeners."""
        for listener_id in self._sockets.keys() - listener_ids:
            self._sockets.pop(listener_id).close()


def _reserve_port(host: str, port: int) -> socket.socket:
    """Bind a socket. Raises OSError, also if another gateway's processes share the port."""
    candidates = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, address = socket.AddressFamily(candidates[0][0]), candidates[0][4]
    with _create_socket(family) as exclusive:
        exclusive.bind(address)
        address = exclusive.getsockname()
    shared = _create_socket(family)
    shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    shared.bind(address)
    return shared


def _create_socket(family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


log = logging.getLogger("interlingua")

_MAX_START_FAILURES: Final = 5
"""The supervisor gives up after so many failed starts in a row if no process serves."""
_MIN_RESTART_DELAY: Final = 0.1
_MAX_RESTART_DELAY: Final = 30.0
"""Seconds before a restart: the first delay and the longest."""
_STABLE_AFTER: Final = 10.0
"""Seconds after which a process counts as stable, which resets the delay."""
_RELOAD_GRACE: Final = 5.0
"""Seconds for a reload, in addition to the warmup of backends."""


class ServePlan(Struct, frozen=True):
    """The initial configuration, its reader, the number of processes and the watched file.

    ``polls_reader``: the reader is asked now and then whether the configuration has changed.
    ``admin_key`` is shown in the web UI's URL.
    """

    initial_config: LoadedConfig
    config_reader: ConfigReader
    process_count: int
    watched_file: str | None = None
    log_level: str = "INFO"
    log_format: LogFormat = "json"
    polls_reader: bool = False
    admin_key: str | None = None


class Supervisor(Collector):
    """Supervises the serving processes of a plan."""

    def __init__(self, plan: ServePlan, folder: str) -> None:
        """``folder`` is a private directory for the processes' admin sockets."""
        self._plan = plan
        self._folder = Path(folder)
        self._loaded_config, self._config_text = plan.initial_config, plan.config_reader.last_text
        self._ports = PortReservations()
        self._processes: list[ServingProcess] = []
        self._spawn_count = self._start_failures = 0
        self._lock = asyncio.Lock()
        """Held while a process starts or the configuration changes."""
        self._stop_event = asyncio.Event()
        self._failure_reason = ""
        """Why the supervisor gives up, or ""."""
        self._tasks = asyncio.TaskGroup()
        reloads = ReloadCollector(plan.initial_config.hash, time.time)  # noqa: TID251 - here it is passed in
        self._reloader = Reloader(
            ConfigSource(plan.initial_config, plan.config_reader),
            self._apply_config,
            reloads.record_reload,
        )
        registry = CollectorRegistry(auto_describe=False)
        registry.register(reloads)
        registry.register(self)
        admin = plan.initial_config.config.admin
        self._admin_proxy = (
            None
            if admin is None
            else self._create_admin_proxy(admin.address, partial(generate_latest, registry))
        )

    def _create_admin_proxy(
        self, address: str, render_metrics: Callable[[], bytes]
    ) -> "AdminProxy":
        from gateway.multiprocess.admin_proxy import AdminProxy  # noqa: PLC0415 - aiohttp takes 10 MB

        return AdminProxy(address, self._list_serving, render_metrics, self._describe_config)

    async def run(self) -> int:
        """Serve until stopped; returns the exit code."""
        plan = self._plan
        has_changed = plan.config_reader.has_changed if plan.polls_reader else None
        trigger = ReloadTrigger(self._reloader, plan.watched_file, has_changed)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._handle_signal, name)
        loop.add_signal_handler(signal.SIGHUP, trigger.reload_requested.set)
        async with self._tasks:
            await self._start_all()
            tasks = [self._tasks.create_task(trigger.run())]
            tasks += [self._tasks.create_task(self._keep_running(one)) for one in self._processes]
            await self._stop_event.wait()
            for task in tasks:
                task.cancel()
            await self._wait_closed()
        if self._failure_reason:
            self._print(f"interlingua can't serve: {self._failure_reason}", logging.ERROR)
        return 1 if self._failure_reason else 0

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        serving = len(self._list_serving())
        yield SERVING_PROCESSES.build_family([((), serving)])
        yield PROCESS_RESTARTS.build_family(
            [((), max(0, self._spawn_count - self._plan.process_count))]
        )

    async def _describe_config(self) -> object:
        from gateway.admin.config_view import describe_config  # noqa: PLC0415 - as above

        loaded = self._loaded_config
        return await describe_config(loaded.config, loaded.hash, loaded.filename, loaded.data)

    def _list_serving(self) -> list[ServingProcess]:
        return [one for one in self._processes if one.ready_message is not None]

    # --- start and stop ---------------------------------------------------------------------------

    async def _start_all(self) -> None:
        """Start all processes and the admin listener."""
        try:
            for listener_id in listeners.listeners_by_id(self._loaded_config.config):
                self._ports.reserve(listener_id)
            errors = await asyncio.gather(
                *(self._spawn_process() for _ in range(self._plan.process_count))
            )
            if reason := next(filter(None, errors), ""):
                self._fail(reason)
                return
            urls = [*self._get_urls()]
            if self._admin_proxy is not None:
                urls.append(await self._admin_proxy.listen())
        except OSError as error:
            self._fail(str(error))
            return
        models = next(
            (one.ready_message.models for one in self._processes if one.ready_message), ()
        )
        serving = listeners.describe_serving(models, urls)
        lines = [f"{serving} ({self._plan.process_count} processes)"]
        if self._admin_proxy is not None:
            lines.append(f"web UI: {listeners.build_ui_url(urls[-1], self._plan.admin_key)}")
        self._print("\n".join(lines))

    async def _wait_closed(self) -> None:
        """Wait until all processes have exited."""
        await self._reloader.aclose()
        await asyncio.gather(*(one.wait_exit() for one in self._processes))
        if self._admin_proxy is not None:
            await self._admin_proxy.close()
        self._ports.release_others(frozenset())

    def _print(self, text: str, level: int = logging.INFO) -> None:
        print_text(format_notice(text, self._plan.log_format, level), err=True)

    def _fail(self, reason: str) -> None:
        if not self._stop_event.is_set():
            self._failure_reason = reason
            self._signal_all(signal.SIGINT)

    def _handle_signal(self, name: signal.Signals) -> None:
        """Stop gracefully; a second signal stops at once."""
        if not self._stop_event.is_set():
            self._print(SHUTDOWN_MESSAGE)
            self._signal_all(name)
            return
        for one in self._processes:
            one.send_signal(signal.SIGKILL)
        signal.signal(name, signal.SIG_DFL)
        signal.raise_signal(name)

    def _signal_all(self, name: signal.Signals) -> None:
        """Stop all processes gracefully. Sent only once: a second signal would kill them."""
        self._stop_event.set()
        for one in self._processes:
            one.send_signal(name)

    def _get_urls(self) -> Sequence[str]:
        return next((one.ready_message.urls for one in self._processes if one.ready_message), ())

    # --- each process -----------------------------------------------------------------------------

    async def _spawn_process(self) -> str:
        """Start a process; returns the error, or ""."""
        self._spawn_count += 1
        admin = "" if self._admin_proxy is None else str(self._folder / str(self._spawn_count))
        draining = self._admin_proxy is not None and self._admin_proxy.draining
        process = await ServingProcess.spawn(admin)
        self._processes.append(process)
        self._tasks.create_task(process.read_messages(self._reloader.reload))
        count, level = self._plan.process_count, self._plan.log_level
        command = StartCommand(self._config_text, count, self._list_ports(), admin, level, draining)
        if self._stop_event.is_set():
            process.send_signal(signal.SIGTERM)
        return await process.start_serving(command)

    async def _keep_running(self, process: ServingProcess) -> None:
        """Restart a process whenever it ends."""
        loop = asyncio.get_running_loop()
        delay = _MIN_RESTART_DELAY
        while True:
            started_at = loop.time()
            end = await process.wait_exit()
            self._processes.remove(process)
            if self._admin_proxy is not None:
                self._admin_proxy.forget_process(process)
            delay = (
                _MIN_RESTART_DELAY
                if loop.time() - started_at > _STABLE_AFTER
                else min(2 * delay, _MAX_RESTART_DELAY)
            )
            log.error("a process ended with %s; restarting it in %g s", end, delay)
            await asyncio.sleep(delay)
            async with self._lock:
                error = await self._spawn_process()
            process = self._processes[-1]
            self._start_failures = self._start_failures + 1 if error else 0
            if error:
                log.error("a process cannot start: %s", error)
            if self._start_failures >= _MAX_START_FAILURES and not self._list_serving():
                self._fail(f"no process is left; the last error: {error}")

    # --- another configuration --------------------------------------------------------------------

    async def _apply_config(self, loaded: LoadedConfig) -> None:
        """Apply a configuration in all processes. Raises ConfigError and changes nothing."""
        if conflicts := [
            *listeners.restart_required(self._loaded_config.config, loaded.config),
            *find_unpartitionable(loaded.config),
        ]:
            raise loaded.build_error(*conflicts)
        async with self._lock:
            self._reserve_ports(loaded)
            text = self._plan.config_reader.last_text
            issues = await self._commit_reload(
                text, loaded.config.limits.warmup_timeout + _RELOAD_GRACE
            )
            if issues:
                self._ports.release_others(
                    frozenset(listeners.listeners_by_id(self._loaded_config.config))
                )
                raise ConfigError(loaded.filename, issues, loaded.files)
            self._loaded_config, self._config_text = loaded, text
            self._ports.release_others(frozenset(listeners.listeners_by_id(loaded.config)))

    def _reserve_ports(self, loaded: LoadedConfig) -> None:
        """Reserve new ports. Raises ConfigError."""
        for number, listener_id in enumerate(listeners.listeners_by_id(loaded.config)):
            if listener_id in self._ports.ports:
                continue
            try:
                self._ports.reserve(listener_id)
            except OSError as error:
                self._ports.release_others(
                    frozenset(listeners.listeners_by_id(self._loaded_config.config))
                )
                message = f"the gateway can't listen there: {error.strerror or error}"
                raise loaded.build_error((("listeners", number, "address"), message)) from None

    async def _commit_reload(self, text: ConfigText, within: float) -> Sequence[ConfigIssue]:
        """Prepare in all processes and commit if all can; returns the issues otherwise."""
        serving = self._list_serving()
        prepare = PrepareReload(text, self._list_ports())
        replies = await asyncio.gather(*(one.send_request(prepare, within) for one in serving))
        prepared_processes = {
            one: reply
            for one, reply in zip(serving, replies, strict=True)
            if isinstance(reply, ReloadPrepared)
        }
        issues = next((reply.issues for reply in prepared_processes.values() if reply.issues), ())
        ready = [one for one, reply in prepared_processes.items() if not reply.issues]
        decision = CommitReload(not issues)
        await asyncio.gather(*(one.send_request(decision, _RELOAD_GRACE) for one in ready))
        return issues

    def _list_ports(self) -> Sequence[ListenerPort]:
        return [ListenerPort(*listener_id, port) for listener_id, port in self._ports.ports.items()]


def run_supervisor(plan: ServePlan) -> int:
    """Run the plan until stopped; returns the exit code."""
    if issues := [*find_unpartitionable(plan.initial_config.config)]:
        print_text(str(plan.initial_config.build_error(*issues)), err=True)
        return 1
    with tempfile.TemporaryDirectory(prefix="interlingua") as folder:
        return asyncio.run(Supervisor(plan, folder).run())
