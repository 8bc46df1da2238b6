"""The command ``interlingua``: its commands are in ``gateway.cli``."""

from collections.abc import Mapping, Sequence
from typing import Final

import click

from gateway import __version__
from gateway.cli.ab import ab
from gateway.cli.compare import compare
from gateway.cli.config import check, diff, schema
from gateway.cli.explain import explain_command
from gateway.cli.init import init
from gateway.cli.keys import keys
from gateway.cli.migrate import migrate
from gateway.cli.models import models
from gateway.cli.probe import probe
from gateway.cli.replay import replay
from gateway.cli.rollout import rollout
from gateway.cli.serve import serve, worker
from gateway.cli.usage import usage

_GROUPS: Final[Mapping[str, Sequence[click.Command]]] = {
    "Serve": (serve, worker),
    "Write a configuration": (init, check, diff, schema, keys, migrate),
    "Operate": (explain_command, rollout, usage, probe, models),
    "Decide by evidence": (ab, replay, compare),
}


_MAX_SUMMARY: Final = 200
"""Characters of a command's summary, which is wrapped."""


class GroupedCommand(click.Group):
    """A command whose help lists its commands by group."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click.Group."""
        del ctx
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (command.name or "", command.get_short_help_str(_MAX_SUMMARY))
                        for command in commands
                    ]
                )


@click.group(cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="interlingua")
def main() -> None:
    """A gateway between the clients and the workers of language models.

    \b
      interlingua serve                          a small built-in model, in every protocol
      interlingua serve http://127.0.0.1:8001    in front of one worker
      interlingua init && interlingua serve gateway.yaml

    Completion in bash: eval "$(_INTERLINGUA_COMPLETE=bash_source interlingua)"; zsh and fish alike.

    Exit codes: 0 good, 1 the configuration is wrong or the gateway failed, 2 wrong usage.
    """  # noqa: D301 - click reads \b


for _commands in _GROUPS.values():
    for _command in _commands:
        main.add_command(_command)
