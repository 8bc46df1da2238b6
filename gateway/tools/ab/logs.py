"""The evidence of an access log: every value is known."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec

from gateway.figures import Arm, Figures, alike, answered, left
from gateway.telemetry import Record
from gateway.tools.ab.evidence import Asked, Evidence
from gateway.tools.ab.samples import Values

_TOGETHER: Final = 500
"""So many exchanges are counted at once."""

_decode = msgspec.json.Decoder(Record).decode


def read_log(lines: Iterable[bytes], asked: Asked) -> Evidence:
    """What the lines tell. Those that are no record of an exchange are only counted."""
    seen = Evidence(exact=True)
    records = _records(lines, asked, seen)
    while some := [*islice(records, _TOGETHER)]:
        for same in alike(some):
            _take(seen, same, asked)
    return seen


def _records(lines: Iterable[bytes], asked: Asked, seen: Evidence) -> Iterator[Record]:
    """Those that are looked at."""
    for line in lines:
        seen.lines += 1
        record = _record(line)
        if record is None:
            seen.skipped += 1
        elif record.began < asked.since:
            seen.early += 1
        else:
            yield record


def _record(line: bytes) -> Record | None:
    """Every exchange has a path; whatever else a log holds has none."""
    try:
        record = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record if record.path else None


def _take(seen: Evidence, records: Sequence[Record], asked: Asked) -> None:
    """Count records that are alike."""
    any_ = records[0]
    if any_.model:
        seen.models.add(any_.model)
    where = answered(any_)
    if any_.model == asked.model:
        seen.sticky += sum(one.sticky not in ("", "pinned") for one in records)
        if not where[2]:
            seen.apart.update(map(_why, records))
        if where[2] or asked.everything:
            _figures(seen, where, asked).add(*records)
    if any_.diverted:
        first = left(any_)
        if first[0] == asked.model and (first[2] or asked.everything):
            _figures(seen, first, asked).diversions += len(records)


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
