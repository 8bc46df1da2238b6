"""``interlingua migrate``: rewrite the configuration of another gateway for this one."""

import os
import sys
from pathlib import Path

import click
import msgspec

from gateway.cli.console import write_file
from gateway.config.errors import ConfigError
from gateway.terminal import print_text

_LEFT_OUT = 3
"""The exit code if something is left out."""


@click.group()
def migrate() -> None:
    """Rewrite the configuration of another gateway."""


@migrate.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--write",
    "out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="The file to write; by default, standard output.",
)
@click.option("--strict", is_flag=True, help="Write nothing if something would be left out.")
@click.option("--json", "as_json", is_flag=True, help="Print the file and the notes as JSON.")
def litellm(file: Path, out: Path | None, *, strict: bool, as_json: bool) -> None:
    """Write a configuration from FILE, a config.yaml of the LiteLLM proxy.

    Models, aliases, weights, fallbacks, timeouts, retries and keys are migrated. Settings that are
    left out, changed or no longer needed are listed on standard error, each with its position in
    FILE. Secrets stay references to the environment, with placeholders for those that are not set,
    so that `interlingua check` accepts the result.

    Exit codes: 0 nothing is left out, 1 nothing is written, 2 wrong usage, 3 written, but something
    is left out.
    """
    from gateway.tools.migrate.litellm import migrate as migrate_config  # noqa: PLC0415 - no other command needs it

    if out is not None and out.exists() and out.samefile(file):
        raise click.UsageError(f"--write {out} would overwrite the file that is migrated")
    try:
        migration = migrate_config(file.read_bytes(), str(file), os.environ)
    except ConfigError as error:
        print_text(str(error), err=True)
        sys.exit(1)
    for note in migration.notes:
        print_text(note.text(str(file)), err=True)
    if migration.text is None or (strict and not migration.is_complete):
        reason = "something is left out" if migration.text else f"no model of {file} is supported"
        print_text(f"nothing is written: {reason}", err=True)
        sys.exit(1)
    if out is not None:
        write_file(out, migration.text)
    elif not as_json:
        print_text(migration.text, nl=False)
    if as_json:
        print_text(msgspec.json.format(msgspec.json.encode(migration)))
    sys.exit(0 if migration.is_complete else _LEFT_OUT)
