"""``interlingua serve``: run the gateway."""

import asyncio
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Final

import click

from gateway.config import ConfigError, Loaded, Source
from gateway.core.errors import WorkerError
from gateway.processes.loops import loop_factory
from gateway.processes.text import Fetch, Reading, Text, in_file
from gateway.recording.lines import Lines, the_log

_MOST: Final = 256
"""Processes, at most."""


def _count(context: click.Context, option: click.Parameter, value: str) -> int:
    """How many processes a person means."""
    del context, option
    if value == "auto":
        return len(os.sched_getaffinity(0))
    if value.isascii() and value.isdigit() and 1 <= int(value) <= _MOST:
        return int(value)
    raise click.BadParameter(f"give a number from 1 to {_MOST}, or auto")


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
    callback=_count,
    help="How many share the work; auto: one for each core.",
)
@click.option("--log-level", default="info", show_default=True)
def serve(what: str | None, port: int | None, log_level: str, **told: Any) -> None:
    """Serve a configuration (FILE), a worker (http://…), a local MODEL, or the built-in model.

    A model is a folder, a hub's name or package:NAME. With nothing given, a small built-in model
    answers where torch is installed, and an echo where it is not. The word conformance serves what
    `interlingua conform` asks for.

    Several processes share each limit of FILE, and one more looks after them.

    SIGHUP reloads FILE, SIGTERM and SIGINT stop when what runs has ended.
    """
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    fetch, file = _fetch(what, port, insecure=told["insecure"])
    reading, watched = Reading(fetch), file if told["watch"] else None
    try:
        first = reading()
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    if told["processes"] == 1:
        sys.exit(served(first, reading, watched))
    from gateway.processes.supervisor import Plan, supervise  # noqa: PLC0415 - one needs none

    sys.exit(supervise(Plan(first, reading, told["processes"], watched, log_level.upper())))


def _fetch(what: str | None, port: int | None, *, insecure: bool) -> tuple[Fetch, str | None]:
    """What gives the configuration to serve, and its file if it is in one."""
    if what is not None and Path(what).is_file() and not what.endswith(".gguf"):
        if port is not None:
            raise click.UsageError("--port: the file says where to listen")
        return in_file(what, insecure=insecure), what
    name, values = _without_file(what)
    env = values if port is None else {**values, "PORT": str(port)}
    text, called = built_in(name)
    return partial(Text, text.encode(), called, env, insecure), None


def _without_file(what: str | None) -> tuple[str, Mapping[str, str]]:
    """Which built-in configuration, and the values that it uses."""
    match what:
        case None:
            return ("local" if _has_torch() else "echo"), {}
        case str() if what.startswith(("http://", "https://")):
            return "proxy", {"WORKER": what.rstrip("/").removesuffix("/v1")}
        case "conformance":
            return "conformance", {}
        case str() if what.endswith((".yaml", ".yml", ".json")):
            raise click.UsageError(f"there is no file {what}")
        case _:
            return "local", {"MODEL": what}


def built_in(name: str) -> tuple[str, str]:
    """The text of a built-in configuration, and what to call it."""
    file = resources.files("gateway") / "defaults" / f"{name}.yaml"
    return file.read_text("utf-8"), f"<built-in {name}.yaml>"


def _has_torch() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def served(
    first: Loaded, source: Source, watched: str | None = None, *, warmed: bool = False
) -> int:
    """Serve ``first`` until told to stop; gives the command's exit code.

    ``source`` reads it anew when asked to, or when the file ``watched`` changes. With ``warmed``
    no port is opened before every backend is at its best, and none if one never will be.
    """
    told = first.config.observe.access_log
    with (
        the_log(told.buffer, exchanges=told.format != "off") as lines,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        return runner.run(_run(first, source, watched, lines, warmed=warmed))


async def _run(
    first: Loaded, source: Source, watched: str | None, lines: Lines, *, warmed: bool
) -> int:
    """Serve until told to stop; a second signal stops at once."""
    from gateway.app import App, surroundings  # noqa: PLC0415 - a bad file is told without it
    from gateway.processes.following import Following  # noqa: PLC0415 - as above
    from gateway.reload import Origin  # noqa: PLC0415 - as above

    app = App(first.config, surroundings(lines), origin=Origin(first, source))
    assert app.reloader is not None  # noqa: S101 - it was made with its origin
    stopping, following = asyncio.Event(), Following(app.reloader, watched)
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    loop.add_signal_handler(signal.SIGHUP, following.changed.set)
    starting = loop.create_task(app.start(warmed=warmed))
    if not await _first(starting, stopping):
        await app.stop()
        return 0
    try:
        urls = starting.result()
    except (OSError, WorkerError) as error:
        what = "listen" if isinstance(error, OSError) else "serve"
        click.echo(f"interlingua can't {what}: {error}", err=True)
        await app.stop()
        return 1
    models = ", ".join(info.name for info in app.router.models()) or "any"
    click.echo(f"interlingua serves {models} on {' and '.join(urls)}", err=True)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(following.run())
        await stopping.wait()
        task.cancel()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(name)
    lines.say("interlingua stops when what runs has ended; signal again to stop at once")
    await app.stop()
    return 0


async def _first(starting: "asyncio.Task[list[str]]", stopping: asyncio.Event) -> bool:
    """Wait for the start, or for the wish to stop, whichever comes first; whether it started."""
    async with asyncio.TaskGroup() as tasks:
        wish = tasks.create_task(stopping.wait())
        await asyncio.wait({starting, wish}, return_when=asyncio.FIRST_COMPLETED)
        wish.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return False
    return True
