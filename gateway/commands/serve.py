"""``interlingua serve``: run the gateway."""

import asyncio
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

import click

from gateway.config import Config, ConfigError, load, read


@click.command()
@click.argument("what", required=False)
@click.option("--port", type=click.IntRange(0, 65535), help="Where to listen, without a file.")
@click.option(
    "--insecure-no-auth",
    "insecure",
    is_flag=True,
    help="Listen beyond this machine although no keys are configured.",
)
@click.option("--log-level", default="info", show_default=True)
def serve(what: str | None, port: int | None, log_level: str, *, insecure: bool) -> None:
    """Serve a configuration (FILE), a worker (http://…), a local MODEL, or the built-in model.

    A model is a folder, a hub's name or package:NAME. With nothing given, a small built-in model
    answers where torch is installed, and an echo where it is not. The word conformance serves what
    `interlingua conform` asks for.
    """
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    config = _configuration(what, port, insecure=insecure)
    loop_factory = _loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        sys.exit(runner.run(_run(config)))


def _configuration(what: str | None, port: int | None, *, insecure: bool) -> Config:
    """What to serve. Ends the command with the complaints of a bad file."""
    try:
        if what is not None and Path(what).is_file() and not what.endswith(".gguf"):
            if port is not None:
                raise click.UsageError("--port: the file says where to listen")
            return read(what, env=os.environ, insecure=insecure)
        name, values = _without_file(what)
        env = {**os.environ, **values} | ({} if port is None else {"PORT": str(port)})
        return load(*built_in(name), env=env, insecure=insecure)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(1)


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


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop  # noqa: PLC0415 - optional

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _run(config: Config) -> int:
    """Serve until told to stop; a second signal stops at once."""
    from gateway.app import App, surroundings  # noqa: PLC0415 - a bad file is told without it

    app = App(config, surroundings())
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    try:
        urls = await app.start()
    except OSError as error:
        click.echo(f"interlingua can't listen: {error}", err=True)
        await app.stop()
        return 1
    models = ", ".join(info.name for info in app.router.models()) or "any"
    click.echo(f"interlingua serves {models} on {' and '.join(urls)}", err=True)
    await stopping.wait()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(name)
    click.echo("interlingua stops when what runs has ended; signal again to stop at once", err=True)
    await app.stop()
    return 0
