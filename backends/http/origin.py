"""A worker's URL, taken apart once, and the head of a request to it. Pure."""

import functools
import re
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from gateway.core.errors import InternalError
from gateway.core.ports import WireRequest

_PORTS: Final = {"http": 80, "https": 443}
_BODILESS: Final = ("GET", "HEAD")
_PATH: Final = re.compile(r"/[!-\"$-~]*")
_SHORT: Final = 256
"""Characters of a path that is remembered: who chooses a name in it must not fill the memory."""


class Origin(Struct, frozen=True):
    """Where a worker is. ``base`` stands before every path, without a slash at its end."""

    host: str
    port: int
    tls: bool
    named: str
    """As the header Host has it."""
    base: str


@functools.lru_cache(maxsize=4096)
def origin(url: str) -> Origin:
    """The parts of a URL that ``Worker`` has checked."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or _PORTS[parts.scheme]
    named = f"[{host}]" if ":" in host else host
    if port != _PORTS[parts.scheme]:
        named = f"{named}:{port}"
    return Origin(host, port, parts.scheme == "https", named, parts.path.rstrip("/"))


def head(url: str, request: WireRequest) -> bytes:
    """The request line and the headers. Raises InternalError for what would be another request."""
    headers, body, path = request.headers, request.body, request.path
    make_top = _known_top if len(path) <= _SHORT else _top
    top = make_top(url, request.method, path)
    text = ""
    for name, value in headers:
        text += f"{name}: {value}\r\n"
    if not _is_lines(text, len(headers)):
        raise InternalError("a header for a worker holds a line's end")
    length = f"Content-Length: {len(body)}\r\n" if body or request.method not in _BODILESS else ""
    return f"{top}{text}Accept-Encoding: identity\r\n{length}\r\n".encode()


def _top(url: str, method: str, path: str) -> str:
    """The lines before a request's own headers. Raises InternalError."""
    if not _PATH.fullmatch(path):
        raise InternalError("a worker's path is not one")
    target = origin(url)
    top = f"{method} {target.base}{path} HTTP/1.1\r\nHost: {target.named}\r\n"
    if not _is_lines(top, 2):
        raise InternalError("a worker's URL holds a line's end")
    return top


_known_top = functools.lru_cache(maxsize=1024)(_top)
"""Most requests to a worker share them."""


def _is_lines(text: str, count: int) -> bool:
    """Whether it is so many lines as a head may hold, each with its end."""
    return text.count("\r") == count and text.count("\n") == count and "\0" not in text
