"""``interlingua serve``: run the gateway."""

import logging
import os
import sys
from typing import Any, Final

import click
import msgspec

from backends.log_format import format_notice
from gateway.cli.built_in import (
    ADMIN_PORT,
    BuiltInConfig,
    ServeOptions,
    build_serve_config,
    find_config_file,
)
from gateway.cli.server_process import (
    LOG_FORMAT_OPTION,
    LOG_LEVEL_OPTION,
    RunOptions,
    run_gateway,
    start_logging,
)
from gateway.config.errors import ConfigError
from gateway.config.loader import LoadedConfig
from gateway.config.source import ConfigFetcher, ConfigReader, make_file_fetcher
from gateway.terminal import print_text

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
@LOG_LEVEL_OPTION
@LOG_FORMAT_OPTION
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
