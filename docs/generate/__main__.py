"""``interlingua docs``: the reference pages, made from what the gateway runs on."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

if TYPE_CHECKING:
    from gateway.reference import Carrier


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--check", "only_check", is_flag=True, help="Write nothing; name what is stale.")
def docs(folder: Path, *, only_check: bool) -> None:
    """Write the reference pages into FOLDER.

    Exit codes: 0 good, 1 a page is stale, 2 wrong usage.
    """
    pages = made(click.get_current_context().find_root().command)
    stale = [name for name, text in pages.items() if _held(folder / name) != text]
    if only_check:
        for name in stale:
            click.echo(f"{folder / name} is stale; write it anew with: make docs", err=True)
        sys.exit(1 if stale else 0)
    folder.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (folder / name).write_text(pages[name], "utf-8")
        click.echo(f"wrote {folder / name}", err=True)


def made(command: click.Command) -> Mapping[str, str]:
    """Every page by its file's name, of all that the registries hold, and of the whole command."""
    from gateway.config.dialects import Dialects  # noqa: PLC0415 - no other verb needs these
    from gateway.measured import PARTS  # noqa: PLC0415
    from gateway.reference import Spoken, pages  # noqa: PLC0415
    from protocols import DIALECTS  # noqa: PLC0415

    known = Dialects(DIALECTS)
    every = [
        Spoken(name, {profile: known.make(name, profile, {}) for profile in known.profiles(name)})
        for name in known.names
    ]
    workers = {
        f"{one.name} {profile}": cast("Carrier", dialect)
        for one in every
        for profile, dialect in one.profiles.items()
    }
    spoken = [one for one in every if known.speaks_to_clients(one.name)]
    return pages(spoken, {**workers, **_local()}, PARTS, command)


def _local() -> Mapping[str, "Carrier"]:
    """What answers in this process's own stead, as the built-in configuration has it."""
    from gateway.app import surroundings  # noqa: PLC0415 - as above
    from gateway.commands.serve import built_in  # noqa: PLC0415
    from gateway.config import load  # noqa: PLC0415
    from gateway.making import make_backend  # noqa: PLC0415

    config = load(*built_in("local"), env={})
    return {
        settings.kind: make_backend(settings, surroundings())
        for settings in config.backends.values()
    }


def _held(file: Path) -> str:
    return file.read_text("utf-8") if file.is_file() else ""
