"""``interlingua migrate``: the configuration of another gateway becomes one of this."""

import sys
from pathlib import Path

import click
import msgspec

from gateway.config import ConfigError

_LEFT_OUT = 3
"""The exit code where not all was carried over."""


@click.group()
def migrate() -> None:
    """Carry the configuration of another gateway over."""


@migrate.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--write",
    "out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="Write it there; left out, to standard output.",
)
@click.option("--strict", is_flag=True, help="Write nothing unless all of it is carried over.")
@click.option("--json", "as_json", is_flag=True, help="Print the file and the notes as JSON.")
def litellm(file: Path, out: Path | None, *, strict: bool, as_json: bool) -> None:
    """Make a configuration of FILE, a config.yaml of the LiteLLM proxy.

    Models, aliases, weights, fallbacks, timeouts, retries and keys are carried over. What is left
    out, changed or no longer needed is told on standard error, each with its place in FILE. Secrets
    stay references to the environment. `interlingua check` takes what comes out.

    Exit codes: 0 all of it is carried over, 1 nothing is written, 2 wrong usage, 3 written, but
    something is left out.
    """
    from gateway.tools.migrate import migrate as migrated  # noqa: PLC0415 - no other verb needs it

    try:
        found = migrated(file.read_bytes(), str(file))
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    for note in found.notes:
        click.echo(note.text(str(file)), err=True)
    if found.text is None or (strict and not found.whole):
        why = "something is left out" if found.text else f"no model of {file} can be served here"
        click.echo(f"nothing is written: {why}", err=True)
        sys.exit(1)
    if out is not None:
        out.write_text(found.text, "utf-8")
    elif not as_json:
        click.echo(found.text, nl=False)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    sys.exit(0 if found.whole else _LEFT_OUT)
