"""The head of an answer, as bytes. Pure, but for the date."""

import functools
import http
import time
from email.utils import formatdate
from typing import Final

from msgspec import Struct

from gateway.core.ports import Headers

_OURS: Final = frozenset({"connection", "content-length", "date", "server", "transfer-encoding"})
"""What the front says itself, whatever the answer has."""


class Named(Struct, frozen=True):
    """What the names of an answer's headers say."""

    ours: frozenset[str]
    """Those that the front says itself, as they are written there."""
    closes: bool
    """Whether the connection is spoken of, which then ends."""
    chunked: bool


def named(headers: Headers) -> Named:
    """Found out once for each set of names, of which there are few."""
    return _named(tuple([name for name, _ in headers]))


@functools.lru_cache(maxsize=1024)
def _named(names: tuple[str, ...]) -> Named:
    lower = {name.lower() for name in names}
    ours = frozenset(name for name in names if name.lower() in _OURS)
    return Named(ours, "connection" in lower, "transfer-encoding" in lower)


def head(status: int, headers: Headers, framing: str) -> bytes:
    """The status line and the headers. ``framing`` is lines of our own, each with its end.

    Raises ValueError for a header that would be two.
    """
    ours = named(headers).ours
    lines = [f"{name}: {value}\r\n" for name, value in headers if name not in ours]
    text, count = "".join(lines), len(lines)
    if text.count("\n") != count or text.count("\r") != count or "\0" in text:
        raise ValueError("a header of the answer holds a line's end")
    return f"{_line(status)}{text}{framing}{_date(int(time.monotonic()))}\r\n".encode(
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
