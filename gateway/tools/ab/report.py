"""A comparison as it is told: a table, and what has to be known of it."""

from collections.abc import Iterator, Sequence
from math import floor, log10
from typing import Final

from msgspec import Struct

from gateway.tools.ab.comparison import Comparison, Ratio, Row
from gateway.tools.ab.evidence import Asked, Evidence

_HEADINGS: Final = ("", "a", "b", "b - a", "from", "to", "", "")
_UNITS: Final = {"share": (100.0, "%"), "seconds": (1.0, "s"), "tokens": (1.0, ""), "": (1.0, "")}
_MILLISECONDS: Final = (1000.0, "ms")
_DIGITS: Final = 3
"""Those that count, of the larger number of a row."""


class Report(Struct, frozen=True):
    """What ``interlingua ab`` tells. ``source`` is what it looked at."""

    source: str
    model: str
    comparison: Comparison
    notes: tuple[str, ...]

    def text(self) -> str:
        """As a table."""
        found = self.comparison
        by = f"as the split {found.split} sent" if found.split else "whatever sent"
        lines = [f"{self.model}: a is version {found.a}, b is version {found.b}, {by} to them", ""]
        rows = [_HEADINGS, *(_cells(row) for row in found.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [_line(row, widths) for row in rows]
        return "\n".join((*lines, "", *self.notes))


def report(source: str, asked: Asked, seen: Evidence, found: Comparison) -> Report:
    """The comparison, with its notes."""
    notes = [_intervals(found), *apart(seen, asked), *_reservations(seen)]
    if found.ratio is not None:
        notes.append(_told(found.ratio))
    return Report(source, asked.model, found, tuple(notes))


def apart(seen: Evidence, asked: Asked) -> Iterator[str]:
    """What no split sent where it was answered."""
    how = "Mixed in, and no random sample" if asked.everything else "Left out"
    for why, count in sorted(seen.apart.items()):
        yield f"{how}: {count} requests {why}."


def _intervals(found: Comparison) -> str:
    missed = found.intervals * (1 - found.confidence)
    return (
        f"{found.intervals} intervals at {100 * found.confidence:g} %; a * leaves out 0, as about "
        f"{missed:.1f} of them would if nothing differed."
    )


def _reservations(seen: Evidence) -> Iterator[str]:
    """What makes the intervals less sure than they look, and what was not looked at."""
    if seen.sticky:
        yield (
            "Users keep their arm, so that their requests are not independent: where few users "
            "send most of them, the intervals are too narrow."
        )
    if not seen.exact:
        yield (
            "A page tells values by their buckets: quantiles and spreads are as good as its edges. "
            "It counts from the gateway's start."
        )
    if seen.skipped:
        yield f"{seen.skipped} of {seen.lines} lines tell of no exchange."
    if seen.early:
        yield f"{seen.early} of {seen.lines} lines tell of what came before that time."


def _told(ratio: Ratio) -> str:
    sent, weights = (
        " : ".join(map(str, numbers.values())) for numbers in (ratio.sent, ratio.weights)
    )
    to = ", ".join(ratio.weights)
    said = f"split sent {sent} to the versions {to} for the weights {weights}"
    if ratio.fits:
        return f"The {said}, which fits (p = {ratio.likelihood:.2g})."
    return (
        f"WARNING: the {said}, which does not fit (p = {ratio.likelihood:.2g}): requests of an arm "
        "are lost or sent elsewhere, or the weights were others, or few users send most of them. "
        "Find out which before you go by these figures."
    )


def _cells(row: Row) -> Sequence[str]:
    scale, unit = _UNITS[row.unit]
    known = [value for value in (row.a, row.b) if value is not None]
    if row.unit == "seconds" and max(known, default=0.0) < 1:
        scale, unit = _MILLISECONDS
    difference = row.difference
    around = () if difference is None else (difference.value, difference.low, difference.high)
    largest = max(known, default=0.0) or max(map(abs, around), default=0.0)
    digits = _digits(largest * scale) if row.unit else 0
    a, b = (_number(value, scale, f".{digits}f", unit) for value in (row.a, row.b))
    if difference is None:
        return (row.figure, a, b, "unknown" if row.unit else "", "", "", "", "")
    shown = (_number(value, scale, f"+.{digits}f", unit) for value in around)
    return (row.figure, a, b, *shown, "*" if difference.clear else " ", row.method)


def _number(value: float | None, scale: float, form: str, unit: str) -> str:
    return "-" if value is None else f"{value * scale:{form}} {unit}".rstrip()


def _digits(largest: float) -> int:
    """How many digits to show after the point."""
    before = floor(log10(largest)) + 1 if largest else _DIGITS
    return max(0, min(_DIGITS, _DIGITS - before))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers stand to the right of their columns."""
    first, *rest, method = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest), method[0]]
    return "  ".join(padded).rstrip()
