"""The pages of the commands and of the metrics."""

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import click

from docs.generate.markdown import HEADER, code, table
from gateway.observability.metrics.definition import MergeMode, MetricDefinition

_COMMANDS_INTRO: Final = """# Commands

Errors are printed to standard error and reflected in the exit code. The JSON output of a command
is for programs: its field names are stable.
"""


_EXAMPLES: Final = re.compile(r"\x08\n((?:.+\n)+)")
"""Lines of a command's help that are not wrapped."""


def commands_page(main: click.Command) -> str:
    """The page of a command and its subcommands."""
    context = click.Context(main, info_name="interlingua")
    return "\n".join([HEADER, "", _COMMANDS_INTRO, *_command_sections(main, context)])


def _command_sections(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## {context.command_path}\n"
    text = inspect.cleandoc(command.help or "") + "\n"
    yield _EXAMPLES.sub(lambda lines: f"```text\n{textwrap.dedent(lines[1])}```\n", text)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```\n"
    records = [one.get_help_record(context) for one in command.params]
    if rows := [(code(names), meaning) for names, meaning in filter(None, records) if meaning]:
        yield table(("option", "meaning"), rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (below := command.get_command(context, name)) is not None and not below.hidden:
                yield from _command_sections(
                    below, click.Context(below, info_name=name, parent=context)
                )


# --- metrics --------------------------------------------------------------------------------------


_METRICS_INTRO: Final = """# Metrics

The metrics that the admin listener serves under `/metrics`, in Prometheus's text format. Times
are in seconds, sizes in bytes. Label values are configured names, never API keys, client
addresses or texts of requests. A model `*` accepts any name; beyond 500 combinations of model,
version and split, these labels are `_other`.

A histogram has the series `_bucket`, `_sum` and `_count`. A metric without a value yet has no
samples.

With several processes, the samples of all of them are summed. The last column names the
exceptions.
"""
_MERGED: Final[Mapping[MergeMode, str]] = {
    "sum": "",
    "largest": "the largest",
    "smallest": "the smallest",
    "supervisor": "from the supervisor",
}


def metrics_page(parts: Mapping[str, Sequence[MetricDefinition]]) -> str:
    """The page. ``parts`` are the metrics of each section."""
    head = ("name", "type", "labels", "meaning", "several processes")
    lines = [HEADER, "", _METRICS_INTRO]
    for name, metrics in parts.items():
        lines += [f"## {name}", "", table(head, map(_metric_row, metrics))]
    return "\n".join(lines)


def _metric_row(one: MetricDefinition) -> tuple[str, ...]:
    labels = ", ".join(map(code, one.label_names))
    return code(one.sample_name), one.kind, labels, one.help, _MERGED[one.merge_mode]
