"""The head of an answer, as bytes. Pure, but for the date."""

import functools
import http
import time
from collections.abc import Sequence
from email.utils import formatdate
from typing import Final

from protocols.core.interfaces import Headers

_LISTENER_HEADERS: Final = frozenset(
    {"connection", "content-length", "date", "server", "transfer-encoding"}
)
"""What the front says itself, whatever the answer has."""
_STREAM_HEADERS: Final = frozenset({"cache-control", "x-accel-buffering"})
"""What it says itself of a stream, too."""
_MAX_CACHED_NAMES: Final = 1024
"""Names that are remembered, before all of them are forgotten."""


class HeaderPrefixCache(dict[str, str]):
    """What the line of a header begins with, by its name: "" where the front says it itself."""

    def __init__(self, ours: frozenset[str]) -> None:
        super().__init__()
        self._omitted = ours

    def __missing__(self, name: str) -> str:
        if not name.isprintable():
            raise ValueError("a header's name holds what none can")
        start = "" if name.lower() in self._omitted else f"{name}: "
        if len(self) >= _MAX_CACHED_NAMES:
            self.clear()
        self[name] = start
        return start


UNARY_PREFIXES: Final = HeaderPrefixCache(_LISTENER_HEADERS)
"""In an answer that is sent as a whole."""
STREAM_PREFIXES: Final = HeaderPrefixCache(_LISTENER_HEADERS | _STREAM_HEADERS)


def render_headers(
    headers: Headers, starts: HeaderPrefixCache
) -> tuple[list[str], tuple[str, ...]]:
    """The lines of an answer's own headers, and the names, in lower case, that have none.

    Raises ValueError for a header that would be two.
    """
    lines: list[str] = []
    silent: tuple[str, ...] = ()
    for name, value in headers:
        if start := starts[name]:
            lines.append(start + value)
        else:
            silent += (name.lower(),)
    said = "".join(lines)
    if "\n" in said or "\r" in said or "\0" in said:
        raise ValueError("a header of the answer holds a line's end")
    return lines, silent


def render_head(status: int, lines: Sequence[str]) -> bytes:
    """The status line, these lines, and what is said of every answer."""
    said = (_render_status_line(status), *lines, _render_date(int(time.monotonic())))
    return "\r\n".join(said).encode("utf-8", "surrogateescape")


@functools.cache
def _render_status_line(status: int) -> str:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\nServer: interlingua"


@functools.lru_cache(maxsize=1)
def _render_date(second: int) -> str:
    """Made anew each second; with the empty line that ends a head."""
    del second
    return f"Date: {formatdate(usegmt=True)}\r\n\r\n"
