"""The command ``interlingua``: its commands are in ``gateway.cli``."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import click

from backends.log_format import escape_controls
from gateway import __version__

_GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Serve": {
        "serve": "gateway.cli.serve:serve",
        "worker": "gateway.cli.worker:worker",
    },
    "Write a configuration": {
        "init": "gateway.cli.init:init",
        "check": "gateway.cli.config:check",
        "diff": "gateway.cli.diff:diff",
        "schema": "gateway.cli.config:schema",
        "keys": "gateway.cli.keys:keys",
        "migrate": "gateway.cli.migrate:migrate",
    },
    "Operate": {
        "explain": "gateway.cli.explain:explain_command",
        "rollout": "gateway.cli.rollout:rollout",
        "usage": "gateway.cli.usage:usage",
        "probe": "gateway.cli.probe:probe",
        "models": "gateway.cli.models:models",
    },
    "Decide by evidence": {
        "ab": "gateway.cli.ab:ab",
        "replay": "gateway.cli.replay:replay",
        "compare": "gateway.cli.compare:compare",
    },
}
"""The commands by group. A command is imported when it is called: most need a part of the rest."""

_COMMANDS: Final = {name: entry for group in _GROUPS.values() for name, entry in group.items()}


_MAX_SUMMARY: Final = 200
"""Characters of a command's summary, which is wrapped."""


class GroupedCommand(click.Group):
    """A command whose help lists its commands by group."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See click.Group."""
        del ctx
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See click.Group."""
        del ctx
        return _import_command(cmd_name) if cmd_name in _COMMANDS else None

    def invoke(self, ctx: click.Context) -> Any:
        """See click.Group. An error may quote a worker or a file."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error)["message"] = escape_controls(error.message)  # click's type is final
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click.Group."""
        del ctx
        for title, group in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name, _import_command(name).get_short_help_str(_MAX_SUMMARY))
                        for name in group
                    ]
                )


def _import_command(name: str) -> click.Command:
    module, _, attribute = _COMMANDS[name].partition(":")
    command: click.Command = getattr(import_module(module), attribute)
    return command


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
