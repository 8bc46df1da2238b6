"""One of several processes: serves its part, and does what the supervisor says.

    python -m gateway.multiprocess.process DESCRIPTOR

The descriptor is its end of the line. When the other end is gone it stops, as it does for SIGTERM:
what runs comes to its end.
"""

import asyncio
import itertools
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from backends.aio import BackgroundCall
from gateway.config.errors import DOCUMENT_START, ConfigError, ConfigIssue
from gateway.config.loader import ConfigText, LoadedConfig
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
from gateway.runtime.process import get_loop_factory, raise_fd_limit, tune_gc
from gateway.runtime.reload import ConfigSource, ReloadResult
from gateway.runtime.shutdown import ShutdownSignal
from protocols.core.errors import WorkerError

log = logging.getLogger("interlingua")


class _ReloadAborted(Exception):
    """Another process can't serve what this one could."""


class SupervisorLink:
    """The other processes: a ``gateway.runtime.gateway.ProcessGroup`` over the supervisor."""

    def __init__(self, line: IpcChannel, begin: StartCommand) -> None:
        self.channel = line
        self._process_count = begin.process_count
        self.admin_socket = begin.admin_socket
        self._commit = asyncio.get_running_loop().create_future()
        self._pending_reloads: dict[int, asyncio.Future[ReloadResult]] = {}
        self._request_numbers = itertools.count()

    def load_partition(self, text: ConfigText, ports: Sequence[ListenerPort]) -> LoadedConfig:
        """What this process serves of a text. Raises ConfigError."""
        whole = text.load()
        taken = {(one.address, one.number): one.port for one in ports}
        return replace(whole, config=partition_config(whole.config, self._process_count, taken))

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

    async def follow_supervisor(self, app: Gateway, gone: asyncio.Event) -> None:
        """Do what the supervisor says until it is ``gone``."""
        async with asyncio.TaskGroup() as tasks:
            while (told := await self.channel.receive()) is not None:
                match told:
                    case PrepareReload(text, ports):
                        tasks.create_task(self._apply_config(app, text, ports))
                    case CommitReload(go):
                        self._commit.set_result(go)
                    case ReloadReply(number, outcome) if number in self._pending_reloads:
                        self._pending_reloads[number].set_result(outcome)
                    case _:
                        """Who asked has left."""
            gone.set()

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
            bug = ConfigIssue(
                DOCUMENT_START.line,
                DOCUMENT_START.column,
                "the gateway failed; its log has the cause",
            )
            self.channel.send(ReloadPrepared([bug]))
        else:
            self.channel.send(ReloadDone())


async def serve_process(end: socket.socket) -> int:
    """Serve until told to stop; gives the process's exit code."""
    line = await IpcChannel.connect(end)
    begin = await line.receive()
    if not isinstance(begin, StartCommand):
        return 1
    logging.basicConfig(level=begin.log_level, format="%(levelname)s %(name)s: %(message)s")
    among = SupervisorLink(line, begin)
    try:
        loaded = among.load_partition(begin.config_text, begin.ports)
    except ConfigError as error:
        line.send(ProcessFailed(str(error)))
        return 1
    told = loaded.config.observe.access_log
    with open_access_log(told.buffer, log_requests=told.format != "off") as lines:
        return await _run_gateway(loaded, among, lines, draining=begin.draining)


async def _run_gateway(
    loaded: LoadedConfig, among: SupervisorLink, lines: AccessLogWriter, *, draining: bool
) -> int:
    loop, stopping = asyncio.get_running_loop(), ShutdownSignal()
    origin = ConfigSource(loaded, lambda: loaded)
    app = Gateway(loaded.config, build_services(lines), origin=origin, process_group=among)
    app.set_draining(on=draining)
    try:
        urls = await app.start()
    except (OSError, WorkerError) as error:
        among.channel.send(ProcessFailed(str(error)))
        await app.stop()
        return 1
    tune_gc()
    among.channel.send(
        ProcessReady([*filter(None, urls)], [info.name for info in app.router.list_models()])
    )
    following = loop.create_task(among.follow_supervisor(app, stopping.event))
    await stopping.wait()
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
    await app.stop(use_shutdown_delay=stopping.use_shutdown_delay)
    return 0


def main() -> int:
    """Serve, with the descriptor that the command line names."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the supervisor's to hear
    raise_fd_limit()
    with asyncio.Runner(loop_factory=get_loop_factory()) as runner:
        return runner.run(serve_process(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
