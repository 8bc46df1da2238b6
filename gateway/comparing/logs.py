"""The evidence of an access log: every value is known."""

from collections.abc import Iterable

import msgspec

from gateway.comparing.evidence import Asked, Evidence
from gateway.comparing.samples import Values
from gateway.figures import Arm, Figures, answered, left
from gateway.telemetry import Record

_decode = msgspec.json.Decoder(Record).decode


def read_log(lines: Iterable[bytes], asked: Asked) -> Evidence:
    """What the lines tell. Those that are no record of an exchange are only counted."""
    seen = Evidence(exact=True)
    for line in lines:
        seen.lines += 1
        record = _record(line)
        if record is None:
            seen.skipped += 1
        elif record.began < asked.since:
            seen.early += 1
        else:
            _take(seen, record, asked)
    return seen


def _record(line: bytes) -> Record | None:
    """Every exchange has a path; whatever else a log holds has none."""
    try:
        record = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record if record.path else None


def _take(seen: Evidence, record: Record, asked: Asked) -> None:
    if record.model:
        seen.models.add(record.model)
    where = answered(record)
    if record.model == asked.model:
        seen.sticky += record.sticky not in ("", "pinned")
        if not where[2]:
            seen.apart[_why(record)] += 1
        if where[2] or asked.everything:
            _figures(seen, where, asked).add(record)
    if record.diverted:
        first = left(record)
        if first[0] == asked.model and (first[2] or asked.everything):
            _figures(seen, first, asked).diversions += 1


def _why(record: Record) -> str:
    if record.diverted:
        return "answered in another's stead"
    if record.sticky == "pinned":
        return "pinned by the client"
    return "sent by a rule" if record.rule else "of no split"


def _figures(seen: Evidence, arm: Arm, asked: Asked) -> Figures[Values]:
    _, version, split = arm
    key = ("" if asked.everything else split, version)
    return seen.arms.setdefault(key, Figures(Values))
