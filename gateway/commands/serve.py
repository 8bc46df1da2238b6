"""``interlingua serve``: run the gateway."""

import asyncio
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gateway.config import ConfigError, Loaded, Source, loaded, opened
from gateway.core.errors import WorkerError

if TYPE_CHECKING:
    from gateway.app import App


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
@click.option("--log-level", default="info", show_default=True)
def serve(
    what: str | None, port: int | None, log_level: str, *, insecure: bool, watch: bool
) -> None:
    """Serve a configuration (FILE), a worker (http://…), a local MODEL, or the built-in model.

    A model is a folder, a hub's name or package:NAME. With nothing given, a small built-in model
    answers where torch is installed, and an echo where it is not. The word conformance serves what
    `interlingua conform` asks for.

    SIGHUP reloads FILE, SIGTERM and SIGINT stop when what runs has ended.
    """
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    source, file = _source(what, port, insecure=insecure)
    try:
        first = source()
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    sys.exit(served(first, source, file if watch else None))


def _source(what: str | None, port: int | None, *, insecure: bool) -> tuple[Source, str | None]:
    """What reads the configuration to serve, and its file if it is in one."""
    if what is not None and Path(what).is_file() and not what.endswith(".gguf"):
        if port is not None:
            raise click.UsageError("--port: the file says where to listen")
        return partial(opened, what, env=os.environ, insecure=insecure), what
    name, values = _without_file(what)
    env = {**os.environ, **values} | ({} if port is None else {"PORT": str(port)})
    text, called = built_in(name)
    return partial(loaded, text.encode(), called, env=env, insecure=insecure), None


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
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run(first, source, watched, warmed=warmed))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop  # noqa: PLC0415 - optional

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _run(first: Loaded, source: Source, watched: str | None, *, warmed: bool) -> int:
    """Serve until told to stop; a second signal stops at once."""
    from gateway.app import App, surroundings  # noqa: PLC0415 - a bad file is told without it
    from gateway.reload import Origin  # noqa: PLC0415 - as above

    app = App(first.config, surroundings(), origin=Origin(first, source))
    stopping, following = asyncio.Event(), _Following(app, watched)
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
    click.echo("interlingua stops when what runs has ended; signal again to stop at once", err=True)
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


class _Following:
    """Reloads whenever something has ``changed``: so a signal says, and the file ``watched``."""

    def __init__(self, app: "App", watched: str | None) -> None:
        from gateway.files import Watch  # noqa: PLC0415 - as above

        assert app.reloader is not None  # noqa: S101 - it was made with its origin
        self._reloader = app.reloader
        self._watched = () if watched is None else (watched,)
        self.changed = asyncio.Event()
        self._watch = Watch(self._files, self.changed.set)

    async def run(self) -> None:
        """Until cancelled. What has changed since this was made counts."""
        async with asyncio.TaskGroup() as tasks:
            if self._watched:
                tasks.create_task(self._watch.run())
            while True:
                await self.changed.wait()
                self.changed.clear()
                await self._reloader.reload()

    def _files(self) -> frozenset[str]:
        return self._reloader.files.union(self._watched)
