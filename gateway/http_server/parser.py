"""HTTP/1.1 request parser: reports each request as soon as its head is complete."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from msgspec import Struct

from protocols.core.errors import MalformedRequest, RequestTooLarge

# A request whose head is complete and whose body may still arrive.

MAX_UNREAD_BODY: Final = 64 << 10
"""Bytes of a body that are buffered before it is requested."""


class IncomingRequest(Struct, eq=False):
    """A ``gateway.pipeline.http.HttpRequest``."""

    _loop: asyncio.AbstractEventLoop
    _resume_body: Callable[[], None]
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    is_complete: bool = False
    body_parts: list[bytes] = []
    """The received data of the body."""
    body_size: int = 0
    """Bytes received."""
    peer: str = ""
    is_http10: bool = False
    keep_alive: bool = True
    """Whether the client keeps the connection open."""
    expects_continue: bool = False
    """Whether the client waits for 100 Continue."""
    is_broken: bool = False
    """Whether the body is malformed or incomplete."""
    _limit: int | None = None
    _waiter: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether reading should pause."""
        return self.body_size > (MAX_UNREAD_BODY if self._limit is None else self._limit)

    async def body(self, limit: int) -> bytes:
        """See ``HttpRequest``. Raises MalformedRequest for an incomplete body."""
        self._limit = limit
        if not self.is_complete:
            await self._wait_for_body(limit)
        if self.body_size > limit:
            raise _build_too_large(limit)
        return b"".join(self.body_parts)

    async def _wait_for_body(self, limit: int) -> None:
        """Wait for the rest of the body. Raises RequestTooLarge early."""
        if "content-length" in self.headers and int(self.headers["content-length"]) > limit:
            raise _build_too_large(limit)
        while not self.is_complete:
            if self.is_broken:
                raise MalformedRequest("the body did not arrive whole")
            if self.is_full:
                raise _build_too_large(limit)
            self._resume_body()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def notify(self) -> None:
        """Wake the reader of the body."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _build_too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {limit} bytes", limit=limit)


_MAX_HEADERS: Final = 128
_HEAD_SIZE_FACTOR: Final = 8
"""The maximum head size, in maximum line sizes."""


@final
class BadRequest(Struct, frozen=True):
    """The response to an unreadable request; the connection closes after it."""

    status: int
    message: str


class RequestParser:
    """Parses the requests of one connection.

    ``on_request`` gets each request in order, a ``BadRequest`` as the last one. A request
    that waits for its body calls ``resume_body``.
    """

    def __init__(
        self,
        max_line_size: int,
        loop: asyncio.AbstractEventLoop,
        on_request: Callable[[IncomingRequest | BadRequest], None],
        resume_body: Callable[[], None],
    ) -> None:
        """``max_line_size`` limits the target and each header, in bytes."""
        self.in_head = False
        """Whether a head is being received."""
        self.body_request: IncomingRequest | None = None
        """The request whose body is being received."""
        self.is_stopped = False
        """Whether input is discarded."""
        self._max_line_size = max_line_size
        self._loop = loop
        self._on_request = on_request
        self._resume_body = resume_body
        self._parser = HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._has_duplicate_host = False
        """Whether there are several Host headers."""
        self._header_count = 0
        self._head_size = 0
        self._max_part_size = 0
        """An upper bound for the size of each part of the head."""
        self._framing_bytes = 0
        """Bytes since the last body data: chunk sizes and trailers."""
        self._error: BadRequest | None = None
        self._upgrade_request: IncomingRequest | None = None
        """The request that has an Upgrade header."""
        self._is_replay = False
        """Whether a head is parsed a second time."""

    def feed(self, data: bytes) -> None:
        """Parse data."""
        rest: bytes | memoryview = data
        while rest and not self.is_stopped:
            come = len(rest)
            if self.in_head:
                self._head_size += come
                self._max_part_size += come
            else:
                self._head_size = self._max_part_size = come
            if self.body_request is not None:
                self._framing_bytes += come
            try:
                self._parser.feed_data(rest)
            except HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
                self._ignore_upgrade()
                continue
            except HttpParserError:
                self._handle_parse_error()
            break
        if self.in_head and self._head_size > _HEAD_SIZE_FACTOR * self._max_line_size:
            self.reject(431, "the request's head is too large")
        if self.body_request is not None:
            if self._framing_bytes > _HEAD_SIZE_FACTOR * self._max_line_size:
                self.abort_body()
            self.body_request.notify()

    def reject(self, status: int, text: str) -> None:
        """Refuse the request whose head is not there."""
        if not self.is_stopped:
            self.is_stopped = True
            self.in_head = False
            self._on_request(self._error or BadRequest(status, text))

    def abort_body(self) -> None:
        """Nothing more of the body is worth waiting for."""
        self.is_stopped = True
        if self.body_request is not None:
            self.body_request.is_broken = True
            self.body_request.notify()

    # --- httptools ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self.in_head = not self._is_replay
        self._url = b""
        self._headers = {}
        self._has_duplicate_host = False
        self._header_count = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url
        if self._max_part_size > self._max_line_size and len(self._url) > self._max_line_size:
            self._set_error(414, "the request's target is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Of several of one name the first counts."""
        if not self.in_head:
            return  # what follows a body in chunks tells nothing here
        self._header_count += 1
        large = (
            self._max_part_size > self._max_line_size
            and len(name) + len(value) > self._max_line_size
        )
        if large or self._header_count > _MAX_HEADERS:
            self._set_error(431, "the request's headers are too large or too many")
            return
        known, headers = name.decode("latin-1").lower(), self._headers
        if known not in headers:
            try:  # nearly all are, and without a choice of errors that is half the work
                headers[known] = value.decode()
            except UnicodeDecodeError:
                headers[known] = value.decode("utf-8", "surrogateescape")
        elif known == "host":
            self._has_duplicate_host = True

    def on_headers_complete(self) -> None:
        """A request can be served; its body may still come."""
        if self._is_replay:
            return
        self.in_head = False
        self._head_size = 0
        if self.is_stopped:
            return
        made = self._build_request()
        if self._error is None:
            self.body_request = made
            self._framing_bytes = 0
            if self._parser.should_upgrade():
                self._upgrade_request = made
            self._on_request(made)
        else:
            self.is_stopped = True
            self._on_request(self._error)

    def on_body(self, data: bytes) -> None:
        """A piece of a body."""
        self._framing_bytes = 0
        if (body := self.body_request) is not None:
            body.body_parts.append(data)
            body.body_size += len(data)

    def on_message_complete(self) -> None:
        """A request is there as a whole, unless the parser awaits another protocol now."""
        if (body := self.body_request) is not None and self._upgrade_request is None:
            body.is_complete = True
            body.notify()
            self.body_request = None

    # --- within ---------------------------------------------------------------------------------

    def _ignore_upgrade(self) -> None:
        """Ignore an Upgrade header and continue with plain HTTP.

        The parser stops before the body, so a new one gets the framing headers again.
        """
        self._parser = HttpRequestParser(self)
        offering, self._upgrade_request = self._upgrade_request, None
        headers = {} if offering is None else offering.headers
        framing = ("content-length", "transfer-encoding")
        told = [f"{name}: {headers[name]}" for name in framing if name in headers]
        self._is_replay = True
        self._parser.feed_data("\r\n".join(["POST / HTTP/1.1", *told, "", ""]).encode())
        self._is_replay = False

    def _handle_parse_error(self) -> None:
        if self.body_request is not None:
            self.abort_body()
        else:
            self.reject(400, "the request is not HTTP")

    def _set_error(self, status: int, text: str) -> None:
        self._error = self._error or BadRequest(status, text)

    def _build_request(self) -> IncomingRequest:
        parser, headers = self._parser, self._headers
        method, version = parser.get_method().decode(), parser.get_http_version()
        http10 = version != "1.1"
        if http10 and version != "1.0":
            self._set_error(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        if self._has_duplicate_host or ("host" not in headers and not http10):
            self._set_error(400, "the request must have one header Host")
        if "transfer-encoding" in headers and (
            http10 or headers["transfer-encoding"].lower() != "chunked"
        ):
            self._set_error(400, "the body's transfer encoding is not one that is read here")
        path, query = _split_target(self._url)
        keeps = parser.should_keep_alive() and method != "CONNECT"
        expects = "expect" in headers and not http10 and headers["expect"].lower() == "100-continue"
        return IncomingRequest(
            self._loop,
            self._resume_body,
            method,
            path,
            query,
            headers,
            is_http10=http10,
            keep_alive=keeps,
            expects_continue=expects,
        )


def _split_target(url: bytes) -> tuple[str, str]:
    """Split the request target into path and query."""
    target, _, query = url.decode("utf-8", "surrogateescape").partition("?")
    return target if target[:1] == "/" else _strip_origin(target), query


def _strip_origin(target: str) -> str:
    """The path of a target in absolute form (RFC 9112, 3.2.2)."""
    scheme, found, rest = target.partition("://")
    if found and scheme.lower() in ("http", "https"):
        _, slash, path = rest.partition("/")
        return slash + path or "/"
    return target
