"""The command ``interlingua``: its verbs are in ``gateway.commands``."""

import click

from gateway import __version__
from gateway.commands.ab import ab
from gateway.commands.check import check, schema
from gateway.commands.diff import diff
from gateway.commands.explain import explain_command
from gateway.commands.keys import keys
from gateway.commands.migrate import migrate
from gateway.commands.probe import probe
from gateway.commands.serve import serve
from gateway.commands.usage import usage
from gateway.commands.worker import worker


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
