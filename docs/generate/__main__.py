"""``python -m docs.generate FOLDER``: write the reference pages from the code."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import click
from msgspec import Struct

from backends.interfaces import Backend, BackendRequest
from docs.generate.commands import commands_page, metrics_page
from docs.generate.configuration import configuration_page
from docs.generate.pairs import pair_table
from docs.generate.protocols import (
    LossReporter,
    ProtocolProfiles,
    errors_page,
    header_table,
    hosted_api_table,
    parameters_page,
    response_header_table,
    stateful_table,
    worker_tables,
)
from gateway.cli import main as interlingua
from gateway.cli.built_in import read_built_in_config
from gateway.config.loader import load_text
from gateway.config.registry import ProtocolRegistry
from gateway.observability.metrics.catalog import METRIC_GROUPS
from gateway.runtime.build import build_backend
from gateway.runtime.gateway import build_services
from protocols import PROTOCOLS
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import Request
from protocols.openai.hosted_apis import HOSTED_APIS


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="Write nothing; name the stale pages.")
def main(folder: Path, *, check: bool) -> None:
    """Write the reference pages into FOLDER.

    Exit codes: 0 good, 1 a page is stale, 2 wrong usage.
    """
    pages = generate_pages()
    stale = [name for name, text in pages.items() if _read(folder / name) != text]
    if check:
        for name in stale:
            click.echo(f"{folder / name} is stale; generate it with: make docs", err=True)
        sys.exit(1 if stale else 0)
    folder.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (folder / name).write_text(pages[name], "utf-8")
        click.echo(f"wrote {folder / name}", err=True)


def generate_pages() -> Mapping[str, str]:
    """Every page by its file name."""
    registry = ProtocolRegistry(PROTOCOLS)
    every = [
        ProtocolProfiles(
            name,
            {
                profile: registry.create_adapter(name, profile, {})
                for profile in registry.get_profiles(name)
            },
        )
        for name in registry.names
    ]
    workers = {
        f"{one.name} {profile}": cast("LossReporter", adapter)
        for one in every
        if registry.serves_workers(one.name)
        for profile, adapter in one.profiles.items()
    }
    clients = [one for one in every if registry.serves_clients(one.name)]
    defaults = {
        one.name: cast("LossReporter", one.default)
        for one in every
        if registry.serves_workers(one.name)
    }
    tables = worker_tables(clients, {**workers, **_local_backends()})
    return {
        "protocols.md": "\n".join(
            (
                parameters_page(clients),
                stateful_table(clients),
                header_table(clients),
                response_header_table(clients),
                hosted_api_table(HOSTED_APIS),
                pair_table(clients, {**defaults, **_local_backends()}),
                tables,
            )
        ),
        "errors.md": errors_page(clients),
        "configuration.md": configuration_page(),
        "metrics.md": metrics_page(METRIC_GROUPS),
        "commands.md": commands_page(interlingua),
    }


class _BackendLosses(Struct):
    """Reports the losses of a backend."""

    backend: Backend

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``docs.generate.protocols.LossReporter``."""
        prepared = self.backend.prepare(BackendRequest(lambda: (request, names)))
        return prepared.unsupported_parameters


def _local_backends() -> Mapping[str, LossReporter]:
    """The backends of the built-in configuration that need no worker."""
    config = load_text(*read_built_in_config("local"), env={})
    return {
        settings.kind: _BackendLosses(build_backend(settings, build_services()))
        for settings in config.backends.values()
    }


def _read(file: Path) -> str:
    return file.read_text("utf-8") if file.is_file() else ""


if __name__ == "__main__":
    main(prog_name="python -m docs.generate")
