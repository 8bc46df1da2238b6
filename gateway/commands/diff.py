"""``interlingua diff``: what a reload would change."""

import os
import sys
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec

from gateway.config import Config, ConfigError, Difference, difference, opened
from gateway.config.difference import Change, Group, Sharing

_HOW: Final = {
    "chance": ["  each request is sent by chance"],
    "anew": ["  users are told apart by something else, and shared out anew"],
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

    Names that come (+), go (-) or change (~); which share of the users of each model moves to
    another version; and what a gateway that runs can't take over.

    Exit codes: 0 no difference, 1 differences, 2 a file is wrong or can't be read.
    """
    found = difference(_opened(old, insecure=insecure), _opened(new, insecure=insecure))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        click.echo("\n".join(lines(found)))
    sys.exit(0 if found.is_empty else 1)


def _opened(file: str, *, insecure: bool) -> Config:
    try:
        return opened(file, env=os.environ, insecure=insecure).config
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(2)


def lines(found: Difference) -> Iterator[str]:
    """It as a person reads it."""
    if found.is_empty:
        yield "no difference"
    if found.settings:
        yield "settings"
        yield from _changes(found.settings, 2)
    for kind, group in found.groups.items():
        if not group.is_empty:
            yield kind
            yield from _group(group)
    for sharing in found.users:
        yield from _users(sharing)
    if found.fixed:
        yield "can't be reloaded"
        yield from (f"  {path}: {why}" for path, why in found.fixed.items())


def _group(group: Group) -> Iterator[str]:
    yield from (f"  + {name}" for name in group.come)
    yield from (f"  - {name}" for name in group.go)
    for name, changes in group.change.items():
        yield f"  ~ {name}"
        yield from _changes(changes, 6)


def _changes(changes: tuple[Change, ...], indent: int) -> Iterator[str]:
    for one in changes:
        yield f"{' ' * indent}{one.field}: {_text(one.before)} -> {_text(one.after)}"


def _users(sharing: Sharing) -> Iterator[str]:
    yield f"users of {sharing.model}"
    for version in sorted({**sharing.before, **sharing.after}):
        before, after = sharing.before.get(version, 0), sharing.after.get(version, 0)
        yield f"  {version}: {before:g}% -> {after:g}%"
    yield from _HOW.get(sharing.how, ())
    for move in sharing.moves:
        yield f"  {move.percent:.2f}% go from {move.before} to {move.after}"


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
