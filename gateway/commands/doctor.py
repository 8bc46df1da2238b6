"""``interlingua doctor``: what keeps a gateway from its work, before its clients find out."""

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Final

import click
import msgspec

from gateway.config import ConfigError, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.tools.doctor import Finding

_COLOURS: Final = {"ok": "green", "warn": "yellow", "bad": "red"}


@click.command()
@click.argument("file", type=click.Path(), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(file: str | None, *, as_json: bool) -> None:
    """Look whether a gateway with the configuration FILE could do its work here.

    What is installed, files and ports that the system allows, certificates, clocks, the name and
    the way to each worker and whether it speaks its dialect, and what is kept elsewhere. Nothing
    is asked of a model. Without FILE, only what is installed and what the system allows.

    Exit codes: 0 good, or good with warnings, 1 something is bad, 2 wrong usage.
    """
    from gateway.tools.doctor import installed  # noqa: PLC0415 - no other verb needs it

    findings = [*installed(), *(() if file is None else _of(file))]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(findings)))
    else:
        for finding in findings:
            click.echo(_line(finding), color=False if os.environ.get("NO_COLOR") else None)
    sys.exit(1 if any(finding.state == "bad" for finding in findings) else 0)


def _of(file: str) -> "Sequence[Finding]":
    """What is found of a configuration."""
    from gateway.app import surroundings  # noqa: PLC0415 - as above
    from gateway.tools.doctor import Finding, examine  # noqa: PLC0415 - as above

    try:
        config = read(file, env=os.environ, insecure=True)
    except OSError as error:
        raise click.UsageError(f"{file} can't be read: {error.strerror}") from None
    except ConfigError as error:
        return [
            Finding("bad", f"{file}:{one.line}:{one.column}", one.message)
            for one in error.complaints
        ]
    return [Finding("ok", file, "is good"), *asyncio.run(examine(config, surroundings()))]


def _line(finding: "Finding") -> str:
    state = click.style(f"{finding.state:4}", fg=_COLOURS[finding.state])
    mend = f"; {finding.mend}" if finding.mend else ""
    return f"{state}  {finding.what}: {finding.said}{mend}"
