r"""Prints what commands show: text that no terminal obeys.

Names, texts and errors of clients, workers and files may hold terminal escapes, other controls, and
changes of the direction. Whatever is printed goes through this module, which writes them as
``\u001b``; a JSON document stays the same document by that.
"""

import os

import click

from backends.log_format import escape_controls


def print_text(text: str | bytes = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text or an encoded JSON document, by default with the end of a line."""
    shown = text if isinstance(text, str) else text.decode()
    click.echo(escape_controls(shown), err=err, nl=nl)


def style_text(
    text: str, *, colour: str | None = None, bold: bool | None = None, dim: bool | None = None
) -> str:
    """A part of a styled line."""
    return click.style(escape_controls(text), fg=colour, bold=bold, dim=dim)


def print_styled(*parts: str, err: bool = False) -> None:
    """Print a line of parts, each made by ``style_text``; NO_COLOR turns styles off."""
    click.echo("".join(parts), err=err, color=False if os.environ.get("NO_COLOR") else None)
