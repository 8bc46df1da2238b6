"""The head of an answer, as bytes. Pure, but for the date."""

import functools
import http
import time
from email.utils import formatdate
from typing import Final

from gateway.core.ports import Headers

_OURS: Final = frozenset({"connection", "content-length", "date", "server", "transfer-encoding"})
"""What the front says itself, whatever the answer has."""


def head(status: int, headers: Headers, framing: str) -> bytes:
    """The status line and the headers. ``framing`` is lines of our own, each with its end.

    Raises ValueError for a header that would be two.
    """
    lines = [f"{name}: {value}\r\n" for name, value in headers if name.lower() not in _OURS]
    text = "".join(lines)
    if text.count("\n") != len(lines) or text.count("\r") != len(lines) or "\0" in text:
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
