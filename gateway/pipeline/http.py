"""The pipeline's view of HTTP: a request, a writer for its response, and common header values.

The HTTP server implements both interfaces; the pipeline does not know which server it is.
"""

import re
import zlib
from collections.abc import Mapping
from typing import Final, Protocol

from gateway.observability.record import RequestRecord
from protocols.core.errors import (
    GatewayError,
    MalformedRequest,
    RequestTooLarge,
    UnsupportedEncoding,
)
from protocols.core.interfaces import Headers

LARGE_BODY: Final = 256 << 10
"""A body of so many bytes takes milliseconds to read or to translate, so a thread does it."""


class HttpRequest(Protocol):
    """One HTTP request whose body was not read yet."""

    method: str
    path: str
    """Raw, still percent-encoded, without the query."""
    query: str
    headers: Mapping[str, str]
    """By lower-case name."""
    peer: str

    async def body(self, limit: int) -> bytes:
        """The body, which is read once.

        Raises RequestTooLarge after reading more than ``limit`` bytes.
        """

    def reserve_memory(self, size: int) -> None:
        """See ``gateway.store.references.MemoryAccount``: for what the request refers to."""

    def reserve_response(self, size: int) -> None:
        """See ``backends.interfaces.RequestContext.reserve_memory``."""


class CancellableRequest(Protocol):
    """A running request, as the admin API and a shutdown see it."""

    @property
    def record(self) -> RequestRecord:
        """The request's record so far."""

    @property
    def age(self) -> float:
        """Seconds since the request was read."""

    @property
    def started(self) -> bool:
        """Whether the response has begun."""

    def stop(self, error: GatewayError | None = None) -> None:
        """Cancel the request with this error; by default, as if its client had cancelled it."""


class ResponseWriter(Protocol):
    """Writes one response: with ``send_response``, or in chunks from ``start`` to ``finish``."""

    @property
    def started(self) -> bool:
        """Whether the response has begun."""

    @property
    def needs_drain(self) -> bool:
        """Whether ``drain`` must be awaited before writing more."""

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a response in one piece."""

    def start(self, status: int, headers: Headers) -> None:
        """Begin a chunked response. Its head may be sent later, with the first chunks.

        The HTTP server adds the headers that keep proxies from caching or buffering it.
        """

    def write(self, data: bytes) -> None:
        """Write a chunk of the body. It may be sent later, with others."""

    def flush(self) -> None:
        """Send what was written, without waiting for the client to read it."""

    def finish(self) -> None:
        """End the body."""

    async def drain(self) -> None:
        """Wait until the client has read enough to write more."""


class ResponseWriterWrapper:
    """A ``ResponseWriter`` that adds headers to the response of another one."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer

    def extend_headers(self, headers: Headers) -> Headers:
        """The headers of the response, and those that are added. Overridden."""
        return headers

    @property
    def started(self) -> bool:
        """See ``ResponseWriter``."""
        return self._writer.started

    @property
    def needs_drain(self) -> bool:
        """See ``ResponseWriter``."""
        return self._writer.needs_drain

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """See ``ResponseWriter``."""
        self._writer.send_response(status, self.extend_headers(headers), body)

    def start(self, status: int, headers: Headers) -> None:
        """See ``ResponseWriter``."""
        self._writer.start(status, self.extend_headers(headers))

    def write(self, data: bytes) -> None:
        """See ``ResponseWriter``."""
        self._writer.write(data)

    def flush(self) -> None:
        """See ``ResponseWriter``."""
        self._writer.flush()

    def finish(self) -> None:
        """See ``ResponseWriter``."""
        self._writer.finish()

    async def drain(self) -> None:
        """See ``ResponseWriter``."""
        await self._writer.drain()


# Request headers that the gateway reads itself, and content encodings.

_REQUEST_ID: Final = re.compile("[!-~]{1,128}")


def get_client_request_id(headers: Mapping[str, str]) -> str | None:
    """The client's id for the request, if it can be sent back in a header."""
    request_id = headers.get("x-request-id") or headers.get("x-client-request-id")
    return request_id if request_id and _REQUEST_ID.fullmatch(request_id) else None


def parse_seconds(text: str | None) -> float | None:
    """A positive, finite number of seconds; None for any other text."""
    try:
        seconds = float(text) if text else 0.0
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


def decompress_body(body: bytes, encoding: str, limit: int) -> bytes:
    """Decode a body's content encoding. Raises ClientError."""
    match encoding.strip().lower():
        case "identity":
            return body
        case "gzip":
            stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
        case "deflate":
            stream = zlib.decompressobj()
        case _:
            text = f"unsupported content encoding {encoding[:32]!r}: use gzip, deflate or identity"
            raise UnsupportedEncoding(text)
    try:
        data = stream.decompress(body, limit + 1)
    except zlib.error:
        raise MalformedRequest(f"the body is not {encoding}", problem="encoding") from None
    if len(data) > limit:
        raise RequestTooLarge(f"the body is larger than {limit} bytes", limit=limit)
    if body and not stream.eof:
        raise MalformedRequest(f"the {encoding} body ends early", problem="encoding")
    if stream.unused_data:  # other servers read it as a further part of the body
        text = f"the {encoding} body has {len(stream.unused_data)} bytes behind its end"
        raise MalformedRequest(text, problem="encoding")
    return data
