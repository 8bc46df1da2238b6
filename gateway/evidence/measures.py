"""What every comparison has in common: a measure of two sides, its interval, and its verdict.

A verdict follows from the interval alone, so that both always agree: the sides differ if the
interval excludes the value of no difference, and whether that is worse follows from the measure's
direction.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from typing import Final, Literal

from msgspec import Struct

from gateway.evidence.statistics import Interval

Unit = Literal["", "share", "seconds", "tokens", "value"]
Better = Literal["lower", "higher", "not lower", "neither"]
"""The good direction. ``not lower``: fewer are worse, and more are only different."""
Scale = Literal["difference", "ratio", "probability"]
"""``b - a`` in the unit; ``b / a``; the probability that a value of ``b`` is the higher one."""
Verdict = Literal[
    "worse", "better", "different", "no relevant difference", "not enough data", "not judged"
]

_NEUTRAL: Final[Mapping[Scale, float]] = {"difference": 0.0, "ratio": 1.0, "probability": 0.5}
FAILED_OUTCOMES: Final = ("worker_error", "gateway_error", "truncated")
"""The outcomes of requests that failed, and not by the client's fault."""
REFUSED_OUTCOMES: Final = ("client_error",)
_MEANINGS: Final[Mapping[Better, tuple[Verdict, Verdict]]] = {
    "lower": ("worse", "better"),
    "higher": ("better", "worse"),
    "not lower": ("different", "worse"),
    "neither": ("different", "different"),
}
"""What it means that ``b`` is higher, and that it is lower."""
_DIFFERENCES: Final[Sequence[Verdict]] = ("worse", "different", "better")
_ORDER: Final[Sequence[Verdict | None]] = (
    *_DIFFERENCES, "not judged", "not enough data", "no relevant difference", None,
)  # fmt: skip
_UNITS: Final = {"share": (100.0, " %"), "seconds": (1.0, " s")}
_MILLISECONDS: Final = (1000.0, " ms")
_SECOND: Final = 1.0
_DIGITS: Final = 3
"""Significant digits of the larger number of a row."""
_MAX_NAMED: Final = 3
"""Measures that the sentence on top names."""


class MeasureResult(Struct):
    """A measure of two sides, of which ``b`` is compared with ``a``.

    Without a difference it is a plain count, or there are too few values for one.
    """

    measure: str
    unit: Unit
    a: float | None
    b: float | None
    difference: Interval | None = None
    """On the ``scale``."""
    method: str = ""
    variance: float | None = None
    """Of a single value of both sides together, if they are compared by their means."""
    n: int = 0
    """The number of pairs, or of the values of the side with fewer of them."""
    better: Better = "neither"
    scale: Scale = "difference"
    is_feedback: bool = False
    verdict: Verdict | None = None
    """None if the measure decides nothing."""
    note: str = ""
    """What the verdict says, or what it lacks."""
    missing: int = 0
    """About how many more pairs or values of each side would find a difference that matters."""

    @property
    def neutral(self) -> float:
        """The value of no difference."""
        return _NEUTRAL[self.scale]

    @property
    def has_difference(self) -> bool:
        """Whether the interval excludes the value of no difference."""
        interval = self.difference
        return interval is not None and not interval.low <= self.neutral <= interval.high

    @property
    def is_higher(self) -> bool:
        """Whether ``b`` is estimated to be above ``a``."""
        return self.difference is not None and self.difference.value > self.neutral


def judge(result: MeasureResult, relevant: float) -> None:
    """Set the verdict. ``relevant`` is the smallest difference, or factor, that matters."""
    interval = result.difference
    if interval is not None and result.has_difference:
        result.verdict, result.missing = _name_difference(result), 0
        return
    least, most = result.neutral - relevant, result.neutral + relevant
    if result.scale == "ratio":
        least, most = 1 / relevant, relevant
    if interval is not None and least <= interval.low and interval.high <= most:
        result.verdict, result.missing = "no relevant difference", 0
    else:
        result.verdict = "not enough data"


def _name_difference(result: MeasureResult) -> Verdict:
    rise, fall = _MEANINGS[result.better]
    return rise if result.is_higher else fall


def is_difference(result: MeasureResult) -> bool:
    """Whether the verdict names a difference."""
    return result.verdict in _DIFFERENCES


def sort_results(results: Iterable[MeasureResult]) -> list[MeasureResult]:
    """Those that differ first, and worse ones before all others."""
    return sorted(results, key=lambda one: _ORDER.index(one.verdict))


def summarize_verdicts(results: Sequence[MeasureResult]) -> str:
    """The sentence on top of a report."""
    judged = [one for one in results if one.verdict is not None]
    count = f"{len(judged)} measure{'s' if len(judged) != 1 else ''}"
    sentences = []
    for verdict in _DIFFERENCES:
        if found := [one for one in judged if one.verdict == verdict]:
            named = "; ".join(f"{one.measure} {_format_change(one)}" for one in found[:_MAX_NAMED])
            more = f"; and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
            verb = "is" if len(found) == 1 else "are"
            sentences.append(f"{len(found)} of {count} {verb} {verdict}: {named}{more}.")
    if not sentences:
        sentences.append(f"None of {count} differs.")
    for verdict, text in (
        ("not enough data", "has not enough data"), ("not judged", "can't be judged"),
    ):  # fmt: skip
        if number := sum(one.verdict == verdict for one in judged):
            plural = text if number == 1 else text.replace("has ", "have ")
            sentences.append(f"{number} {plural}.")
    return " ".join(sentences)


# --- the table ------------------------------------------------------------------------------------

LEFT_COLUMNS: Final = (0, 6, 7)


def build_headings(a: str, b: str) -> Sequence[str]:
    """The headings of ``list_cells``."""
    return ("", "n", a, b, "difference", "interval", "verdict", "method")


def list_cells(result: MeasureResult) -> Sequence[str]:
    """The row of a measure."""
    if not result.unit:
        counts = ("-" if one is None else f"{one:,.0f}" for one in (result.a, result.b))
        return (result.measure, "", *counts, "", "", "", "")
    a, b = _format_sides(result)
    change, interval = format_difference(result)
    n = f"{result.n:,}" if result.n else ""
    verdict, method = result.verdict or "", result.method if interval else ""
    return (result.measure, n, a, b, change, interval, verdict, method)


def format_value(value: float, unit: Unit, largest: float | None = None) -> str:
    """A value with its unit, with the digits of the ``largest`` number of its row."""
    largest = abs(value) if largest is None else largest
    scale, name = _UNITS.get(unit, (1.0, ""))
    if unit == "seconds" and largest < _SECOND:
        scale, name = _MILLISECONDS
    return f"{value * scale:,.{_count_decimals(largest * scale)}f}{name}"


def format_rounded(number: float) -> str:
    """A number with two digits, never as a power of ten."""
    return f"{float(f'{number:.2g}'):,.10g}"


def format_percent(share: float) -> str:
    """A share in percent, with two digits."""
    return format_rounded(100 * share)


def format_difference(result: MeasureResult) -> tuple[str, str]:
    """The difference and its interval."""
    interval = result.difference
    if interval is None:
        return ("unknown" if result.a is not None else "-"), ""
    if result.scale == "probability":
        value, low, high = map(format_percent, _list_ends(interval))
        return f"{value} % higher", f"{low} to {high}"
    if result.scale == "ratio":
        value, low, high = (
            _add_sign(format_rounded(100 * (one - 1)), one - 1) for one in _list_ends(interval)
        )
        return f"{value} %", f"{low} to {high}"
    value, low, high = (
        _add_sign(format_value(one, result.unit, _find_largest(result)), one)
        for one in _list_ends(interval)
    )
    if result.unit == "share":
        value, low, high = (one.removesuffix(" %") for one in (value, low, high))
        return f"{value} points", f"{low} to {high}"
    return value, f"{low} to {high}"


def _list_ends(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


def _add_sign(text: str, value: float) -> str:
    return text if value < 0 else f"+{text}"


def _format_sides(result: MeasureResult) -> tuple[str, str]:
    a, b = (
        "-" if one is None else format_value(one, result.unit, _find_largest(result))
        for one in (result.a, result.b)
    )
    return a, b


def _find_largest(result: MeasureResult) -> float:
    """The largest value of either side, else of the interval."""
    largest = max((abs(one) for one in (result.a, result.b) if one is not None), default=0.0)
    if largest or result.scale != "difference" or result.difference is None:
        return largest
    return max(map(abs, _list_ends(result.difference)))


def _format_change(result: MeasureResult) -> str:
    a, b = _format_sides(result)
    return f"{a} → {b}"


def _count_decimals(largest: float) -> int:
    integer_digits = floor(log10(largest)) + 1 if largest else _DIGITS
    return max(0, min(_DIGITS, _DIGITS - integer_digits))
