"""The command ``interlingua``: its verbs are in ``gateway.cli``."""

import click

from gateway import __version__
from gateway.cli.ab import ab
from gateway.cli.config import check, diff, schema
from gateway.cli.explain import explain_command
from gateway.cli.keys import keys
from gateway.cli.migrate import migrate
from gateway.cli.probe import probe
from gateway.cli.serve import serve, worker
from gateway.cli.usage import usage


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="interlingua")
def main() -> None:
    """A gateway between the clients and the workers of language models.

    Exit codes: 0 good, 1 the configuration is wrong or the gateway failed, 2 wrong usage.
    """


_COMMANDS = (
    serve, worker, check, schema, diff, ab, explain_command, keys, usage, migrate, probe,
)  # fmt: skip

for command in _COMMANDS:
    main.add_command(command)
