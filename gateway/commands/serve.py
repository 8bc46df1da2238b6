"""``interlingua serve``: run the gateway."""

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Final

import click

from gateway.commands.life import ServerProcess
from gateway.config.errors import ConfigError
from gateway.config.loader import (
    ConfigFetcher,
    ConfigReader,
    ConfigText,
    LoadConfig,
    LoadedConfig,
    make_file_fetcher,
)
from gateway.descriptors import raise_fd_limit
from gateway.observability.access_log import open_access_log
from gateway.processes.loops import get_loop_factory

_MAX_PROCESSES: Final = 256
"""Processes, at most."""


def _parse_process_count(context: click.Context, option: click.Parameter, value: str) -> int:
    """How many processes a person means."""
    del context, option
    if value == "auto":
        return len(os.sched_getaffinity(0))
    if value.isascii() and value.isdigit() and 1 <= int(value) <= _MAX_PROCESSES:
        return int(value)
    raise click.BadParameter(f"give a number from 1 to {_MAX_PROCESSES}, or auto")


@click.command()
@click.argument("what", required=False)
@click.option("--port", type=click.IntRange(0, 65535), help="Where to listen, without a file.")
@click.option(
    "--insecure-no-auth",
    "insecure",
    is_flag=True,
    help="Listen beyond this machine although no keys are configured.",
)
@click.option(
    "--watch/--no-watch", default=True, show_default=True, help="Reload FILE when it changes."
)
@click.option(
    "--processes",
    default="1",
    show_default=True,
    callback=_parse_process_count,
    help="How many share the work; auto: one for each core.",
)
@click.option(
    "--handover",
    metavar="SOCKET",
    help="Take the place of the gateway that runs with this path, and wait there for the next.",
)
@click.option("--log-level", default="info", show_default=True)
def serve(what: str | None, port: int | None, log_level: str, **told: Any) -> None:
    """Serve a configuration (FILE), a worker (http://…), a local MODEL, or the built-in model.

    A model is a folder, a hub's name or package:NAME. With nothing given, a small built-in model
    answers where torch is installed, and an echo where it is not. The word conformance serves the
    models of the conformance cases (tests/conformance in a checkout).

    Several processes share each limit of FILE, and one more looks after them.

    SIGHUP reloads FILE, SIGTERM and SIGINT stop when what runs has ended; SIGTERM serves on for
    limits.lame_duck first. The same command with the same --handover, run again, is an upgrade: the
    new process takes over the listeners, and the old one ends when what runs in it has.
    """
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    fetch, file = _make_fetcher(what, port, insecure=told["insecure"])
    reading, watched = ConfigReader(fetch), file if told["watch"] else None
    try:
        first = reading()
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    if told["processes"] == 1:
        sys.exit(run_gateway(first, reading, watched, handover=told["handover"]))
    if told["handover"] is not None:
        raise click.UsageError("--handover: only one process can take another's place")
    from gateway.processes.supervisor import ServePlan, run_supervisor

    sys.exit(
        run_supervisor(ServePlan(first, reading, told["processes"], watched, log_level.upper()))
    )


def _make_fetcher(
    what: str | None, port: int | None, *, insecure: bool
) -> tuple[ConfigFetcher, str | None]:
    """What gives the configuration to serve, and its file if it is in one."""
    if what is not None and Path(what).is_file() and not what.endswith(".gguf"):
        if port is not None:
            raise click.UsageError("--port: the file says where to listen")
        return make_file_fetcher(what, insecure=insecure), what
    name, values = _choose_built_in(what)
    env = values if port is None else {**values, "PORT": str(port)}
    text, called = read_built_in_config(name)
    return partial(ConfigText, text.encode(), called, env, insecure), None


def _choose_built_in(what: str | None) -> tuple[str, Mapping[str, str]]:
    """Which built-in configuration, and the values that it uses."""
    match what:
        case None:
            return ("local" if _is_torch_installed() else "echo"), {}
        case str() if what.startswith(("http://", "https://")):
            return "proxy", {"WORKER": what.rstrip("/").removesuffix("/v1")}
        case "conformance":
            return "conformance", {}
        case str() if what.endswith((".yaml", ".yml", ".json")):
            raise click.UsageError(f"there is no file {what}")
        case _:
            return "local", {"MODEL": what}


def read_built_in_config(name: str) -> tuple[str, str]:
    """The text of a built-in configuration, and what to call it."""
    file = resources.files("gateway") / "defaults" / f"{name}.yaml"
    return file.read_text("utf-8"), f"<built-in {name}.yaml>"


def _is_torch_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def run_gateway(
    first: LoadedConfig,
    source: LoadConfig,
    watched: str | None = None,
    *,
    warmed: bool = False,
    handover: str | None = None,
) -> int:
    """Serve ``first`` until told to stop; gives the command's exit code.

    ``source`` reads it anew when asked to, or when the file ``watched`` changes. With ``warmed``
    no port is opened before every backend is at its best, and none if one never will be.
    ``handover``: see ``gateway.handover``.
    """
    raise_fd_limit()
    told = first.config.observe.access_log
    with (
        open_access_log(told.buffer, exchanges=told.format != "off") as lines,
        asyncio.Runner(loop_factory=get_loop_factory()) as runner,
    ):
        life = ServerProcess(first, source, watched, lines, warmed, handover)
        return runner.run(life.run())
