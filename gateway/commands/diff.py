"""``interlingua diff``: what a reload would change."""

import os
import sys
from collections.abc import Iterator
from typing import Final

import click
import msgspec

from gateway.config.diff import ConfigDiff, NameChanges, TrafficShift, diff_configs
from gateway.config.errors import ConfigError
from gateway.config.loader import load_file
from gateway.config.schema import Config

_ASSIGNMENTS: Final = {
    "random": "  each request is sent by chance",
    "reassigned": "  users are told apart by something else, and assigned anew",
}


@click.command()
@click.argument("old", type=click.Path())
@click.argument("new", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON document.")
@click.option(
    "--insecure-no-auth",
    "insecure",
    is_flag=True,
    help="Take listeners beyond this machine although no keys are configured.",
)
def diff(old: str, new: str, *, as_json: bool, insecure: bool) -> None:
    """Tell what differs between the configurations OLD and NEW.

    Names that are added (+), removed (-) or changed (~); which share of each model's users moves
    to another version; and what needs a restart.

    Exit codes: 0 no difference, 1 differences, 2 a file is wrong or can't be read.
    """
    found = diff_configs(_load_config(old, insecure=insecure), _load_config(new, insecure=insecure))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        click.echo("\n".join(format_diff(found)))
    sys.exit(0 if found.is_empty else 1)


def _load_config(file: str, *, insecure: bool) -> Config:
    try:
        return load_file(file, env=os.environ, insecure=insecure).config
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(2)


def format_diff(found: ConfigDiff) -> Iterator[str]:
    """It as a person reads it."""
    if found.is_empty:
        yield "no difference"
    if found.sections:
        yield "sections"
        yield from (f"  ~ {name}" for name in found.sections)
    for kind, changes in found.names.items():
        if not changes.is_empty:
            yield kind
            yield from _name_lines(changes)
    for shift in found.traffic:
        yield from _traffic_lines(shift)
    if found.restart_required:
        yield "restart required"
        yield from (f"  {path}: {why}" for path, why in found.restart_required.items())


def _name_lines(changes: NameChanges) -> Iterator[str]:
    yield from (f"  + {name}" for name in changes.added)
    yield from (f"  - {name}" for name in changes.removed)
    yield from (f"  ~ {name}" for name in changes.changed)


def _traffic_lines(shift: TrafficShift) -> Iterator[str]:
    yield f"traffic of {shift.model}"
    for version in sorted({**shift.before, **shift.after}):
        before, after = shift.before.get(version, 0), shift.after.get(version, 0)
        yield f"  {version}: {before:g}% -> {after:g}%"
    if shift.moved is None:
        yield _ASSIGNMENTS[shift.assignment]
    else:
        yield f"  {shift.moved:.2f}% of users move to another version"
