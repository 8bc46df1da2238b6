"""A worker's URL, taken apart once, and the head of a request to it. Pure."""

import functools
import re
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from gateway.core.errors import InternalError
from gateway.core.ports import Headers, WireRequest

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
    host_header: str
    """As the header Host has it."""
    base_path: str


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


def head(url: str, request: WireRequest, own: Headers = ()) -> bytes:
    """The request line and the headers; see ``backends.upstream.Upstream`` for ``own``.

    Raises InternalError for what would be another request.
    """
    path, size = request.path, len(request.body)
    make_top = _known_top if len(path) <= _SHORT else _top
    text = make_top(url, request.method, path, request.headers) + _lines(own)
    if not size and request.method in _BODILESS:
        return f"{text}Accept-Encoding: identity\r\n\r\n".encode()
    return f"{text}Accept-Encoding: identity\r\nContent-Length: {size}\r\n\r\n".encode()


def _top(url: str, method: str, path: str, headers: Headers) -> str:
    """The lines before a request's own headers. Raises InternalError."""
    if not _PATH.fullmatch(path):
        raise InternalError("a worker's path is not one")
    target = origin(url)
    asked = _line(f"{method} {target.base_path}{path} HTTP/1.1")
    return asked + _lines((("Host", target.host_header), *headers))


_known_top = functools.lru_cache(maxsize=1024)(_top)
"""Most requests to a worker share them."""


def _lines(headers: Headers) -> str:
    """A line for each. Raises InternalError where one would be more."""
    text = ""
    for name, value in headers:
        text += _line(f"{name}: {value}")
    return text


def _line(text: str) -> str:
    """It with its end. Raises InternalError where it holds one."""
    if "\r" in text or "\n" in text or "\0" in text:
        raise InternalError("a line of a request's head holds a line's end")
    return f"{text}\r\n"
