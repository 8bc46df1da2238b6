"""The words and numbers of the report, for the terminal and for the page."""

from collections.abc import Iterator, Sequence
from typing import Final

from gateway.tools.ab.statistics import Interval
from gateway.tools.compare.comparison import CompareReport, MeasureResult

HEADINGS: Final = ("measure", "n", "A", "B", "difference", "interval", "verdict")
_SMALL_SECONDS: Final = 1.0
_FEW: Final = 10
"""Milliseconds below which decimals are shown."""


def describe_pairing(report: CompareReport) -> str:
    """What is compared, and how certain the verdicts are."""
    what = (
        f"{report.pairs:,} pairs of the same request"
        if report.pairs
        else f"{report.a_requests:,} and {report.b_requests:,} different requests"
    )
    return (
        f"{what}. All verdicts together name a difference where there is none with a probability "
        f"of at most {1 - report.confidence:.0%}; each interval has a confidence level of "
        f"{report.confidence:.0%}."
    )


def list_rows(report: CompareReport) -> Iterator[Sequence[str]]:
    """The cells of each measure, in the order of ``HEADINGS``."""
    for result in report.measures:
        show = _format_share if result.kind == "share" else _format_amount
        yield (
            result.name,
            f"{result.n:,}",
            show(result.a, result.unit),
            show(result.b, result.unit),
            *_format_difference(result, result.difference),
            _format_verdict(report, result),
        )


def list_notes(report: CompareReport) -> Iterator[str]:
    """The tables below the measures, as lines."""
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


def format_value(value: float, unit: str) -> str:
    """An amount with its unit."""
    if unit != "s":
        return f"{value:,.0f}"
    if value >= _SMALL_SECONDS:
        return f"{value:,.2f} s"
    milliseconds = value * 1000
    return f"{milliseconds:,.0f} ms" if milliseconds >= _FEW else f"{milliseconds:.2f} ms"


def _format_share(value: float, unit: str) -> str:
    del unit
    return f"{value:.1%}"


def _format_amount(value: float, unit: str) -> str:
    return format_value(value, unit)


def _format_difference(result: MeasureResult, interval: Interval | None) -> tuple[str, str]:
    if interval is None:
        return "-", "-"
    if result.kind == "share":
        return (
            f"{interval.value * 100:+.1f} points",
            f"{interval.low * 100:+.1f} to {interval.high * 100:+.1f}",
        )
    return (
        f"{interval.value - 1:+.1%}",
        f"{interval.low - 1:+.1%} to {interval.high - 1:+.1%}",
    )


def _format_verdict(report: CompareReport, result: MeasureResult) -> str:
    if result.verdict != "not enough data":
        return result.verdict
    what = "pairs" if report.pairs else "requests of each"
    return f"not enough data: about {result.missing:,} more {what}"
