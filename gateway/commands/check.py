"""``interlingua check`` and ``interlingua schema``: check a configuration, and its schema."""

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from gateway.config.errors import ConfigError
from gateway.config.jsonschema import build_schema as json_schema
from gateway.config.loader import load_config
from gateway.config.schema import Config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.tools.connect_check import Finding


_COLOURS: Final = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command()
@click.argument("file", type=click.Path())
@click.option("--connect", is_flag=True, help="Then check workers, services and listeners, too.")
@click.option("--json", "as_json", is_flag=True, help="Print mistakes and findings as JSON.")
@click.option(
    "--insecure-no-auth",
    "insecure",
    is_flag=True,
    help="Take listeners beyond this machine although no keys are configured.",
)
def check(file: str, *, connect: bool, as_json: bool, insecure: bool) -> None:
    """Check the configuration FILE, without starting anything.

    With --connect, a file without mistakes is then checked against its surroundings: DNS, TCP, TLS
    and the protocol of each worker, the addresses and certificates of listeners, Redis, PostgreSQL,
    the issuer of tokens, collectors, installed versions and limits of the system. No check sends a
    request to a model.

    Exit codes: 0 good, or good with warnings, 1 mistakes in FILE, or an error found by --connect,
    2 the file can't be read.
    """
    try:
        config = load_config(file, env=os.environ, insecure=insecure)
    except OSError as error:
        raise click.UsageError(f"{file} can't be read: {error.strerror}") from None
    except ConfigError as error:
        if as_json:
            click.echo(msgspec.json.encode({"file": file, "complaints": error.issues}))
        else:
            click.echo(str(error), err=True)
        sys.exit(1)
    if not as_json:
        click.echo(f"{file}: good: {_format_summary(config)}")
    findings = _check_connections(config) if connect else []
    if as_json:
        report: dict[str, Any] = {"file": file, "complaints": []}
        click.echo(msgspec.json.encode(report | ({"findings": findings} if connect else {})))
    else:
        for finding in findings:
            colour = False if os.environ.get("NO_COLOR") else None
            click.echo(_format_finding(finding), color=colour)
    sys.exit(1 if any(finding.state == "error" for finding in findings) else 0)


def _check_connections(config: Config) -> "Sequence[Finding]":
    from gateway.app import build_services  # noqa: PLC0415 - a check of the file alone needs none
    from gateway.tools.connect_check import check_connections, check_host

    return [*check_host(), *asyncio.run(check_connections(config, build_services()))]


def _format_finding(finding: "Finding") -> str:
    state = click.style(f"{finding.state:7}", fg=_COLOURS[finding.state])
    hint = f"; {finding.hint}" if finding.hint else ""
    return f"{state}  {finding.subject}: {finding.message}{hint}"


def _format_summary(config: Config) -> str:
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
