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
from gateway.terminal import print_text

_ASSIGNMENTS: Final = {
    "random": "  requests are assigned at random",
    "reassigned": "  users are identified in another way, and all are reassigned",
}


@click.command()
@click.argument("old", type=click.Path())
@click.argument("new", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@click.option(
    "--insecure-no-auth",
    "insecure",
    is_flag=True,
    help="Accept listeners on other addresses than loopback although no keys are configured.",
)
def diff(old: str, new: str, *, as_json: bool, insecure: bool) -> None:
    """Show the differences between the configurations OLD and NEW.

    Names that are added (+), removed (-) or changed (~); which share of each model's users moves
    to another version; and what needs a restart.

    Exit codes: 0 no difference, 1 differences, 2 a file is invalid or can't be read.
    """
    difference = diff_configs(
        _load_config(old, insecure=insecure), _load_config(new, insecure=insecure)
    )
    if as_json:
        print_text(msgspec.json.format(msgspec.json.encode(difference), indent=2))
    else:
        print_text("\n".join(format_diff(difference)))
    sys.exit(0 if difference.is_empty else 1)


def _load_config(file: str, *, insecure: bool) -> Config:
    try:
        return load_file(file, env=os.environ, insecure=insecure).config
    except ConfigError as error:
        print_text(str(error), err=True)
        sys.exit(2)


def format_diff(difference: ConfigDiff) -> Iterator[str]:
    """The lines that show a difference."""
    if difference.is_empty:
        yield "no difference"
    if difference.sections:
        yield "sections"
        yield from (f"  ~ {name}" for name in difference.sections)
    for kind, changes in difference.names.items():
        if not changes.is_empty:
            yield kind
            yield from _name_lines(changes)
    for shift in difference.traffic:
        yield from _traffic_lines(shift)
    if difference.restart_required:
        yield "restart required"
        yield from (f"  {path}: {reason}" for path, reason in difference.restart_required.items())


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
