"""A gateway in one process, from start to stop; and the options of its log."""

import asyncio
import errno
import gc
import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import click
from msgspec import Struct

from backends.log_format import (
    LOG_FORMAT_CHOICES,
    LOG_FORMAT_VARIABLE,
    LogFormat,
    LogFormatChoice,
    choose_log_format,
    configure_logging,
    format_notice,
    pass_on_log_format,
)
from gateway.cli.loading_progress import show_loading
from gateway.config import listeners
from gateway.config.loader import LoadConfig, LoadedConfig
from gateway.observability.access_log import AccessLogWriter, open_access_log
from gateway.runtime.process import get_loop_factory, raise_fd_limit, tune_interpreter
from gateway.runtime.shutdown import SHUTDOWN_MESSAGE, ShutdownSignal
from gateway.terminal import print_text
from protocols.core.errors import WorkerError

if TYPE_CHECKING:
    from gateway.runtime.gateway import Gateway
    from gateway.runtime.handover import SocketHandover


_PROGRESS_PAUSE: Final = 0.5
"""Seconds between two updates of the line that tells how far models are loaded."""


class RunOptions(Struct, frozen=True, kw_only=True):
    """How a gateway runs."""

    watched_file: str | None = None
    """The file whose changes reload the configuration."""
    has_changed: Callable[[], bool] | None = None
    """Whether to reload the configuration; called now and then in a thread."""
    wait_for_warmup: bool = False
    """Whether to wait until every backend is warm, and to fail with the first that fails."""
    handover: str | None = None
    """See ``gateway.runtime.handover``."""
    port_hint: str = "choose another with --port"
    """What to do if a port is in use."""
    admin_key: str | None = None
    """The key in the web UI's URL, which is printed."""
    open_browser: bool = False
    """Whether to open that URL."""
    log_format: LogFormat = "json"
    """The format of all lines on standard error."""


class ServerProcess(Struct, frozen=True):
    """A gateway in this process. For the fields see ``run_gateway``."""

    initial_config: LoadedConfig
    load_config: LoadConfig
    access_log: AccessLogWriter
    options: RunOptions

    async def run(self) -> int:
        """Serve until a signal to stop; a second one ends at once. Returns the exit code."""
        from gateway.runtime.gateway import (  # noqa: PLC0415 - not loaded for an invalid file
            Gateway,
            build_services,
        )
        from gateway.runtime.handover import SocketHandover  # noqa: PLC0415 - as above
        from gateway.runtime.reload import ConfigSource, ReloadTrigger  # noqa: PLC0415 - as above

        config_source = ConfigSource(self.initial_config, self.load_config)
        gateway = Gateway(
            self.initial_config.config, build_services(self.access_log), origin=config_source
        )
        assert gateway.reloader is not None  # noqa: S101 - it was created with a source
        shutdown = ShutdownSignal()
        reload_trigger = ReloadTrigger(
            gateway.reloader, self.options.watched_file, self.options.has_changed
        )
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGHUP, reload_trigger.reload_requested.set
        )
        handover = (
            SocketHandover(self.options.handover, lambda: gateway.socket_fds)
            if self.options.handover
            else None
        )
        try:
            urls = await self._start_gateway(gateway, handover, shutdown)
        except (OSError, WorkerError) as error:
            self._print(self._describe_start_failure(error), logging.ERROR)
            await gateway.stop()
            return 1
        if not urls:
            await gateway.stop()
            return 0
        models = [info.name for info in gateway.router.list_models()]
        lines = [listeners.describe_serving(models, urls)]
        if gateway.admin_server is not None:
            page = listeners.build_ui_url(urls[-1], self.options.admin_key)
            lines.append(f"web UI: {page}")
            if self.options.open_browser:
                click.launch(page)
        self._print("\n".join(lines))  # at once: a full pipe blocks a second write
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(reload_trigger.run())]
            if handover is not None:
                background.append(
                    tasks.create_task(_stop_after_handover(gateway, handover, shutdown.event))
                )
            await shutdown.wait()
            for task in background:
                task.cancel()
        self.access_log.write_notice(SHUTDOWN_MESSAGE)
        await gateway.stop(use_shutdown_delay=shutdown.use_shutdown_delay)
        if handover is not None:
            handover.close()
        return 0

    def _describe_start_failure(self, error: OSError | WorkerError) -> str:
        """What the operator reads, with the option that changes a port in use."""
        if not isinstance(error, OSError):
            return f"interlingua can't serve: {error}"
        hint = f"; {self.options.port_hint}" if error.errno == errno.EADDRINUSE else ""
        return f"interlingua can't listen: {error}{hint}"

    def _print(self, text: str, level: int = logging.INFO) -> None:
        print_text(format_notice(text, self.options.log_format, level), err=True)

    async def _start_gateway(
        self, gateway: "Gateway", handover: "SocketHandover | None", shutdown: ShutdownSignal
    ) -> Sequence[str]:
        """Start, taking over the sockets of a running gateway if there is one. Returns the URLs.

        Returns none if a signal to stop came first. Raises OSError and WorkerError.
        """
        from gateway.runtime.handover import InheritedSockets  # noqa: PLC0415 - as above

        loop = asyncio.get_running_loop()
        tune_interpreter()
        with InheritedSockets(self.options.handover) as inherited:
            start_task = loop.create_task(
                gateway.start(inherited, warmed=self.options.wait_for_warmup)
            )
            is_text = self.options.log_format == "text"
            with show_loading(
                enabled=self.options.wait_for_warmup, use_status_line=is_text
            ) as show_status:
                progress_task = loop.create_task(_show_progress(gateway, show_status))
                try:
                    if not await _wait_for_start(start_task, shutdown.event):
                        return ()
                finally:
                    progress_task.cancel()
            urls = start_task.result()
            gc.freeze()
            if handover is not None:
                handover.listen()
            inherited.confirm_serving()
        return urls


async def _show_progress(gateway: "Gateway", show_status: Callable[[str], None]) -> None:
    """Show which models are being loaded, and how far they are, until cancelled."""
    while True:
        if loading := gateway.list_loading_models():
            show_status("; ".join(f"{name}: {progress}" for name, progress in loading.items()))
        await asyncio.sleep(_PROGRESS_PAUSE)


async def _stop_after_handover(
    gateway: "Gateway", handover: "SocketHandover", stop: asyncio.Event
) -> None:
    """Stop once a new process serves on the same sockets."""
    await handover.wait_for_successor()
    gateway.stop_accepting()
    stop.set()


async def _wait_for_start(start_task: "asyncio.Task[list[str]]", stop: asyncio.Event) -> bool:
    """Wait for the start or for a signal to stop. Returns whether the gateway started."""
    async with asyncio.TaskGroup() as tasks:
        stop_task = tasks.create_task(stop.wait())
        await asyncio.wait({start_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
        stop_task.cancel()
    if not start_task.done():
        start_task.cancel()
        await asyncio.wait({start_task})
        return False
    return True


LOG_FORMAT_OPTION: Final = click.option(
    "--log-format",
    type=click.Choice(LOG_FORMAT_CHOICES),
    default="auto",
    show_default=True,
    envvar=LOG_FORMAT_VARIABLE,
    help="The format of all lines on standard error; auto: text on a terminal, else JSON.",
)


LOG_LEVEL_OPTION: Final = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False),
    default="info",
    show_default=True,
)


def start_logging(level: str, choice: LogFormatChoice) -> LogFormat:
    """Log to standard error, also in the processes that are started. Returns the format."""
    log_format = choose_log_format(choice)
    configure_logging(level.upper(), log_format)
    pass_on_log_format(log_format, os.environ)
    return log_format


def run_gateway(initial_config: LoadedConfig, load_config: LoadConfig, options: RunOptions) -> int:
    """Serve ``initial_config`` until a signal to stop. Returns the exit code.

    ``load_config`` reloads the configuration on SIGHUP, or when the watched file changes.
    """
    raise_fd_limit()
    settings = initial_config.config.observe.access_log
    with (
        open_access_log(settings.buffer, settings.format, options.log_format) as access_log,
        asyncio.Runner(loop_factory=get_loop_factory()) as runner,
    ):
        process = ServerProcess(initial_config, load_config, access_log, options)
        return runner.run(process.run())
