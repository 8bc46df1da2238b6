"""``interlingua compare``: two recordings, or a recording and its replay."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from msgspec import Struct

from gateway.cli.console import print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.observability.recording import RecordedRequest
    from gateway.tools.compare.comparison import CompareReport

_LEFT_COLUMNS: Final = (0, 6)
_EXAMPLES: Final = 3
"""Examples on a terminal; the page has more."""
_MAX_LINE: Final = 200


class _Options(Struct, frozen=True):
    """The options of the command."""

    recordings: str | None
    confidence: float
    embeddings: str | None
    as_json: bool
    html: str | None
    fail_on: str | None


@click.command()
@click.argument("a")
@click.argument("b")
@click.option(
    "--in",
    "recordings",
    metavar="RECORDINGS",
    type=click.Path(exists=True),
    help="Compare two versions in one recording: A and B are MODEL@VERSION.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(50, 100, min_open=True, max_open=True),
    default=95.0,
    show_default=True,
    help="The confidence level of the intervals and of all verdicts together, in percent.",
)
@click.option(
    "--embeddings",
    metavar="MODEL",
    help="A local embedding model that measures how similar texts are; by default characters do.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--html", metavar="FILE", help="Also write the report as one HTML page.")
@click.option(
    "--fail-on",
    type=click.Choice(["worse", "different"]),
    help="Exit with 1 if a measure is worse, or if any measure differs.",
)
def compare(a: str, b: str, **arguments: Any) -> None:
    """Compare two recordings: errors, losses, tool calls, lengths, latency, texts.

    \b
      interlingua compare recordings/ recordings-replay/ --html report.html
      interlingua compare chat@1 chat@2 --in recordings/

    A and B are folders or files that a gateway with ``record``, or interlingua replay, wrote. A
    replay is compared with its recording request by request. Two other recordings, or two versions
    with --in, are compared as a whole; of versions, only the requests that a traffic split
    assigned, if there are any.

    Exit codes: 0 compared, 1 what --fail-on says, 2 wrong usage or nothing to compare.
    """  # noqa: D301 - click reads \b
    from gateway.tools.compare.comparison import (  # noqa: PLC0415 - only here
        compare as compare_requests,
    )
    from gateway.tools.compare.comparison import compare_text  # noqa: PLC0415 - as above

    options = _Options(**arguments)
    sides = _read_sides(a, b, options.recordings)
    if not all(sides):
        empty = a if not sides[0] else b
        raise click.UsageError(f"there are no recorded requests of {empty}")
    similarity, method = compare_text, "common characters"
    if options.embeddings is not None:
        from gateway.tools.compare.embeddings import EmbeddingSimilarity  # noqa: PLC0415 - as above

        similarity = EmbeddingSimilarity(options.embeddings)
        method = f"cosine of {options.embeddings}"
    report = compare_requests(
        (a, b),
        *sides,
        confidence=options.confidence / 100,
        similarity=similarity,
        similarity_method=method,
    )
    if options.html is not None:
        _write_page(report, options.html)
    if options.as_json:
        click.echo(msgspec.json.encode(report))
    else:
        _print_report(report, options.html)
    sys.exit(_choose_exit_code(report, options.fail_on))


def _choose_exit_code(report: "CompareReport", fail_on: str | None) -> int:
    verdicts = {result.verdict for result in report.measures}
    if fail_on == "different":
        return int(not verdicts.isdisjoint({"worse", "better", "different"}))
    return int(fail_on == "worse" and "worse" in verdicts)


def _read_sides(
    a: str, b: str, recordings: str | None
) -> "tuple[list[RecordedRequest], list[RecordedRequest]]":
    """The requests of both sides. Raises UsageError."""
    if recordings is None:
        return _read(a), _read(b)
    requests = _read(recordings)
    return _select_version(requests, a), _select_version(requests, b)


def _read(path: str) -> "list[RecordedRequest]":
    from gateway.observability.recording import read_recordings  # noqa: PLC0415 - only here

    if not Path(path).exists():
        raise click.UsageError(f"no such recording: {path}; versions need --in RECORDINGS")
    try:
        reader = read_recordings(path)
        requests = list(reader)
    except OSError as error:
        raise click.UsageError(f"{path} can't be read: {error.strerror}") from None
    if reader.skipped_lines:
        click.echo(f"{path}: {reader.skipped_lines} damaged lines are left out", err=True)
    return requests


def _select_version(requests: "Iterable[RecordedRequest]", target: str) -> "list[RecordedRequest]":
    """The requests that this version answered. Raises UsageError."""
    model, at, version = target.rpartition("@")
    if not at:
        raise click.UsageError(f"{target}: with --in, write MODEL@VERSION")
    found = [one for one in requests if (one.model, one.version) == (model, version)]
    return [one for one in found if one.split and not one.rule] or found


def _write_page(report: "CompareReport", file: str) -> None:
    from gateway.tools.compare.page import render_page  # noqa: PLC0415 - only here

    try:
        Path(file).write_text(render_page(report), "utf-8")
    except OSError as error:
        raise click.UsageError(f"{file} can't be written: {error.strerror}") from None


def _print_report(report: "CompareReport", html: str | None) -> None:
    from gateway.tools.compare.text import (  # noqa: PLC0415 - only here
        HEADINGS,
        describe_pairing,
        list_notes,
        list_rows,
    )

    click.echo(f"A: {report.a}\nB: {report.b}\n{describe_pairing(report)}\n")
    print_table(HEADINGS, [*list_rows(report)], left_aligned=_LEFT_COLUMNS)
    for note in list_notes(report):
        click.echo(f"\n{note}")
    for example in report.examples[:_EXAMPLES]:
        click.echo(f"\n{example.id} {example.reason}")
        for name, text in (("prompt", example.prompt), ("A", example.a), ("B", example.b)):
            line = " ".join(text.split())
            click.echo(f"  {name}: {line[:_MAX_LINE]}")
    if html is not None:
        click.echo(f"\nThe report is in {html}")
