"""A worker's URL, taken apart once, and the head of a request to it. Pure."""

import functools
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from gateway.core.errors import InternalError
from gateway.core.ports import WireRequest

_PORTS: Final = {"http": 80, "https": 443}
_BODILESS: Final = ("GET", "HEAD")
_OWN: Final = 2
"""Lines that come before a request's headers."""


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


def head(target: Origin, request: WireRequest) -> bytes:
    """The request line and the headers. Raises InternalError for what would be another request."""
    headers, body = request.headers, request.body
    text = f"{request.method} {target.base}{request.path} HTTP/1.1\r\nHost: {target.named}\r\n"
    for name, value in headers:
        text += f"{name}: {value}\r\n"
    ends = _OWN + len(headers)
    if text.count("\r") != ends or text.count("\n") != ends or "\0" in text:
        raise InternalError("a header for a worker holds a line's end")
    length = f"Content-Length: {len(body)}\r\n" if body or request.method not in _BODILESS else ""
    return f"{text}Accept-Encoding: identity\r\n{length}\r\n".encode()
