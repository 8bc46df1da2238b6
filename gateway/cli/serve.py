"""``interlingua serve``: run the gateway."""

import asyncio
import hashlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from msgspec import Struct

from gateway.config.errors import ConfigError
from gateway.config.loader import (
    ConfigFetcher,
    ConfigReader,
    ConfigText,
    LoadConfig,
    LoadedConfig,
    load_bytes,
    make_file_fetcher,
)
from gateway.observability.access_log import AccessLogWriter, open_access_log
from gateway.runtime.process import ShutdownSignal, get_loop_factory, raise_fd_limit, tune_gc
from protocols.core.errors import WorkerError

if TYPE_CHECKING:
    from gateway.runtime.gateway import Gateway
    from gateway.runtime.handover import SocketHandover


# The life of a gateway in one process: from its start until it is told to stop.


class ServerProcess(Struct, frozen=True):
    """What it begins with: see ``gateway.cli.serve.run_gateway``."""

    initial_config: LoadedConfig
    load_config: LoadConfig
    watched_file: str | None
    access_log: AccessLogWriter
    wait_for_warmup: bool
    handover_path: str | None

    async def run(self) -> int:
        """Serve until told to stop; gives the command's exit code. A second signal ends at once."""
        from gateway.runtime.gateway import Gateway, build_services
        from gateway.runtime.handover import SocketHandover  # noqa: PLC0415 - as above
        from gateway.runtime.reload import (
            ConfigSource,  # noqa: PLC0415 - as above
            ReloadTrigger,  # noqa: PLC0415 - as above
        )

        origin = ConfigSource(self.initial_config, self.load_config)
        app = Gateway(self.initial_config.config, build_services(self.access_log), origin=origin)
        assert app.reloader is not None  # noqa: S101 - it was made with its origin
        stopping, following = ShutdownSignal(), ReloadTrigger(app.reloader, self.watched_file)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, following.reload_requested.set)
        heir = (
            SocketHandover(self.handover_path, lambda: app.socket_fds)
            if self.handover_path
            else None
        )
        try:
            urls = await self._start_gateway(app, heir, stopping)
        except (OSError, WorkerError) as error:
            what = "listen" if isinstance(error, OSError) else "serve"
            click.echo(f"interlingua can't {what}: {error}", err=True)
            await app.stop()
            return 1
        if not urls:
            await app.stop()
            return 0
        models = ", ".join(info.name for info in app.router.list_models()) or "any"
        click.echo(f"interlingua serves {models} on {' and '.join(urls)}", err=True)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(following.run())]
            if heir is not None:
                running.append(tasks.create_task(_stop_after_handover(app, heir, stopping.event)))
            await stopping.wait()
            for task in running:
                task.cancel()
        self.access_log.write_text(
            "interlingua stops when what runs has ended; signal again to stop at once"
        )
        await app.stop(lame_duck=stopping.use_shutdown_delay)
        if heir is not None:
            heir.close()
        return 0

    async def _start_gateway(
        self, app: "Gateway", heir: "SocketHandover | None", stopping: ShutdownSignal
    ) -> Sequence[str]:
        """Take the place of the gateway that runs, if one does; gives the URLs.

        None where it was told to stop first. Raises OSError and WorkerError.
        """
        from gateway.runtime.handover import InheritedSockets  # noqa: PLC0415 - as above

        loop = asyncio.get_running_loop()
        with InheritedSockets(self.handover_path) as inherited:
            starting = loop.create_task(app.start(inherited, warmed=self.wait_for_warmup))
            if not await _wait_for_start(starting, stopping.event):
                return ()
            urls = starting.result()
            tune_gc()
            if heir is not None:
                heir.listen()
            inherited.confirm_serving()
        return urls


async def _stop_after_handover(
    app: "Gateway", heir: "SocketHandover", stopping: asyncio.Event
) -> None:
    """Leave the listeners to another once it serves, and stop."""
    await heir.wait_for_successor()
    app.stop_accepting()
    stopping.set()


async def _wait_for_start(starting: "asyncio.Task[list[str]]", stopping: asyncio.Event) -> bool:
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
    from gateway.multiprocess.supervisor import ServePlan, run_supervisor

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
    file = resources.files("gateway.cli") / "defaults" / f"{name}.yaml"
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
    ``handover``: see ``gateway.runtime.handover``.
    """
    raise_fd_limit()
    told = first.config.observe.access_log
    with (
        open_access_log(told.buffer, log_requests=told.format != "off") as lines,
        asyncio.Runner(loop_factory=get_loop_factory()) as runner,
    ):
        life = ServerProcess(first, source, watched, lines, warmed, handover)
        return runner.run(life.run())


# ``interlingua worker``: one local model over HTTP, for gateways on other machines.


@click.command()
@click.option(
    "--model", "path", required=True, help="A folder, a .gguf file, a hub's name or package:NAME."
)
@click.option("--name", help="What the model is called; left out, what its place is called.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8001, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:1.")
@click.option("--dtype", default="auto", show_default=True)
@click.option(
    "--max-concurrency", type=int, default=16, show_default=True, help="Rows computed together."
)
@click.option("--memory", help="For keys and values, such as 4GiB; left out, 1GiB.")
@click.option("--threads", type=int, help="Of the processor; left out, what torch takes.")
@click.option(
    "--task",
    type=click.Choice(["generate", "embedding"]),
    help="What the model is for, where its files would say something else.",
)
@click.option(
    "--key",
    envvar="INTERLINGUA_WORKER_KEY",
    help="What gateways must send as a bearer token. Best said in INTERLINGUA_WORKER_KEY.",
)
@click.option(
    "--insecure-no-auth",
    "insecure",
    is_flag=True,
    help="Listen beyond this machine although there is no key.",
)
@click.option("--log-level", default="info", show_default=True)
def worker(log_level: str, *, insecure: bool, **told: Any) -> None:
    """Serve one model to gateways, in OpenAI's API with all that our engine takes beside it.

    It listens when the model is loaded, and not before. A gateway has it in a pool of
    `dialect: openai` and `profile: interlingua`.

    Exit codes: 0 stopped, 1 the model can't be served or the port can't be had, 2 wrong usage.
    """
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    source = partial(
        load_bytes,
        msgspec.json.encode(build_worker_config(**told)),
        "<worker>",
        env=os.environ,
        insecure=insecure,
    )
    try:
        first = source()
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    sys.exit(run_gateway(first, source, warmed=True))


def build_worker_config(
    path: str, *, name: str | None, host: str, port: int, key: str | None, **settings: Any
) -> dict[str, Any]:
    """What a worker serves, as a configuration says it. ``settings`` are a local model's."""
    config: dict[str, Any] = msgspec.yaml.decode(read_built_in_config("worker")[0])
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    config["listeners"][0]["address"] = address
    said = {key: value for key, value in settings.items() if value is not None}
    config["backends"]["engine"] |= {"path": path, **said}
    config["models"] = {name or _derive_model_name(path): {"backend": "engine"}}
    if key is not None:
        digest = hashlib.sha256(key.encode()).hexdigest()
        config["keys"] = [{"name": "gateway", "sha256": digest}]
    return config


def _derive_model_name(path: str) -> str:
    """A folder's or file's own name, a package's, or the hub's."""
    place = Path(path).expanduser()
    if place.exists():
        return place.resolve().name.removesuffix(".gguf")
    return path.removeprefix("package:")
