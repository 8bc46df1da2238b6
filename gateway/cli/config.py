"""``interlingua check`` and ``interlingua schema``: check a configuration, and its schema."""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click
import msgspec

from gateway.cli.models import find_local_models, inspect_local_model, print_features
from gateway.config.errors import ConfigError, ConfigIssue
from gateway.config.jsonschema import build_schema as json_schema
from gateway.config.loader import load_bytes
from gateway.config.schema import Config
from gateway.config.suspect_settings import list_warnings
from gateway.terminal import print_styled, print_text, style_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.tools.connect_check import Finding


_COLOURS: Final = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command()
@click.argument("file", type=click.Path())
@click.option("--connect", is_flag=True, help="Also check workers, services and listeners.")
@click.option(
    "--model",
    "names",
    multiple=True,
    metavar="NAME",
    help="Also show what the local engine understands of this model.",
)
@click.option("--json", "as_json", is_flag=True, help="Print errors and findings as JSON.")
@click.option(
    "--insecure-no-auth",
    "insecure",
    is_flag=True,
    help="Accept listeners on other addresses than loopback although no keys are configured.",
)
def check(
    file: str, *, connect: bool, names: tuple[str, ...], as_json: bool, insecure: bool
) -> None:
    """Check the configuration FILE, without starting anything.

    With --connect, a file without errors is then checked against its environment: DNS, TCP, TLS
    and the protocol of each worker, the addresses and certificates of listeners, Redis, PostgreSQL,
    the issuer of tokens, collectors, installed versions and limits of the system. No check sends a
    request to a model.

    With --model, the tokenizer and the chat template of a local model are read, too, as by
    `interlingua models show`.

    Exit codes: 0 valid, perhaps with warnings, 1 errors in FILE or found by --connect, 2 the file
    can't be read.
    """
    try:
        loaded = load_bytes(Path(file).read_bytes(), file, env=os.environ, insecure=insecure)
    except OSError as error:
        raise click.UsageError(f"{file} can't be read: {error.strerror}") from None
    except ConfigError as error:
        if as_json:
            print_text(msgspec.json.encode({"file": file, "issues": error.issues}))
        else:
            _print_issues(error.filename, error.issues, "error", err=True)
        sys.exit(1)
    config, warnings = loaded.config, list_warnings(loaded)
    if not as_json:
        _print_issues(file, warnings, "warning", err=False)
        good = style_text("good", colour=_COLOURS["ok"])
        print_styled(style_text(f"{file}: "), good, f": {_format_summary(config)}")
    results = _check_connections(config) if connect else []
    local_models = {
        key: (settings, inspect_local_model(settings))
        for name in names
        for key, settings in find_local_models(config, name, file).items()
    }
    if as_json:
        report: dict[str, Any] = {"file": file, "issues": []} | (
            {"warnings": warnings} if warnings else {}
        )
        if connect:
            report["findings"] = results
        if names:
            report["models"] = {key: features for key, (_, features) in local_models.items()}
        print_text(msgspec.json.encode(report))
    else:
        for key, (settings, features) in local_models.items():
            print_features(key, settings, features)
        for result in results:
            _print_finding(result)
    sys.exit(1 if any(result.state == "error" for result in results) else 0)


def _print_issues(
    file: str, issues: "Sequence[ConfigIssue]", state: Literal["warning", "error"], *, err: bool
) -> None:
    """Print each issue with its place; only warnings are named as what they are."""
    prefix = "warning: " if state == "warning" else ""
    for issue in issues:
        place = style_text(issue.format_place(file), bold=True)
        message = style_text(f"{prefix}{issue.message}", colour=_COLOURS[state])
        at = style_text(f" (at {issue.path})") if issue.path else ""
        print_styled(place, ": ", message, at, err=err)
        if issue.hint:
            print_styled(style_text(f"    {issue.hint}", dim=True), err=err)


def _check_connections(config: Config) -> "Sequence[Finding]":
    from gateway.runtime.gateway import build_services  # noqa: PLC0415 - a plain check needs none
    from gateway.tools.connect_check import (  # noqa: PLC0415 - as above
        check_connections,
        check_host,
    )

    return [*check_host(), *asyncio.run(check_connections(config, build_services()))]


def _print_finding(result: "Finding") -> None:
    state = style_text(f"{result.state:7}", colour=_COLOURS[result.state])
    hint = f"; {result.hint}" if result.hint else ""
    print_styled(state, style_text(f"  {result.subject}: {result.message}{hint}"))


def _format_summary(config: Config) -> str:
    parts = {
        "listener": len(config.listeners),
        "backend": len(config.backends),
        "model": len(config.models),
        "key": len(config.keys),
    }
    return ", ".join(f"{n} {noun}{'s' if n != 1 else ''}" for noun, n in parts.items())


@click.command()
def schema() -> None:
    """Print the JSON Schema of a configuration."""
    print_text(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2))
