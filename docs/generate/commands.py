"""The page of all commands: how each is called, and what its options mean."""

import inspect
from collections.abc import Iterator
from typing import Final

import click

from gateway.reference.markdown import MADE, code, table

_INTRO: Final = """# Commands

Where a command may write JSON, that is for programs: its names stay. What goes wrong is said on
standard error, and shows in the exit code.
"""


def page(main: click.Command) -> str:
    """The page of a command and of all those below it."""
    context = click.Context(main, info_name="interlingua")
    return "\n".join([MADE, "", _INTRO, *_sections(main, context)])


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## {context.command_path}\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```\n"
    told = [one.get_help_record(context) for one in command.params]
    if rows := [(code(names), meaning) for names, meaning in filter(None, told) if meaning]:
        yield table(("option", "meaning"), rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (below := command.get_command(context, name)) is not None and not below.hidden:
                yield from _sections(below, click.Context(below, info_name=name, parent=context))
