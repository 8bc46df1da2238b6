"""``interlingua compare``: two recordings, or a recording and its replay."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from msgspec import Struct

from gateway.cli.console import print_table, write_file
from gateway.cli.option_types import NumberRange
from gateway.cli.usage import read_usage_source
from gateway.config.errors import ConfigError
from gateway.terminal import print_text
from protocols.core.errors import WorkerError
from protocols.core.units import PRINTABLE_ASCII, parse_worker_url

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.evidence.judge import FeedbackValues, Judging
    from gateway.evidence.recordings import CompareReport
    from gateway.observability.recording import RecordedRequest

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
    judge: str | None
    judge_url: str | None
    judge_key: str | None
    judge_at_most: int | None
    rubric: str | None
    feedback: str | None
    feedback_name: str


@click.command()
@click.argument("a")
@click.argument("b", required=False)
@click.option(
    "--in",
    "recordings",
    metavar="RECORDINGS",
    type=click.Path(exists=True),
    help="Compare two versions in one recording: A and B are MODEL@VERSION.",
)
@click.option(
    "--confidence",
    type=NumberRange(50, 100, min_open=True, max_open=True),
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
    type=click.Choice(["worse", "different", "judged-worse"]),
    help="Exit with 1 if a measure is worse, or if any measure differs; with judged-worse if a "
    "measure or the judge's verdict is worse.",
)
@click.option(
    "--judge",
    metavar="MODEL",
    help="A model that says which answer of each pair is better, without knowing whose it is.",
)
@click.option(
    "--judge-url", metavar="URL", help="Where the judge is: a URL before /v1/chat/completions."
)
@click.option(
    "--judge-key", metavar="VARIABLE", help="The environment variable with the judge's API key."
)
@click.option(
    "--judge-at-most",
    metavar="N",
    type=click.IntRange(2),
    help="How many requests the judge gets at most: two for each pair.",
)
@click.option(
    "--rubric",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="A text that says what makes an answer better.",
)
@click.option(
    "--feedback",
    metavar="SOURCE",
    help="The database of the setting observe.usage: how often the judge agrees with its feedback.",
)
@click.option(
    "--feedback-name",
    metavar="NAME",
    default="thumbs_up",
    show_default=True,
    help="The feedback that is taken: true or false, or from 0 to 1.",
)
def compare(a: str, b: str | None, **arguments: Any) -> None:
    """Compare two recordings: errors, losses, tool calls, lengths, latency, texts.

    \b
      interlingua compare recordings/ recordings-replay/ --html report.html
      interlingua compare recordings-replay/
      interlingua compare chat@1 chat@2 --in recordings/

    A and B are folders or files that a gateway with `record`, or interlingua replay, wrote. A
    replay is compared with its recording request by request. A alone is a replay to two targets,
    whose times can be compared as well. Two other recordings, or two versions
    with --in, are compared as a whole; of versions, only the requests that a traffic split
    assigned, if there are any.

    Exit codes: 0 compared, 1 what --fail-on says, 2 wrong usage or nothing to compare.
    """  # noqa: D301 - click reads \b
    from gateway.evidence.recordings import (  # noqa: PLC0415 - only here
        COMMON_CHARACTERS,
        Similarity,
    )
    from gateway.evidence.recordings import (  # noqa: PLC0415 - as above
        compare as compare_requests,
    )

    options = _Options(**arguments)
    if b is None:
        a, b = _find_sides(a, options.recordings)
    sides = _read_sides(a, b, options.recordings)
    if not all(sides):
        empty = a if not sides[0] else b
        raise click.UsageError(f"there are no recorded requests of {empty}")
    judging = _judge(options, *sides)
    similarity = COMMON_CHARACTERS
    if options.embeddings is not None:
        from gateway.tools.compare.embeddings import EmbeddingSimilarity  # noqa: PLC0415 - as above

        model = options.embeddings
        similarity = Similarity(EmbeddingSimilarity(model), f"cosine of {model}")
    try:
        report = compare_requests(
            (a, b),
            *sides,
            confidence=options.confidence / 100,
            similarity=similarity,
            share_traffic=options.recordings is not None,
            judging=judging,
        )
    except (ConfigError, WorkerError) as error:
        raise click.UsageError(f"--embeddings: {error}") from None
    if options.html is not None:
        _write_page(report, options.html)
    if options.as_json:
        print_text(msgspec.json.encode(report))
    else:
        _print_report(report, options.html)
    sys.exit(_choose_exit_code(report, options.fail_on))


def _choose_exit_code(report: "CompareReport", fail_on: str | None) -> int:
    """The judge's row counts only with ``judged-worse``, and must then have verdicts."""
    from gateway.evidence.judge import JUDGED  # noqa: PLC0415 - only here

    judging = report.judging
    if fail_on == "judged-worse" and judging is not None and judging.lacks_verdicts:
        print_text("--fail-on judged-worse: the judge gave no verdict that can be read", err=True)
        return 1
    verdicts = {
        result.verdict
        for result in report.measures
        if result.measure != JUDGED or fail_on == "judged-worse"
    }
    if fail_on == "different":
        return int(not verdicts.isdisjoint({"worse", "better", "different"}))
    return int(fail_on is not None and "worse" in verdicts)


def _judge(
    options: _Options, a: "list[RecordedRequest]", b: "list[RecordedRequest]"
) -> "Judging | None":
    """What the judge says of the pairs, if there is one. Raises UsageError."""
    from gateway.evidence.judge import MAX_RUBRIC, JudgeError, select_pairs  # noqa: PLC0415 - only here
    from gateway.evidence.recordings import pair_requests  # noqa: PLC0415 - as above
    from gateway.tools.compare.judge_client import JudgeOptions, run_judge  # noqa: PLC0415 - as above

    values = (options.judge, options.judge_url, options.judge_at_most, options.rubric)
    others = (options.judge_key, options.feedback)
    if {*values, *others} == {None} and options.fail_on != "judged-worse":
        return None
    model, url, at_most, file = values
    if model is None or url is None or at_most is None or file is None:
        raise click.UsageError(
            "a judge needs all of --judge, --judge-url, --judge-at-most and --rubric"
        )
    try:
        parse_worker_url(url)
    except ValueError as error:
        raise click.UsageError(f"--judge-url: {url} {error}") from None
    key = None
    if options.judge_key is not None and not (key := os.environ.get(options.judge_key)):
        raise click.UsageError(f"--judge-key: the variable {options.judge_key} is not set")
    if key is not None and not PRINTABLE_ASCII.fullmatch(key):
        raise click.UsageError(
            f"--judge-key: the variable {options.judge_key} contains spaces or characters that no "
            "header may have"
        )
    try:
        rubric = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--rubric: {file} can't be read: {error}") from None
    if not rubric.strip() or len(rubric) > MAX_RUBRIC:
        raise click.UsageError(f"--rubric: {file} is empty, or over {MAX_RUBRIC:,} characters")
    pairs = select_pairs(pair_requests(a, b)[2])
    if not pairs:
        raise click.UsageError("--judge: there are no two texts that answer the same request")
    feedback = _read_feedback(options, [*a, *b])
    try:
        return run_judge(pairs, JudgeOptions(model, url, key, rubric, at_most), feedback)
    except JudgeError as error:
        raise click.UsageError(f"--judge: {error}") from None


def _read_feedback(
    options: _Options, requests: "list[RecordedRequest]"
) -> "tuple[str, FeedbackValues] | None":
    """The feedback on the requests, with its name. Raises UsageError."""
    if options.feedback is None:
        return None
    since = min(one.at for one in requests)
    values: dict[tuple[str, float], float] = {}
    for model in sorted({one.model for one in requests}):
        extract = read_usage_source(options.feedback, model, since)
        if extract is None:
            raise click.UsageError(f"--feedback: {options.feedback} is not a usage database")
        values |= {
            (row.id, row.request_at): row.number
            for row in extract.outcomes
            if row.name == options.feedback_name and row.number is not None and 0 <= row.number <= 1
        }
    return options.feedback_name, values


def _read_sides(
    a: str, b: str, recordings: str | None
) -> "tuple[list[RecordedRequest], list[RecordedRequest]]":
    """The requests of both sides. Raises UsageError."""
    if recordings is None:
        return _read(a), _read(b)
    requests = _read(recordings)
    return _select_version(requests, a), _select_version(requests, b)


def _find_sides(folder: str, recordings: str | None) -> tuple[str, str]:
    """The folders of a replay to two targets. Raises UsageError."""
    if recordings is None and not Path(folder).exists():
        raise click.UsageError(f"no such recording: {folder}")
    if recordings is not None or not all((Path(folder) / side).is_dir() for side in "ab"):
        raise click.UsageError(
            f"{folder} is no replay to two targets: name A and B, or replay with --to A --to B"
        )
    return str(Path(folder) / "a"), str(Path(folder) / "b")


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
        print_text(f"{path}: damaged lines that are left out: {reader.skipped_lines}", err=True)
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

    write_file(Path(file), render_page(report))


def _print_report(report: "CompareReport", html: str | None) -> None:
    from gateway.evidence.measures import (  # noqa: PLC0415 - only here
        LEFT_COLUMNS,
        build_headings,
        list_cells,
        summarize_verdicts,
    )
    from gateway.tools.compare.text import (  # noqa: PLC0415 - as above
        describe_pairing,
        describe_sides,
        describe_verdict,
        list_notes,
    )

    print_text(summarize_verdicts(report.measures))
    lines = ("", *describe_sides(report), describe_pairing(report), "")
    print_text("\n".join(lines))
    rows = []
    for result in report.measures:
        *cells, _, way = list_cells(result)
        cells = [*cells, describe_verdict(report, result), way]
        rows.append(cells)
    print_table(build_headings("A", "B"), rows, left_aligned=LEFT_COLUMNS)
    for note in list_notes(report):
        print_text(f"\n{note}")
    for example in report.examples[:_EXAMPLES]:
        print_text(f"\n{example.id} {example.reason}")
        for name, text in (("prompt", example.prompt), ("A", example.a), ("B", example.b)):
            line = " ".join(text.split())
            print_text(f"  {name}: {line[:_MAX_LINE]}")
    if html is not None:
        print_text(f"\nThe report is in {html}")
