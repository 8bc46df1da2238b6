"""``interlingua worker``: one local model over HTTP, for gateways on other machines."""

import hashlib
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.commands.serve import read_built_in_config, run_gateway
from gateway.config.errors import ConfigError
from gateway.config.loader import load_bytes


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
