"""HTTP/1.1 request parser: reports each request as soon as its head is complete."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from msgspec import Struct

from gateway.http_server.overload import BodyBudget, build_body_overload
from protocols.core.errors import MalformedRequest, RequestTooLarge

# A request whose head is complete and whose body may still arrive.

MAX_UNREAD_BODY: Final = 64 << 10
"""Bytes of a body that are buffered before it is requested."""


class IncomingRequest(Struct, eq=False):
    """A ``gateway.pipeline.http.HttpRequest``."""

    _loop: asyncio.AbstractEventLoop
    _budget: BodyBudget
    _resume_body: Callable[[], None]
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    is_complete: bool = False
    _data: bytes | bytearray = b""
    """What was received of the body and is still kept."""
    body_size: int = 0
    """Bytes received."""
    _reserved: int = 0
    """Bytes taken of the budget."""
    _is_over_budget: bool = False
    """Whether the body did not fit into the budget and is discarded."""
    peer: str = ""
    is_http10: bool = False
    keep_alive: bool = True
    """Whether the client keeps the connection open."""
    expects_continue: bool = False
    """Whether the client waits for 100 Continue."""
    is_broken: bool = False
    """Whether the body is malformed or incomplete."""
    _limit: int | None = None
    _taken: int = 0
    """Bytes that were read in pieces."""
    waiter: asyncio.Future[None] | None = None
    """Set while a reader waits for more of the body."""

    @property
    def is_full(self) -> bool:
        """Whether reading should pause."""
        unread = self.body_size - self._taken
        return unread > (MAX_UNREAD_BODY if self._limit is None else self._limit)

    async def body(self, limit: int) -> bytes:
        """See ``HttpRequest``. Raises MalformedRequest for an incomplete body."""
        self._limit = limit
        if not self.is_complete:
            await self._wait_for_body(limit)
        if self._is_over_budget:
            raise build_body_overload()
        if self.body_size > limit:
            raise _build_too_large(limit)
        data = self._data
        if type(data) is not bytes:
            data = self._data = bytes(data)
        return data

    async def peek_body(self, size: int) -> tuple[bytes, bool]:
        """See ``gateway.pipeline.http.StreamedHttpRequest``."""
        self._limit = size
        while self.body_size <= size and not self.is_complete:
            await self._wait_for_data()
        if self._is_over_budget:
            raise build_body_overload()
        return bytes(self._data), self.is_complete

    async def read_body_piece(self) -> bytes:
        """See ``gateway.pipeline.http.StreamedHttpRequest``."""
        self._limit = None
        while not self._data and not self.is_complete:
            await self._wait_for_data()
        if self._is_over_budget:
            raise build_body_overload()
        data = bytes(self._data)
        self._taken += len(data)
        self.release_body()
        return data

    def add_data(self, data: bytes) -> None:
        """Keep data of the body, in one buffer, as long as the budget has room for it."""
        size, budget = len(data), self._budget
        if not self._is_over_budget and budget.used + size > budget.limit:
            self.release_body()
            self._is_over_budget = True
        if self._is_over_budget:
            self.body_size += size
            return
        if not self._reserved:
            self._data = data
        elif type(self._data) is bytearray:
            self._data += data
        else:
            self._data = bytearray(self._data)
            self._data += data
        self.body_size += size
        self._reserved += size
        budget.used += size

    def release_body(self) -> None:
        """Give the budget back what the body took of it."""
        self._budget.used -= self._reserved
        self._reserved = 0
        self._data = b""

    async def _wait_for_body(self, limit: int) -> None:
        """Wait for the rest of the body. Raises RequestTooLarge early."""
        if "content-length" in self.headers:
            size = int(self.headers["content-length"])
            if size > limit:
                raise _build_too_large(limit)
            if not self._budget.has_room(size - self._reserved):
                raise build_body_overload()
        while not self.is_complete and not self._is_over_budget:
            if self.is_full and not self.is_broken:
                raise _build_too_large(limit)
            await self._wait_for_data()

    async def _wait_for_data(self) -> None:
        """Wait for more of the body. Raises MalformedRequest or Overloaded."""
        if self._is_over_budget:
            raise build_body_overload()
        if self.is_broken:
            raise MalformedRequest("the body did not arrive whole")
        self._resume_body()
        self.waiter = self._loop.create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None

    def notify(self) -> None:
        """Wake the reader of the body."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


def _build_too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {limit} bytes", limit=limit)


_MAX_HEADERS: Final = 128
_BLANK_LINE: Final = b"\r\n\r\n"
_LINE_END: Final = b"\r\n"
_SINGLE_HEADERS: Final = frozenset({"authorization", "host"})
"""Headers that may occur only once. Of others, the first counts."""
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n"
"""How a connection begins whose client takes HTTP/2 for granted (RFC 9113, section 3.4)."""
HTTP2_MESSAGE: Final = "HTTP/2 is not supported: use HTTP/1.1, or a proxy that translates it"
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
        body_budget: BodyBudget,
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
        self._body_budget = body_budget
        self._on_request = on_request
        self._resume_body = resume_body
        self._parser = HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._duplicate_header = ""
        """A header that may occur only once and did so twice."""
        self._line: bytes | bytearray = b""
        """Input with the current request's first line."""
        self._line_start = 0
        """Where the first line begins in ``_line``."""
        self._is_at_start = False
        """Whether the next byte is the first one of a request."""
        self._tail = b""
        """The last bytes of input that did not end with the end of a head or body."""
        self._body_left: int | None = None
        """Bytes that are missing of the current body; None if it comes in chunks."""
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
        size, start = len(data), 0
        while start < size and not self.is_stopped:
            if self.body_request is not None:
                end = self._find_body_end(data, start, size)
            elif self.in_head:
                end = self._find_blank_line(data, start, size)
                self._add_to_head(data, start, end)
            elif data[start] in _LINE_END:
                start += 1
                continue
            else:
                end = self._find_blank_line(data, start, size)
                self._head_size = self._max_part_size = end - start
                self._line, self._line_start, self._is_at_start = data, start, True
            piece = data if end - start == size else memoryview(data)[start:end]
            start = end
            try:
                self._parser.feed_data(piece)
            except HttpParserUpgrade:
                self._ignore_upgrade()
            except HttpParserError:
                self._handle_parse_error()
        if self.in_head and self._head_size > _HEAD_SIZE_FACTOR * self._max_line_size:
            self.reject(431, "the request's head is too large")
        if self.body_request is not None:
            if self._framing_bytes > _HEAD_SIZE_FACTOR * self._max_line_size:
                self.abort_body()
            self.body_request.notify()

    def close(self) -> None:
        """Break the reference cycles of this parser; it must not be used any more."""
        self.is_stopped = True
        self.body_request = self._upgrade_request = None
        del self._parser, self._on_request, self._resume_body

    def reject(self, status: int, text: str) -> None:
        """Refuse the request whose head is incomplete."""
        if not self.is_stopped:
            self.is_stopped = True
            self.in_head = False
            self._on_request(self._error or BadRequest(status, text))

    def abort_body(self) -> None:
        """Give the body up: it is malformed or too slow."""
        self.is_stopped = True
        if self.body_request is not None:
            self.body_request.is_broken = True
            self.body_request.notify()

    # --- httptools ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self.in_head = not self._is_replay
        if not (self._is_at_start or self._is_replay):
            self._set_error(400, "the request is not HTTP")
        self._is_at_start = False
        self._url = b""
        self._headers = {}
        self._duplicate_header = ""
        self._header_count = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url
        if self._max_part_size > self._max_line_size and len(self._url) > self._max_line_size:
            self._set_error(414, "the request's target is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Of several with one name, the first counts."""
        if not self.in_head:
            return  # trailers are ignored
        self._header_count += 1
        large = (
            self._max_part_size > self._max_line_size
            and len(name) + len(value) > self._max_line_size
        )
        if large or self._header_count > _MAX_HEADERS:
            self._set_error(431, "the request's headers are too large or too many")
            return
        key, headers = name.decode("latin-1").lower(), self._headers
        if key not in headers:
            try:  # an error handler would double the time
                headers[key] = value.decode()
            except UnicodeDecodeError:
                headers[key] = value.decode("utf-8", "surrogateescape")
        elif key in _SINGLE_HEADERS:
            self._duplicate_header = key

    def on_headers_complete(self) -> None:
        """The head is complete; the body may still come."""
        if self._is_replay:
            return
        self.in_head = False
        self._head_size = 0
        if self.is_stopped:
            return
        request = self._build_request()
        if self._error is None:
            self.body_request = request
            self._framing_bytes = 0
            if self._parser.should_upgrade():
                self._upgrade_request = request
            self._on_request(request)
        else:
            self.is_stopped = True
            self._on_request(self._error)

    def on_body(self, data: bytes) -> None:
        """A piece of a body."""
        self._framing_bytes = 0
        if (body := self.body_request) is not None:
            body.add_data(data)

    def on_message_complete(self) -> None:
        """The request is complete, unless the parser expects another protocol now."""
        if (body := self.body_request) is not None and self._upgrade_request is None:
            body.is_complete = True
            if body.waiter is not None:
                body.notify()
            self.body_request = None

    # --- pieces of the input --------------------------------------------------------------------
    #
    # Each head and each body is fed to httptools on its own. So the parser knows where a request
    # begins, and sees its first line as it was sent; httptools tolerates other forms of it.

    def _find_blank_line(self, data: bytes, start: int, size: int) -> int:
        """Where a head or a body in chunks may end: after the next blank line, or at the end."""
        if tail := self._tail:
            at = (tail + data[start : start + 3]).find(_BLANK_LINE)
            if at >= 0:
                self._tail = b""
                return start + at + 4 - len(tail)
        at = data.find(_BLANK_LINE, start)
        if at >= 0:
            self._tail = b""
            return at + 4
        self._tail = (tail + data[max(start, size - 3) :])[-3:]
        return size

    def _find_body_end(self, data: bytes, start: int, size: int) -> int:
        """Where the current body ends or may end."""
        if self._body_left is None:
            end = self._find_blank_line(data, start, size)
        else:
            end = size if size - start <= self._body_left else start + self._body_left
            self._body_left -= end - start
        self._framing_bytes += end - start
        return end

    def _add_to_head(self, data: bytes, start: int, end: int) -> None:
        """Note another piece of the current head: its size, and the rest of its first line."""
        self._head_size += end - start
        self._max_part_size += end - start
        if self._line.find(b"\n", self._line_start) < 0:
            if type(self._line) is bytes:
                self._line = bytearray(self._line[self._line_start :])
                self._line_start = 0
            self._line += data[start:end]

    # --- within ---------------------------------------------------------------------------------

    def _ignore_upgrade(self) -> None:
        """Ignore an Upgrade header and continue with plain HTTP.

        The parser stops before the body, so a new one gets the framing headers again.
        """
        self._parser = HttpRequestParser(self)
        request, self._upgrade_request = self._upgrade_request, None
        headers = {} if request is None else request.headers
        framing = ("content-length", "transfer-encoding")
        lines = [f"{name}: {headers[name]}" for name in framing if name in headers]
        self._is_replay = True
        self._parser.feed_data("\r\n".join(["POST / HTTP/1.1", *lines, "", ""]).encode())
        self._is_replay = False

    def _handle_parse_error(self) -> None:
        if self.body_request is not None:
            self.abort_body()
        elif self._line.startswith(_HTTP2_PREFACE, self._line_start):
            self.reject(505, HTTP2_MESSAGE)
        else:
            self.reject(400, "the request is not HTTP")

    def _set_error(self, status: int, text: str) -> None:
        self._error = self._error or BadRequest(status, text)

    def _build_request(self) -> IncomingRequest:
        parser, headers = self._parser, self._headers
        method, version = parser.get_method(), parser.get_http_version()
        http10 = version != "1.1"
        if http10 and version != "1.0":
            self._set_error(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        line = b"%b %b HTTP/1.%d\r\n" % (method, self._url, not http10)
        if not self._line.startswith(line, self._line_start):
            self._set_error(400, "the request's first line is not METHOD TARGET HTTP/1.1")
        if self._duplicate_header == "authorization":
            self._set_error(400, "the request must have at most one header Authorization")
        host = headers["host"] if "host" in headers else "," * (not http10)
        if self._duplicate_header or "," in host or " " in host:
            self._set_error(400, "the request must have one header Host")
        if "transfer-encoding" in headers:
            if http10 or headers["transfer-encoding"].lower() != "chunked":
                self._set_error(400, "the body's transfer encoding is not supported")
            self._body_left = None
        else:
            self._body_left = int(headers["content-length"]) if "content-length" in headers else 0
        path, query = _split_target(self._url)
        keeps = parser.should_keep_alive() and method != b"CONNECT"
        expects = "expect" in headers and not http10 and headers["expect"].lower() == "100-continue"
        return IncomingRequest(
            self._loop,
            self._body_budget,
            self._resume_body,
            method.decode(),
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
    scheme, separator, remainder = target.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        _, slash, path = remainder.partition("/")
        return slash + path or "/"
    return target
