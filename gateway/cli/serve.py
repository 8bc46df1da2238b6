"""``interlingua serve``: run the gateway."""

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
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
from gateway.cli.built_in import (
    ADMIN_PORT,
    BuiltInConfig,
    ServeOptions,
    build_serve_config,
    build_worker_config,
    find_config_file,
)
from gateway.cli.loading_progress import show_loading
from gateway.config import listeners
from gateway.config.errors import ConfigError
from gateway.config.loader import LoadConfig, LoadedConfig, load_bytes
from gateway.config.source import ConfigFetcher, ConfigReader, make_file_fetcher
from gateway.observability.access_log import AccessLogWriter, open_access_log
from gateway.runtime.process import get_loop_factory, raise_fd_limit, tune_interpreter
from gateway.runtime.shutdown import SHUTDOWN_MESSAGE, ShutdownSignal
from gateway.terminal import print_text
from protocols.core.errors import WorkerError
from protocols.json_body import encode_ascii

if TYPE_CHECKING:
    from gateway.runtime.gateway import Gateway
    from gateway.runtime.handover import SocketHandover


# A gateway in one process, from start to stop.


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


_LOG_FORMAT_OPTION: Final = click.option(
    "--log-format",
    type=click.Choice(LOG_FORMAT_CHOICES),
    default="auto",
    show_default=True,
    envvar=LOG_FORMAT_VARIABLE,
    help="The format of all lines on standard error; auto: text on a terminal, else JSON.",
)


def start_logging(level: str, choice: LogFormatChoice) -> LogFormat:
    """Log to standard error, also in the processes that are started. Returns the format."""
    log_format = choose_log_format(choice)
    configure_logging(level.upper(), log_format)
    pass_on_log_format(log_format, os.environ)
    return log_format


_MAX_PROCESSES: Final = 256
"""The largest number of processes."""
_MAX_PORT: Final = 65535


def _parse_process_count(context: click.Context, option: click.Parameter, value: str) -> int:
    """The number of processes that ``value`` means."""
    del context, option
    if value == "auto":
        return len(os.sched_getaffinity(0))
    if value.isascii() and value.isdigit() and 1 <= int(value) <= _MAX_PROCESSES:
        return int(value)
    raise click.BadParameter(f"give a number from 1 to {_MAX_PROCESSES}, or auto")


@click.command()
@click.argument("target", required=False)
@click.option("--host", help="The address to listen on; 127.0.0.1 by default.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="The port to listen on; 8000 by default."
)
@click.option(
    "--served-model-name", metavar="NAME", help="The name of MODEL for clients; by default its own."
)
@click.option(
    "--task",
    type=click.Choice(["generate", "embedding", "rerank", "classify"]),
    help="The task of MODEL, if its files do not say it.",
)
@click.option(
    "--api-key",
    "api_keys",
    metavar="KEY",
    multiple=True,
    envvar="INTERLINGUA_API_KEY",
    help="A key that clients must send; may be repeated. Prefer the variable INTERLINGUA_API_KEY.",
)
@click.option(
    "--admin-port",
    callback=lambda _context, _option, value: _parse_admin_port(value),
    help=f"The port of metrics and web UI on 127.0.0.1, {ADMIN_PORT} by default; off: none.",
)
@click.option("--open", "open_browser", is_flag=True, help="Open the web UI in a browser.")
@click.option(
    "--insecure-no-auth",
    "insecure",
    is_flag=True,
    help="Listen on other addresses than loopback although no keys are configured.",
)
@click.option(
    "--watch/--no-watch", default=True, show_default=True, help="Reload FILE when it changes."
)
@click.option(
    "--processes",
    default="1",
    show_default=True,
    callback=_parse_process_count,
    help="Number of processes; auto: one per CPU core.",
)
@click.option(
    "--handover",
    metavar="SOCKET",
    help="Socket path for an upgrade without downtime: take over from the process that uses it.",
)
@click.option("--log-level", default="info", show_default=True)
@_LOG_FORMAT_OPTION
def serve(target: str | None, log_level: str, processes: int, **options: Any) -> None:
    """Serve a configuration FILE, a worker (http://HOST:PORT), a local MODEL, or a built-in model.

    MODEL is a folder, a .gguf file, package:NAME, or OWNER/NAME of the Hugging Face Hub. It is
    served under its own name; while it is being loaded, requests get status 503. Without TARGET, a
    small built-in model is served if torch is installed, and an echo otherwise; TARGET
    "conformance" serves that of the conformance cases.

    \b
      interlingua serve gateway.yaml
      interlingua serve http://127.0.0.1:8001 --port 8000
      interlingua serve Qwen/Qwen3-0.6B --served-model-name qwen --api-key sk-secret

    The options from --host to --admin-port are not for FILE, which has its own settings. Without
    FILE, an admin listener with metrics and the web UI is started on 127.0.0.1; what changes
    something there needs the key in the web UI's URL.

    Several processes share each limit of FILE. SIGHUP reloads FILE. SIGTERM and SIGINT stop the
    gateway when all running requests have ended; on SIGTERM it serves for limits.shutdown_delay
    first. To upgrade, run the same command with the same --handover again: the new process takes
    over the listeners, and the old one ends when its requests have ended.

    Exit codes: 0 stopped, 1 the configuration is invalid, a model can't be loaded or a port is in
    use, 2 wrong usage.
    """  # noqa: D301 - click reads \b
    log_format = start_logging(log_level, options["log_format"])
    serve_options = msgspec.convert(
        {name: options[name] for name in ServeOptions.__struct_fields__}, ServeOptions
    )
    file = find_config_file(target)
    built_in = None if file else build_serve_config(target, serve_options)
    reader = ConfigReader(_make_fetcher(file, built_in, serve_options))
    try:
        initial_config = reader()
    except ConfigError as error:
        print_text(format_notice(str(error), log_format, logging.ERROR), err=True)
        sys.exit(1)
    if options["log_format"] == "auto":
        log_format = start_logging(log_level, initial_config.config.observe.log_format)
    watched_file = file if options["watch"] else None
    admin_key = built_in.admin_key if built_in else None
    polls = options["watch"] and built_in is not None and built_in.worker_url is not None
    run_options = RunOptions(
        watched_file=watched_file,
        has_changed=reader.has_changed if polls else None,
        wait_for_warmup=built_in is not None and built_in.is_local_model,
        handover=options["handover"],
        port_hint=f"change it in {file}" if file else "choose another with --port or --admin-port",
        admin_key=admin_key,
        open_browser=options["open_browser"],
        log_format=log_format,
    )
    if processes > 1:
        sys.exit(_run_processes(processes, log_level, initial_config, reader, run_options))
    sys.exit(run_gateway(initial_config, reader, run_options))


def _run_processes(
    count: int, log_level: str, initial: LoadedConfig, reader: ConfigReader, options: RunOptions
) -> int:
    """Run ``count`` serving processes. Returns the exit code. Raises UsageError."""
    if options.handover is not None:
        raise click.UsageError("--handover works only with one process")
    from gateway.multiprocess import supervisor  # noqa: PLC0415 - one process needs none

    plan = supervisor.ServePlan(
        initial,
        reader,
        count,
        watched_file=options.watched_file,
        log_level=log_level.upper(),
        log_format=options.log_format,
        polls_reader=options.has_changed is not None,
        admin_key=options.admin_key,
    )
    return supervisor.run_supervisor(plan)


def _parse_admin_port(value: str | None) -> int | None:
    """The port that ``value`` means; -1 for no admin listener."""
    if value is None:
        return None
    if value == "off":
        return -1
    if value.isascii() and value.isdigit() and int(value) <= _MAX_PORT:
        return int(value)
    raise click.BadParameter(f"give a port from 0 to {_MAX_PORT}, or off")


def _make_fetcher(
    file: str | None, built_in: BuiltInConfig | None, options: ServeOptions
) -> ConfigFetcher:
    """The source of the configuration: the file, or the built-in one. Raises UsageError."""
    if file is not None:
        if changed := options.list_changed():
            raise click.UsageError(f"{file} sets what {', '.join(changed)} would; change it there")
        return make_file_fetcher(file, insecure=options.insecure)
    assert built_in is not None  # noqa: S101 - one of the two is given
    return built_in.make_fetcher()


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


# ``interlingua worker``: one local model over HTTP, for gateways on other machines.


@click.command()
@click.option(
    "--model",
    "path",
    required=True,
    help="A folder, a .gguf file, a Hugging Face name or package:NAME.",
)
@click.option("--name", help="The model's public name; by default, the name of its folder or file.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8001, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:1.")
@click.option("--dtype", default="auto", show_default=True)
@click.option(
    "--max-concurrency", type=int, default=16, show_default=True, help="Sequences in a batch."
)
@click.option("--kv-cache-memory", help="Size of the KV cache, such as 4GiB; by default 1GiB.")
@click.option("--context", type=int, help="A context length below the model's own, in tokens.")
@click.option("--queue", type=int, help="Limit of waiting prompts; by default 256.")
@click.option("--prefill-chunk", type=int, help="Prompt tokens in one step; by default 256.")
@click.option("--threads", type=int, help="CPU threads; by default, as many as torch chooses.")
@click.option(
    "--task",
    type=click.Choice(["generate", "embedding", "rerank", "classify"]),
    help="The model's task, if its files do not say it.",
)
@click.option(
    "--key",
    envvar="INTERLINGUA_WORKER_KEY",
    help="The bearer token that gateways must send; prefer the variable INTERLINGUA_WORKER_KEY.",
)
@click.option(
    "--insecure-no-auth",
    "insecure",
    is_flag=True,
    help="Listen on other addresses than loopback although there is no key.",
)
@click.option("--log-level", default="info", show_default=True)
@_LOG_FORMAT_OPTION
def worker(log_level: str, log_format: LogFormatChoice, *, insecure: bool, **options: Any) -> None:
    """Serve one local model to gateways, with the OpenAI API and the engine's own parameters.

    While the model is being loaded, requests get status 503. A gateway uses it in a pool with
    `protocol: openai` and `profile: interlingua`.

    Exit codes: 0 stopped, 1 the model can't be served or the port is in use, 2 wrong usage.
    """
    chosen_format = start_logging(log_level, log_format)
    load_config = partial(
        load_bytes,
        encode_ascii(build_worker_config(**options)),
        "<worker>",
        env=os.environ,
        insecure=insecure,
    )
    try:
        initial_config = load_config()
    except ConfigError as error:
        print_text(format_notice(str(error), chosen_format, logging.ERROR), err=True)
        sys.exit(2)
    run_options = RunOptions(wait_for_warmup=True, log_format=chosen_format)
    sys.exit(run_gateway(initial_config, load_config, run_options))
