"""What the life of an exchange sees of the network: a request, and a sink for the answer.

A front (``gateway.http_server.listener``) makes both out of sockets. Nothing above it knows which front it is.
"""

import zlib
from collections.abc import Mapping
from typing import Protocol

from protocols.core.errors import ClientError, MalformedRequest, RequestTooLarge
from protocols.core.interfaces import Headers


class HttpRequest(Protocol):
    """One HTTP request, its body not yet read."""

    method: str
    path: str
    """Raw, still percent-encoded, without the query."""
    query: str
    headers: Mapping[str, str]
    """Found by lower-case name."""
    peer: str

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises TooLarge past ``limit`` bytes, having read no more than that."""


class ResponseWriter(Protocol):
    """Takes one answer: ``whole``, or in pieces, from ``start`` to ``finish``."""

    @property
    def started(self) -> bool:
        """Whether an answer has begun."""

    @property
    def needs_drain(self) -> bool:
        """Whether ``drain`` must be awaited before writing more."""

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """All of the answer."""

    def start(self, status: int, headers: Headers) -> None:
        """Begin an answer in pieces. It may be sent later, with some of them.

        The front adds the headers by which nobody on the way keeps or gathers it.
        """

    def write(self, data: bytes) -> None:
        """A piece of the body. It may be sent later, with others."""

    def finish(self) -> None:
        """The body is complete."""

    async def drain(self) -> None:
        """Send what was written, as fast as the client takes it."""


# What stands in a request's headers for the gateway itself, and bodies as they were packed.


def get_client_request_id(headers: Mapping[str, str]) -> str | None:
    """The client's own name for the request, where it is fit to be repeated."""
    if "x-request-id" not in headers and "x-client-request-id" not in headers:
        return None
    given = headers.get("x-request-id") or headers.get("x-client-request-id") or ""
    fit = 0 < len(given) <= 128 and given.isascii() and given.isprintable() and " " not in given  # noqa: PLR2004
    return given if fit else None


def parse_seconds(text: str | None) -> float | None:
    """A number of seconds; None where it is none that can be waited for."""
    try:
        found = float(text) if text else 0.0
    except ValueError:
        return None
    return found if 0 < found < float("inf") else None


def decompress_body(body: bytes, encoding: str, limit: int) -> bytes:
    """A body sent with a content encoding. Raises ClientError or TooLarge."""
    match encoding.strip().lower():
        case "identity":
            return body
        case "gzip":
            stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
        case "deflate":
            stream = zlib.decompressobj()
        case _:
            raise ClientError("the body's content encoding is not one that is read here")
    try:
        out = stream.decompress(body, limit + 1)
    except zlib.error:
        raise MalformedRequest(f"the body is not {encoding}", problem="encoding") from None
    if len(out) > limit:
        raise RequestTooLarge(f"the body is larger than {limit} bytes", limit=limit)
    return out
