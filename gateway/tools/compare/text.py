"""The words of the report, for the terminal and for the page."""

from collections.abc import Iterator

from gateway.evidence.judge import describe_judging
from gateway.evidence.measures import MeasureResult
from gateway.evidence.recordings import CompareReport, describe_side


def describe_sides(report: CompareReport) -> Iterator[str]:
    """Both sides, as lines."""
    yield f"A: {describe_side(report.a)}"
    yield f"B: {describe_side(report.b)}"


def describe_pairing(report: CompareReport) -> str:
    """What is compared, and how certain the verdicts are."""
    what = (
        f"{report.pairs:,} pairs of the same request"
        if report.pairs
        else f"{report.a.requests:,} and {report.b.requests:,} different requests"
    )
    when = (
        "answered at the same time"
        if report.is_simultaneous
        else "answered at different times, so that times can't be judged"
    )
    return (
        f"{what}, {when}. All intervals together hold with a probability of "
        f"{report.confidence:.0%}, and the verdicts follow from them."
    )


def describe_verdict(report: CompareReport, result: MeasureResult) -> str:
    """The verdict, with what it lacks."""
    if result.verdict == "not enough data" and result.missing:
        what = "pairs" if report.pairs else "requests of each"
        return f"not enough data: about {result.missing:,} more {what}"
    return result.verdict or ""


def list_notes(report: CompareReport) -> Iterator[str]:
    """The tables below the measures, as lines."""
    for result in report.measures:
        if result.note:
            yield f"{result.measure}: {result.note}"
    if report.judging is not None:
        yield describe_judging(report.judging)
    for title, rows in (
        ("lost parameters", report.losses),
        ("errors", report.errors),
        ("finish reasons", report.finish_reasons),
    ):
        if rows:
            yield f"{title} (A, B): " + "; ".join(f"{name} {a:,}, {b:,}" for name, a, b in rows)
    if (texts := report.texts) is not None:
        yield (
            f"texts: {texts.equal:.1%} of {texts.n:,} pairs are equal, "
            f"{texts.equal_normalised:.1%} but for case and white space; "
            f"mean similarity {texts.similarity:.2f} ({texts.method})"
        )
