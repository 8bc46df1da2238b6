"""``interlingua check`` and ``interlingua schema``: is this file good, and what may it hold."""

import os
import sys
from typing import Any

import click
import msgspec

from gateway.config import Config, ConfigError, read
from gateway.config import schema as json_schema


@click.command()
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the complaints as JSON.")
@click.option(
    "--insecure-no-auth",
    "insecure",
    is_flag=True,
    help="Take listeners beyond this machine although no keys are configured.",
)
def check(file: str, *, as_json: bool, insecure: bool) -> None:
    """Check the configuration FILE, without starting anything.

    Exit codes: 0 good, 1 complaints, 2 the file can't be read.
    """
    complaints: list[dict[str, Any]] = []
    said = ""
    try:
        said = f"{file}: good: {_summary(read(file, env=os.environ, insecure=insecure))}"
    except OSError as error:
        raise click.UsageError(f"{file} can't be read: {error.strerror}") from None
    except ConfigError as error:
        complaints = msgspec.to_builtins(error.complaints)
        said = str(error)
    if as_json:
        click.echo(msgspec.json.encode({"file": file, "complaints": complaints}))
    else:
        click.echo(said, err=bool(complaints))
    sys.exit(1 if complaints else 0)


def _summary(config: Config) -> str:
    parts = {
        "listener": len(config.listeners),
        "backend": len(config.backends),
        "model": len(config.models),
        "key": len(config.keys),
    }
    return ", ".join(f"{n} {what}{'s' if n != 1 else ''}" for what, n in parts.items())


@click.command()
def schema() -> None:
    """Print the JSON Schema of a configuration."""
    click.echo(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2))
