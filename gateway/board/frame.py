"""One view of the board: rates and times of the last minute, and the workers."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from gateway.board.counts import Count, Counts

_LENGTH: Final = 60.0
"""Seconds that are looked back over."""
_NOTHING: Final = Count()
_STATES: Final = {"up": "32", "trial": "33", "out": "31"}
"""Colours, as terminals number them."""
_ARMS: Final = ("MODEL", "VERSION", "REQ/S", "ERR/S", "TTFT P50", "TTFT P95", "TOKENS/S")
_WORKERS: Final = ("BACKEND", "WORKER", "STATE", "RUNNING", "LATENCY", "LAST ERROR")
_TEXTS: Final = {"MODEL", "VERSION", "BACKEND", "WORKER", "STATE", "LAST ERROR"}
"""Columns that begin at the left."""
_SECOND: Final = 1.0


class Row(Struct, frozen=True):
    """A version: rates by the second, times in seconds."""

    model: str
    version: str
    requests: float
    errors: float
    first_token_p50: float | None
    first_token_p95: float | None
    tokens: float


class Worker(Struct, frozen=True):
    """As ``/-/workers`` tells of it."""

    backend: str
    url: str
    state: str
    in_flight: int
    latency: float | None
    error: str


class Frame(Struct, frozen=True):
    """All that is seen at a time. ``seconds``: over how many of them rates are taken."""

    url: str
    seconds: float
    running: int
    rows: Sequence[Row]
    workers: Sequence[Worker]
    trouble: str = ""

    def lines(self, *, colours: bool) -> Iterator[str]:
        """It as a person reads it."""
        requests, errors = sum(r.requests for r in self.rows), sum(r.errors for r in self.rows)
        yield (
            f"{_safe(self.url)}: {self.running} running, {requests:.1f} requests/s, "
            f"{errors:.1f} errors/s, over {self.seconds:.0f} s"
        )
        if self.trouble:
            yield _painted(_safe(self.trouble), "31", colours=colours)
        yield ""
        yield from _table(_ARMS, [_of_row(row) for row in self.rows], colours=colours)
        if self.workers:
            yield ""
            yield from _table(_WORKERS, [_of_worker(one) for one in self.workers], colours=colours)


class Board:
    """Remembers what was counted, as far as a frame looks back."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._looks = deque[tuple[float, Counts]]()

    def look(self, now: float, counts: Counts, workers: Mapping[str, Any]) -> Frame:
        """The frame of this moment, in seconds of a clock that goes evenly."""
        if self._looks and counts.requests < self._looks[-1][1].requests:
            self._looks.clear()  # the gateway began anew
        while len(self._looks) > 1 and now - self._looks[1][0] >= _LENGTH:
            self._looks.popleft()
        self._looks.append((now, counts))
        then, before = self._looks[0]
        seconds = now - then
        rows = [
            _row(target, count.since(before.of.get(target, _NOTHING)), count, seconds)
            for target, count in sorted(counts.of.items())
        ]
        told = [
            Worker(backend, *(one[name] for name in Worker.__struct_fields__[1:]))
            for backend, every in workers.items()
            for one in every
        ]
        return Frame(self._url, seconds, int(counts.running), rows, told)


def _row(target: tuple[str, str], new: Count, count: Count, seconds: float) -> Row:
    """Times are those of all there ever was, where nothing came just now."""
    timed = new if any(new.below.values()) else count
    each = 1 / seconds if seconds else 0.0
    return Row(
        *target,
        new.requests * each,
        new.errors * each,
        timed.first_token(0.5),
        timed.first_token(0.95),
        new.tokens * each,
    )


# --- as text --------------------------------------------------------------------------------------


def _of_row(row: Row) -> Sequence[str]:
    times = (_time(row.first_token_p50), _time(row.first_token_p95))
    rates = (f"{row.requests:.1f}", f"{row.errors:.1f}", *times, f"{row.tokens:.1f}")
    return (row.model, row.version, *rates)


def _of_worker(one: Worker) -> Sequence[str]:
    return (
        one.backend,
        one.url,
        one.state,
        str(one.in_flight),
        _time(one.latency),
        one.error,
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < _SECOND else f"{seconds:.2f} s"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], *, colours: bool) -> Iterator[str]:
    cells = [names, *([_safe(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for n, row in enumerate(cells):
        aligned = [
            cell.ljust(width) if name in _TEXTS else cell.rjust(width)
            for name, cell, width in zip(names, row, widths, strict=True)
        ]
        painted = [
            _painted(text, _STATES.get(cell, ""), colours=colours and n > 0 and name == "STATE")
            for name, cell, text in zip(names, row, aligned, strict=True)
        ]
        yield "  ".join(painted).rstrip()


def _painted(text: str, colour: str, *, colours: bool) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colours and colour else text


def _safe(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
