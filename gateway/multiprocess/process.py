"""One of several serving processes, controlled by the supervisor.

    python -m gateway.multiprocess.process DESCRIPTOR

The descriptor is its end of the socket pair. If the other end closes, the process shuts down
gracefully, as it does on SIGTERM.
"""

import asyncio
import gc
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from backends.background_call import BackgroundCall
from backends.log_format import configure_logging, inherit_log_format
from gateway.config.errors import DOCUMENT_START, ConfigError, ConfigIssue
from gateway.config.loader import LoadedConfig
from gateway.config.source import ConfigText
from gateway.multiprocess.ipc import (
    CommitReload,
    IpcChannel,
    ListenerPort,
    PrepareReload,
    ProcessFailed,
    ProcessReady,
    ReloadDone,
    ReloadPrepared,
    ReloadReply,
    ReloadRequest,
    StartCommand,
)
from gateway.multiprocess.partition import partition_config
from gateway.observability.access_log import AccessLogWriter, open_access_log
from gateway.runtime.gateway import Gateway, build_services
from gateway.runtime.process import get_loop_factory, raise_fd_limit, tune_interpreter
from gateway.runtime.reload import ConfigSource, ReloadResult
from gateway.runtime.shutdown import ShutdownSignal
from protocols.core.errors import WorkerError

log = logging.getLogger("interlingua")


class _ReloadAborted(Exception):
    """Another process could not prepare the reload."""


class SupervisorLink:
    """The channel to the supervisor; a ``gateway.runtime.gateway.ProcessGroup``."""

    def __init__(self, channel: IpcChannel, command: StartCommand) -> None:
        self.channel = channel
        self._process_count = command.process_count
        self.admin_socket = command.admin_socket
        self._commit = asyncio.get_running_loop().create_future()
        self._pending_reloads: dict[int, asyncio.Future[ReloadResult]] = {}
        self._request_numbers = itertools.count()

    def load_partition(self, text: ConfigText, ports: Sequence[ListenerPort]) -> LoadedConfig:
        """Load a configuration and take this process's part. Raises ConfigError."""
        loaded = text.load()
        port_map = {(one.address, one.number): one.port for one in ports}
        return replace(
            loaded, config=partition_config(loaded.config, self._process_count, port_map)
        )

    async def confirm_reload(self) -> None:
        self._commit = asyncio.get_running_loop().create_future()
        self.channel.send(ReloadPrepared())
        if not await self._commit:
            raise _ReloadAborted

    async def reload(self) -> ReloadResult:
        number = next(self._request_numbers)
        self._pending_reloads[number] = asyncio.get_running_loop().create_future()
        self.channel.send(ReloadRequest(number))
        try:
            return await self._pending_reloads[number]
        finally:
            del self._pending_reloads[number]

    async def follow_supervisor(self, app: Gateway, stopped: asyncio.Event) -> None:
        """Handle the supervisor's messages; set ``stopped`` when it has ended."""
        async with asyncio.TaskGroup() as tasks:
            while (message := await self.channel.receive()) is not None:
                match message:
                    case PrepareReload(text, ports):
                        tasks.create_task(self._apply_config(app, text, ports))
                    case CommitReload(commit):
                        self._commit.set_result(commit)
                    case ReloadReply(number, result) if number in self._pending_reloads:
                        self._pending_reloads[number].set_result(result)
                    case _:
                        """The client that requested the reload has disconnected."""
            stopped.set()

    async def _apply_config(
        self, app: Gateway, text: ConfigText, ports: Sequence[ListenerPort]
    ) -> None:
        try:
            await app.apply_config(
                await BackgroundCall(partial(self.load_partition, text, ports)).wait_result()
            )
        except _ReloadAborted:
            self.channel.send(ReloadDone())
        except ConfigError as error:
            self.channel.send(ReloadPrepared(error.issues))
        except Exception:
            log.exception("a reload failed")
            issue = ConfigIssue(
                DOCUMENT_START.line,
                DOCUMENT_START.column,
                "the gateway failed; its log has the cause",
            )
            self.channel.send(ReloadPrepared([issue]))
        else:
            self.channel.send(ReloadDone())


async def serve_process(end: socket.socket) -> int:
    """Serve until stopped; returns the exit code."""
    channel = await IpcChannel.connect(end)
    command = await channel.receive()
    if not isinstance(command, StartCommand):
        return 1
    log_format = inherit_log_format(os.environ)
    configure_logging(command.log_level, log_format)
    link = SupervisorLink(channel, command)
    try:
        loaded = link.load_partition(command.config_text, command.ports)
    except ConfigError as error:
        channel.send(ProcessFailed(str(error)))
        return 1
    access_log = loaded.config.observe.access_log
    with open_access_log(access_log.buffer, access_log.format, log_format) as lines:
        return await _run_gateway(loaded, link, lines, draining=command.draining)


async def _run_gateway(
    loaded: LoadedConfig, link: SupervisorLink, access_log: AccessLogWriter, *, draining: bool
) -> int:
    loop, stopping = asyncio.get_running_loop(), ShutdownSignal()
    origin = ConfigSource(loaded, lambda: loaded)
    app = Gateway(loaded.config, build_services(access_log), origin=origin, process_group=link)
    app.set_draining(on=draining)
    tune_interpreter()
    try:
        urls = await app.start()
    except (OSError, WorkerError) as error:
        link.channel.send(ProcessFailed(str(error)))
        await app.stop()
        return 1
    gc.freeze()
    link.channel.send(
        ProcessReady([*filter(None, urls)], [info.name for info in app.router.list_models()])
    )
    follow_task = loop.create_task(link.follow_supervisor(app, stopping.event))
    await stopping.wait()
    follow_task.cancel()
    with suppress(asyncio.CancelledError):
        await follow_task
    await app.stop(use_shutdown_delay=stopping.use_shutdown_delay)
    return 0


def main() -> int:
    """Serve, with the descriptor on the command line."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the supervisor handles it
    raise_fd_limit()
    with asyncio.Runner(loop_factory=get_loop_factory()) as runner:
        return runner.run(serve_process(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
