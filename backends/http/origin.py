"""A worker's URL, taken apart once, and the head of a request to it. Pure."""

import functools
import re
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from protocols.core.errors import InternalError
from protocols.core.interfaces import Headers, UpstreamRequest

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_BODILESS_METHODS: Final = ("GET", "HEAD")
_PATH_PATTERN: Final = re.compile(r"/[!-\"$-~]*")
_MAX_CACHED_PATH: Final = 256
"""Characters of a path that is remembered: who chooses a name in it must not fill the memory."""


class WorkerOrigin(Struct, frozen=True):
    """Where a worker is. ``base`` stands before every path, without a slash at its end."""

    host: str
    port: int
    tls: bool
    host_header: str
    """As the header Host has it."""
    base_path: str


@functools.lru_cache(maxsize=4096)
def parse_origin(url: str) -> WorkerOrigin:
    """The parts of a URL that ``Worker`` has checked."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or _DEFAULT_PORTS[parts.scheme]
    named = f"[{host}]" if ":" in host else host
    if port != _DEFAULT_PORTS[parts.scheme]:
        named = f"{named}:{port}"
    return WorkerOrigin(host, port, parts.scheme == "https", named, parts.path.rstrip("/"))


def build_request_head(url: str, request: UpstreamRequest, own: Headers = ()) -> bytes:
    """The request line and the headers; see ``backends.upstream.HttpClient`` for ``own``.

    Raises InternalError for what would be another request.
    """
    path, size = request.path, len(request.body)
    make_top = _build_common_lines_cached if len(path) <= _MAX_CACHED_PATH else _build_common_lines
    text = make_top(url, request.method, path, request.headers) + _format_headers(own)
    if not size and request.method in _BODILESS_METHODS:
        return f"{text}Accept-Encoding: identity\r\n\r\n".encode()
    return f"{text}Accept-Encoding: identity\r\nContent-Length: {size}\r\n\r\n".encode()


def _build_common_lines(url: str, method: str, path: str, headers: Headers) -> str:
    """The lines before a request's own headers. Raises InternalError."""
    if not _PATH_PATTERN.fullmatch(path):
        raise InternalError("a worker's path is not one")
    target = parse_origin(url)
    asked = _end_line(f"{method} {target.base_path}{path} HTTP/1.1")
    return asked + _format_headers((("Host", target.host_header), *headers))


_build_common_lines_cached = functools.lru_cache(maxsize=1024)(_build_common_lines)
"""Most requests to a worker share them."""


def _format_headers(headers: Headers) -> str:
    """A line for each. Raises InternalError where one would be more."""
    text = ""
    for name, value in headers:
        text += _end_line(f"{name}: {value}")
    return text


def _end_line(text: str) -> str:
    """It with its end. Raises InternalError where it holds one."""
    if "\r" in text or "\n" in text or "\0" in text:
        raise InternalError("a line of a request's head holds a line's end")
    return f"{text}\r\n"
