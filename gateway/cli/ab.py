"""``interlingua ab``: compare two versions of a traffic split."""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urljoin

import click
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.cli.admin_client import AdminClient
from gateway.cli.console import print_table
from gateway.cli.option_types import SENT_KEY, NumberRange
from gateway.cli.usage import parse_since, read_usage_source
from gateway.config.errors import ConfigError
from gateway.config.loader import load_config
from gateway.config.schema import Config, map_model_names
from gateway.terminal import print_text
from protocols.core.json_text import decode_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.evidence.sources import Evidence, SegmentLabel, UsageQuery
    from gateway.evidence.versions import Comparison, ComparisonReport


_URL = re.compile(r"https?://[^/?#]+([^?#]*)")
_PLAN_HEADINGS: Final = ("", "now", "difference", "requests per version")


class _StatusModel(Struct):
    name: str
    aliases: tuple[str, ...] = ()


class _StatusModels(Struct):
    """The part of the gateway's status that names its models."""

    models: tuple[_StatusModel, ...]


class _Options(Struct, frozen=True):
    """The options of the command."""

    model: str
    a: str | None
    b: str | None
    split: str | None
    since: str | None
    confidence: float
    everything: bool
    config: str | None
    key: str | None
    difference: float
    plan: bool
    outcome: tuple[str, ...]
    by: "SegmentLabel | None"
    unit: str
    as_json: bool


@click.command()
@click.argument("source")
@click.option("--model", required=True, help="The model, by its public name.")
@click.option(
    "--a", metavar="VERSION", help="The version to compare with; by default, the first of two."
)
@click.option("--b", metavar="VERSION", help="The version to compare; by default, the other one.")
@click.option("--split", metavar="NAME", help="The traffic split, if the model had several.")
@click.option(
    "--since",
    metavar="AGO|TIME",
    help="Read a log from 30m, 24h or 7d ago on, or from a time on.",
)
@click.option(
    "--confidence",
    type=NumberRange(50, 100, min_open=True, max_open=True),
    default=95.0,
    show_default=True,
    help="The confidence level of the intervals, in percent.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Include requests that no traffic split assigned."
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="A configuration: check that the requests fit the weights of its traffic split.",
)
@click.option(
    "--key",
    type=SENT_KEY,
    envvar="INTERLINGUA_ADMIN_KEY",
    help="The admin listener's key; prefer the environment variable INTERLINGUA_ADMIN_KEY.",
)
@click.option(
    "--difference",
    type=NumberRange(0, 1000, min_open=True),
    default=10.0,
    show_default=True,
    help="The smallest difference that matters, in percent.",
)
@click.option(
    "--plan", is_flag=True, help="Print how many requests a test needs, and compare nothing."
)
@click.option(
    "--outcome",
    multiple=True,
    metavar="NAME",
    help="Compare feedback of this name; NAME=CATEGORY for the share of a category. Repeatable.",
)
@click.option(
    "--by",
    type=click.Choice(("key", "rule", "protocol")),
    help="Also compare the outcomes in each segment.",
)
@click.option(
    "--unit",
    type=click.Choice(("user", "request")),
    default="user",
    show_default=True,
    help="What counts once: a user of a sticky split, or each request that was judged.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def ab(source: str, **arguments: Any) -> None:
    """Compare two versions of a model's traffic split.

    \b
      interlingua ab access.log --model chat
      interlingua ab http://127.0.0.1:8081/metrics --model chat --difference 5
      interlingua ab access.log --model chat --plan
      interlingua ab usage.sqlite --model chat --outcome thumbs_up --by key

    SOURCE is an access log (a file, or - for standard input), a page of metrics, its URL, such as
    http://127.0.0.1:8081/metrics, or the database of the setting observe.usage: an SQLite file or a
    postgresql:// URL. Logs and rows have exact values, a page of metrics only histograms. Only the
    database has feedback, which --outcome compares by a test that may be looked at at any time.

    Only requests that the traffic split assigned are compared: those that pin a version, or that a
    rule routes, are no random sample. A request that a fallback answered counts only for the
    version that failed. --model may be an alias if --config is given or SOURCE is a URL.

    Exit codes: 0 compared, 1 compared, but the requests do not fit the weights of --config, 2 wrong
    usage, a source that can't be read, or nothing to compare.
    """  # noqa: D301 - click reads \b
    from gateway.evidence.sources import UsageQuery  # noqa: PLC0415 - as above
    from gateway.evidence.versions import (  # noqa: PLC0415 - only here
        ComparisonError,
        build_report,
        describe_excluded,
    )

    options = _Options(**arguments)
    if options.everything and (options.split is not None or options.config is not None):
        raise click.UsageError("--all can't be used with --split or --config")
    options = replace(options, model=_resolve_alias(source, options))
    everything = options.everything or options.plan
    if options.by and not options.outcome:
        raise click.UsageError("--by goes with --outcome")
    query = UsageQuery(
        options.model,
        everything,
        parse_since(options.since),
        options.outcome,
        options.by or "",
        each_request=options.unit == "request",
    )
    evidence = _read_evidence(source, query, options.key)
    try:
        if options.plan:
            _print_plan(source, query, evidence, options)
            return
        comparison = _compare(evidence, options)
    except ComparisonError as error:
        lines = (f"{options.model}: {error}", *describe_excluded(evidence, query))
        raise click.UsageError("\n".join(lines)) from None
    report = build_report(source, query, evidence, comparison)
    if options.as_json:
        print_text(msgspec.json.encode(report))
    else:
        print_report(report)
    sys.exit(1 if comparison.ratio is not None and not comparison.ratio.is_plausible else 0)


def print_report(report: "ComparisonReport") -> None:
    from gateway.evidence.measures import LEFT_COLUMNS  # noqa: PLC0415 - only here

    print_text(f"{report.title()}\n{report.summary}\n")
    print_table(report.headings(), report.table(), left_aligned=LEFT_COLUMNS)
    if report.comparison.segments:
        print_text()
        _, _, *values = report.headings()
        headings = ("", "segment", "judged", "judged", *values[:-2])
        print_table(headings, report.segment_table(), left_aligned=(0, 1))
    print_text("\n".join(("", *report.verdict_lines(), "", *report.notes)))


def _print_plan(source: str, query: "UsageQuery", evidence: "Evidence", options: _Options) -> None:
    """Raises ComparisonError."""
    from gateway.evidence.versions import plan_test  # noqa: PLC0415 - only here

    plan = plan_test(source, query, evidence, options.difference / 100, options.confidence / 100)
    if options.as_json:
        print_text(msgspec.json.encode(plan))
        return
    print_text(
        f"{plan.model}: to tell a difference of {options.difference:g} % "
        f"from version {plan.version}\n"
    )
    print_table(_PLAN_HEADINGS, plan.table(), left_aligned=(0,))
    judgements = " (of feedback: judgements)" if options.outcome else ""
    print_text(
        f"\nEach version needs so many requests{judgements} to find such a difference with a "
        "probability of "
        f"80 %, at a confidence level of {options.confidence:g} %."
    )


def _resolve_alias(source: str, options: _Options) -> str:
    """The model's own name, by the configuration or the gateway's status, if one is known."""
    if options.config is not None:
        return map_model_names(_load(options.config).models).get(options.model, options.model)
    if _URL.fullmatch(source) is None:
        return options.model
    page = urljoin(source, "/-/status")
    try:
        status = decode_json(AdminClient(page, options.key, "status").get(), kind=_StatusModels)
    except (click.UsageError, msgspec.DecodeError):  # the page of metrics may lie elsewhere
        return options.model
    names = {alias: model.name for model in status.models for alias in model.aliases}
    return names.get(options.model, options.model)


def _compare(evidence: "Evidence", options: _Options) -> "Comparison":
    """Raises ComparisonError."""
    from gateway.evidence.versions import (  # noqa: PLC0415 - as above
        ComparisonError,
        check_split_ratio,
        compare_versions,
        select_versions,
    )

    for name in options.outcome:
        if name.partition("=")[0] not in evidence.feedback_names:
            listed = ", ".join(sorted(evidence.feedback_names)) or "none"
            raise ComparisonError(f"it has no feedback {name!r}; there is {listed}")
    if options.model not in evidence.models:
        listed = ", ".join(sorted(evidence.models)) or "none"
        raise ComparisonError(f"no such model; the source has {listed}")
    split, a, b = select_versions(evidence, options.split, options.a, options.b)
    comparison = compare_versions(
        evidence, split, (a, b), options.confidence / 100, options.difference / 100
    )
    if options.config is None:
        return comparison
    name, weights = _weights(options.config, options.model)
    if name != split:
        raise ComparisonError(f"{options.config} has the split {name!r}, not {split!r}")
    return replace(comparison, ratio=check_split_ratio(evidence, split, weights))


def _read_evidence(source: str, query: "UsageQuery", key: str | None) -> "Evidence":
    """Read the source. Raises UsageError."""
    from gateway.evidence.sources import (  # noqa: PLC0415 - as above
        SourceError,
        read_source,
        read_usage_rows,
    )

    try:
        if (extract := read_usage_source(source, query.model, query.since)) is not None:
            return read_usage_rows(extract, query)
        if query.outcomes:
            raise SourceError("--outcome needs the database of the setting observe.usage")
        if (match := _URL.fullmatch(source)) is not None:
            page = source if match[1].strip("/") else f"{source.rstrip('/')}/metrics"
            return read_source([AdminClient(page, key, "metrics").get()], query)
        if source == "-":
            return read_source(sys.stdin.buffer, query)
        with Path(source).open("rb") as file:
            return read_source(file, query)
    except SourceError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.UsageError(f"{source} can't be read: {error.strerror}") from None


def _weights(file: str, model: str) -> tuple[str, "Mapping[str, int]"]:
    """The name of a model's split, and its weights. Raises UsageError."""
    model_config = _load(file).models.get(model)
    if model_config is None or model_config.split is None:
        raise click.UsageError(f"{file} has no split of the model {model!r}")
    return model_config.split.name or model, model_config.split.weights


def _load(file: str) -> Config:
    """Load a configuration. Raises UsageError."""
    try:
        return load_config(file, env=os.environ, insecure=True)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
