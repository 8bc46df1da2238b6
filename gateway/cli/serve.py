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
from gateway.runtime.process import get_loop_factory, raise_fd_limit, tune_gc
from gateway.runtime.shutdown import SHUTDOWN_MESSAGE, ShutdownSignal
from protocols.core.errors import WorkerError

if TYPE_CHECKING:
    from gateway.runtime.gateway import Gateway
    from gateway.runtime.handover import SocketHandover


# A gateway in one process, from start to stop.


class ServerProcess(Struct, frozen=True):
    """A gateway in this process. For the fields see ``run_gateway``."""

    initial_config: LoadedConfig
    load_config: LoadConfig
    watched_file: str | None
    access_log: AccessLogWriter
    wait_for_warmup: bool
    handover_path: str | None

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
        reload_trigger = ReloadTrigger(gateway.reloader, self.watched_file)
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGHUP, reload_trigger.reload_requested.set
        )
        handover = (
            SocketHandover(self.handover_path, lambda: gateway.socket_fds)
            if self.handover_path
            else None
        )
        try:
            urls = await self._start_gateway(gateway, handover, shutdown)
        except (OSError, WorkerError) as error:
            verb = "listen" if isinstance(error, OSError) else "serve"
            click.echo(f"interlingua can't {verb}: {error}", err=True)
            await gateway.stop()
            return 1
        if not urls:
            await gateway.stop()
            return 0
        models = ", ".join(info.name for info in gateway.router.list_models()) or "any"
        click.echo(f"interlingua serves {models} on {' and '.join(urls)}", err=True)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(reload_trigger.run())]
            if handover is not None:
                background.append(
                    tasks.create_task(_stop_after_handover(gateway, handover, shutdown.event))
                )
            await shutdown.wait()
            for task in background:
                task.cancel()
        self.access_log.write_text(SHUTDOWN_MESSAGE)
        await gateway.stop(use_shutdown_delay=shutdown.use_shutdown_delay)
        if handover is not None:
            handover.close()
        return 0

    async def _start_gateway(
        self, gateway: "Gateway", handover: "SocketHandover | None", shutdown: ShutdownSignal
    ) -> Sequence[str]:
        """Start, taking over the sockets of a running gateway if there is one. Returns the URLs.

        Returns none if a signal to stop came first. Raises OSError and WorkerError.
        """
        from gateway.runtime.handover import InheritedSockets  # noqa: PLC0415 - as above

        loop = asyncio.get_running_loop()
        with InheritedSockets(self.handover_path) as inherited:
            start_task = loop.create_task(gateway.start(inherited, warmed=self.wait_for_warmup))
            if not await _wait_for_start(start_task, shutdown.event):
                return ()
            urls = start_task.result()
            tune_gc()
            if handover is not None:
                handover.listen()
            inherited.confirm_serving()
        return urls


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


_MAX_PROCESSES: Final = 256
"""The largest number of processes."""


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
@click.option(
    "--port", type=click.IntRange(0, 65535), help="The port to listen on; only without FILE."
)
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
def serve(target: str | None, port: int | None, log_level: str, **options: Any) -> None:
    """Serve a configuration (FILE), a worker (http://…), a local MODEL, or the built-in model.

    A model is a folder, a name on the Hugging Face hub, or package:NAME. Without TARGET, it serves
    a small built-in model if torch is installed, and an echo otherwise. TARGET
    "conformance" serves the models of the conformance cases (tests/conformance in a checkout).

    Several processes share each limit of FILE, and a supervisor process restarts them.

    SIGHUP reloads FILE. SIGTERM and SIGINT stop the gateway when all running requests have ended;
    on SIGTERM it serves for limits.shutdown_delay first. To upgrade, run the same command with the
    same --handover again: the new process takes over the listeners, and the old one ends when its
    requests have ended.
    """
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    fetch, file = _make_fetcher(target, port, insecure=options["insecure"])
    load_config, watched_file = ConfigReader(fetch), file if options["watch"] else None
    try:
        initial_config = load_config()
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    if options["processes"] == 1:
        sys.exit(
            run_gateway(initial_config, load_config, watched_file, handover=options["handover"])
        )
    if options["handover"] is not None:
        raise click.UsageError("--handover works only with one process")
    from gateway.multiprocess.supervisor import (  # noqa: PLC0415 - one process needs none
        ServePlan,
        run_supervisor,
    )

    sys.exit(
        run_supervisor(
            ServePlan(
                initial_config, load_config, options["processes"], watched_file, log_level.upper()
            )
        )
    )


def _make_fetcher(
    target: str | None, port: int | None, *, insecure: bool
) -> tuple[ConfigFetcher, str | None]:
    """The source of the configuration, and its file if it has one."""
    if target is not None and Path(target).is_file() and not target.endswith(".gguf"):
        if port is not None:
            raise click.UsageError("--port can't be used with FILE, which sets the listeners")
        return make_file_fetcher(target, insecure=insecure), target
    name, values = _choose_built_in(target)
    env = values if port is None else {**values, "PORT": str(port)}
    text, shown_name = read_built_in_config(name)
    return partial(ConfigText, text.encode(), shown_name, env, insecure), None


def _choose_built_in(target: str | None) -> tuple[str, Mapping[str, str]]:
    """The name of the built-in configuration, and the values of its variables."""
    match target:
        case None:
            return ("local" if _is_torch_installed() else "echo"), {}
        case str() if target.startswith(("http://", "https://")):
            return "proxy", {"WORKER": target.rstrip("/").removesuffix("/v1")}
        case "conformance":
            return "conformance", {}
        case str() if target.endswith((".yaml", ".yml", ".json")):
            raise click.UsageError(f"no such file: {target}")
        case _:
            return "local", {"MODEL": target}


def read_built_in_config(name: str) -> tuple[str, str]:
    """The text of a built-in configuration, and its name in messages."""
    file = resources.files("gateway.cli") / "defaults" / f"{name}.yaml"
    return file.read_text("utf-8"), f"<built-in {name}.yaml>"


def _is_torch_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def run_gateway(
    initial_config: LoadedConfig,
    load_config: LoadConfig,
    watched_file: str | None = None,
    *,
    wait_for_warmup: bool = False,
    handover: str | None = None,
) -> int:
    """Serve ``initial_config`` until a signal to stop. Returns the exit code.

    ``load_config`` reloads the configuration on SIGHUP, or when ``watched_file`` changes. With
    ``wait_for_warmup`` the ports are opened only after every backend has warmed up.
    ``handover``: see ``gateway.runtime.handover``.
    """
    raise_fd_limit()
    settings = initial_config.config.observe.access_log
    with (
        open_access_log(settings.buffer, log_requests=settings.format != "off") as access_log,
        asyncio.Runner(loop_factory=get_loop_factory()) as runner,
    ):
        process = ServerProcess(
            initial_config, load_config, watched_file, access_log, wait_for_warmup, handover
        )
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
@click.option("--threads", type=int, help="CPU threads; by default, as many as torch chooses.")
@click.option(
    "--task",
    type=click.Choice(["generate", "embedding", "rerank"]),
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
def worker(log_level: str, *, insecure: bool, **options: Any) -> None:
    """Serve one local model to gateways, with the OpenAI API and the engine's own parameters.

    It listens once the model is loaded. A gateway uses it in a pool with `protocol: openai` and
    `profile: interlingua`.

    Exit codes: 0 stopped, 1 the model can't be served or the port is in use, 2 wrong usage.
    """
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    load_config = partial(
        load_bytes,
        msgspec.json.encode(build_worker_config(**options)),
        "<worker>",
        env=os.environ,
        insecure=insecure,
    )
    try:
        initial_config = load_config()
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    sys.exit(run_gateway(initial_config, load_config, wait_for_warmup=True))


def build_worker_config(
    path: str, *, name: str | None, host: str, port: int, key: str | None, **settings: Any
) -> dict[str, Any]:
    """The configuration of a worker. ``settings`` are those of a local model."""
    config: dict[str, Any] = msgspec.yaml.decode(read_built_in_config("worker")[0])
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    config["listeners"][0]["address"] = address
    options = {key: value for key, value in settings.items() if value is not None}
    config["backends"]["engine"] |= {"path": path, **options}
    config["models"] = {name or _derive_model_name(path): {"backend": "engine"}}
    if key is not None:
        digest = hashlib.sha256(key.encode()).hexdigest()
        config["keys"] = [{"name": "gateway", "sha256": digest}]
    return config


def _derive_model_name(path: str) -> str:
    """The name of the folder or file, or else of the package or of the model on the hub."""
    location = Path(path).expanduser()
    if location.exists():
        return location.resolve().name.removesuffix(".gguf")
    return path.removeprefix("package:")
