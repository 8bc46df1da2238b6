"""The head of an answer, as bytes. Pure, but for the date."""

import functools
import http
import time
from email.utils import formatdate
from typing import Final

from msgspec import Struct

_OURS: Final = frozenset({"connection", "content-length", "date", "server", "transfer-encoding"})
"""What the front says itself, whatever the answer has."""
_STREAMED: Final = frozenset({"cache-control", "x-accel-buffering"})
"""What it says itself of a stream, too."""


class Named(Struct, frozen=True):
    """What the names of an answer's headers come to."""

    whole: str
    """Their lines in a whole answer, as a form that takes all values."""
    stream: str
    """And in one that streams."""
    closes: bool
    """Whether the connection is spoken of, which then ends."""
    chunked: bool


@functools.lru_cache(maxsize=1024)
def named(names: tuple[str, ...]) -> Named:
    """Found out once for each set of names, of which there are few."""
    lower = [name.lower() for name in names]
    return Named(
        _form(names, _OURS),
        _form(names, _OURS | _STREAMED),
        "connection" in lower,
        "transfer-encoding" in lower,
    )


def _form(names: tuple[str, ...], but: frozenset[str]) -> str:
    """Their lines; those of ``but`` take a value, and have none."""
    if not "".join(names).isprintable():
        raise ValueError("a header's name holds what none can")
    return "".join(
        "%.0s" if name.lower() in but else f"{name.replace('%', '%%')}: %s\r\n" for name in names
    )


def filled(form: str, values: tuple[str, ...]) -> str:
    """The lines with these values. Raises ValueError for one that would be two."""
    said = "".join(values)
    if "\n" in said or "\r" in said or "\0" in said:
        raise ValueError("a header of the answer holds a line's end")
    return form % values


def head(status: int, lines: str, framing: str) -> bytes:
    """The status line and the headers. ``framing`` is lines of our own, each with its end."""
    return f"{_line(status)}{lines}{framing}{_date(int(time.monotonic()))}\r\n".encode(
        "utf-8", "surrogateescape"
    )


@functools.cache
def _line(status: int) -> str:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\nServer: interlingua\r\n"


@functools.lru_cache(maxsize=1)
def _date(second: int) -> str:
    """Made anew each second."""
    del second
    return f"Date: {formatdate(usegmt=True)}\r\n"
