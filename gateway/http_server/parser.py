"""HTTP/1.1 request parser: reports each request as soon as its head is complete.

Bytes go through one of three readers, by what is expected next: a head, a body of known length, or
a body in chunks. A head is parsed in one step once its blank line is there. Until then its bytes
are kept, and refused as soon as they can't become a valid head. A reader returns where it stopped,
and the next one goes on there: so one packet may hold several requests, and one request may come
in any number of packets, with the same result.

What must never happen:

- Two readings of one message. Whatever a proxy in front might read otherwise (two lengths, a
  length and chunks, a line end or blank in the wrong place, two Hosts) is refused, and the
  connection ends.
- A byte of a body that is read as a head, or the other way round: httptools decodes chunks only up
  to each place where the body may end.
- Memory without a limit: lines, heads, their number and what is buffered of a body have one, and
  all bodies share a budget.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from httptools import HttpParserError, HttpRequestParser
from msgspec import Struct

from gateway.memory import MemoryBudget, build_memory_overload
from protocols.core.errors import MalformedRequest, RequestTooLarge
from protocols.core.name_cache import NameCache

# A request whose head is complete and whose body may still arrive.

MAX_UNREAD_BODY: Final = 64 << 10
"""Bytes of a body that are buffered before it is requested."""


class IncomingRequest(Struct, eq=False):
    """A ``gateway.pipeline.http.HttpRequest``."""

    _loop: asyncio.AbstractEventLoop
    _budget: MemoryBudget
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
    _reserved_response: int = 0
    """The same for a worker's response."""
    _is_over_budget: bool = False
    """Whether there was no room for the body in the budget, so that it is discarded."""
    peer: str = ""
    is_http10: bool = False
    keep_alive: bool = True
    """Whether the client keeps the connection open."""
    expects_continue: bool = False
    """Whether the client waits for 100 Continue."""
    is_broken: bool = False
    """Whether the body is malformed or incomplete."""
    _limit: int | None = None
    waiter: asyncio.Future[None] | None = None
    """Set while a reader waits for more of the body."""

    @property
    def is_full(self) -> bool:
        """Whether reading should pause."""
        return self.body_size > (MAX_UNREAD_BODY if self._limit is None else self._limit)

    async def body(self, limit: int) -> bytes:
        """See ``HttpRequest``. Raises MalformedRequest for an incomplete body."""
        self._limit = limit
        if not self.is_complete:
            await self._wait_for_body(limit)
        if self._is_over_budget:
            raise build_memory_overload()
        if self.body_size > limit:
            raise _build_too_large(limit)
        data, self._data = self._data, b""
        return data if type(data) is bytes else bytes(data)

    def reserve_memory(self, size: int) -> None:
        """See ``HttpRequest``."""
        size = max(size, -self._reserved)  # it may have been dropped
        self._budget.reserve("bodies", size)
        self._reserved += size

    def reserve_response(self, size: int) -> None:
        """See ``HttpRequest``."""
        size = max(size, -self._reserved_response)  # it may have been dropped
        self._budget.reserve("responses", size)
        self._reserved_response += size

    def add_data(self, data: bytes) -> None:
        """Keep data of the body, in one buffer, as long as the budget has room for it."""
        size = len(data)
        self.body_size += size
        if self._is_over_budget:
            return
        has_room = self._budget.try_take("bodies", size)
        if has_room:
            self._reserved += size
        if not has_room or self._is_over_budget:  # its connection may be closed for the room
            self.drop_body()
        elif not self._data:
            self._data = data
        elif type(self._data) is bytearray:
            self._data += data
        else:
            self._data = bytearray(self._data)
            self._data += data

    def drop_body(self) -> None:
        """Discard the body for the sake of other requests."""
        self.release_body()
        self._is_over_budget = True

    def release_body(self) -> None:
        """Give the budget back what the request took of it."""
        self._budget.release("bodies", self._reserved)
        self._reserved = 0
        if self._reserved_response:
            self._budget.release("responses", self._reserved_response)
            self._reserved_response = 0
        self._data = b""

    async def _wait_for_body(self, limit: int) -> None:
        """Wait for the rest of the body. Raises RequestTooLarge early."""
        if "content-length" in self.headers:
            size = int(self.headers["content-length"])
            if size > limit:
                raise _build_too_large(limit)
            self._budget.ensure_room(size - self._reserved)
        while not self.is_complete and not self._is_over_budget:
            if self.is_full and not self.is_broken:
                raise _build_too_large(limit)
            await self._wait_for_data()

    async def _wait_for_data(self) -> None:
        """Wait for more of the body. Raises MalformedRequest or Overloaded."""
        if self._is_over_budget:
            raise build_memory_overload()
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
_JOINED_HEADERS: Final = frozenset({"connection", "forwarded", "x-forwarded-for"})
"""Headers that several are one list of; of others the first one counts."""
_JOINED_SUFFIX: Final = "-beta"
"""The end of the names of others: lists of the versions of an API that a client asks for."""
_SINGLE_HEADERS: Final = frozenset(
    {"api-key", "authorization", "content-encoding", "content-length", "content-type", "host",
     "origin", "transfer-encoding", "x-api-key"}
)  # fmt: skip
"""Headers that may occur only once. Of others, the first counts."""
_HEAD_SIZE_FACTOR: Final = 8
"""The maximum head size, in maximum line sizes."""
_REQUEST_LINE: Final = re.compile(r"([A-Z][A-Z-]{1,31}) ([!-~]+) HTTP/([0-9]\.[0-9])")
_TARGET: Final = re.compile(r"/|\*\Z|[A-Za-z][A-Za-z0-9+.-]*://[^\\/]")
"""How a target begins, except that of CONNECT."""
_AUTHORITY_END: Final = re.compile("[/?#]")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL_BYTES: Final = bytes({*range(0x20), 0x7F} - {ord("\t")})
_CONTENT_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_BEGUN_LINE: Final = re.compile(rb"[A-Z]{1,32}(?:-[A-Z]*)?(?: [!-~]*(?: [A-Z0-9/.]*)?)?\r?")
"""The beginning of a first line."""
_CHUNKED_HEAD: Final = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_HTTP2_PREFACE: Final = "PRI * HTTP/2.0"
"""How a connection begins whose client takes HTTP/2 for granted (RFC 9113, section 3.4)."""
HTTP2_MESSAGE: Final = "HTTP/2 is not supported: use HTTP/1.1, or a proxy that translates it"
_BAD_VERSION: Final = "only HTTP/1.1 and HTTP/1.0 are supported"
_BAD_FIRST_LINE: Final = "the request's first line is not METHOD TARGET HTTP/1.1"
_BAD_HEADER: Final = "a line of the request's head is not a header NAME: VALUE"


@final
class BadRequest(Struct, frozen=True):
    """The response to an unreadable request; the connection closes after it."""

    status: int
    message: str


class _HeadError(Exception):
    """A head that is refused."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.response = BadRequest(status, message)


def _read_header_name(name: str) -> str:
    """The name in lower case. Raises _HeadError for an invalid one."""
    if not _HEADER_NAME.fullmatch(name):
        raise _HeadError(400, _BAD_HEADER)
    return name.lower()


_header_names: Final = NameCache(_read_header_name)
"""A lookup replaces the check of the characters."""


class RequestParser:
    """Parses the requests of one connection.

    ``on_request`` gets each request in order, a ``BadRequest`` as the last one. A request
    that waits for its body calls ``resume_body``.
    """

    def __init__(
        self,
        max_line_size: int,
        loop: asyncio.AbstractEventLoop,
        memory: MemoryBudget,
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
        self._memory = memory
        self._on_request = on_request
        self._resume_body = resume_body
        self._head = bytearray()
        """What was received of an incomplete head."""
        self._checked_size = 0
        """How much of it was checked."""
        self._body_left = 0
        """Bytes that are missing of the current body, unless it comes in chunks."""
        self._chunked_body: _ChunkedBody | None = None
        """The decoder of the current body, if it comes in chunks."""
        self._is_last = False
        """Whether the client closes the connection after the last request that was received."""

    def __repr__(self) -> str:
        expected = "next head"
        if self.in_head:
            expected = f"rest of a head, {len(self._head)} bytes so far"
        elif self.body_request is not None:
            expected = f"rest of a body, {self.body_request.body_size} bytes so far"
        return f"<RequestParser {'stopped' if self.is_stopped else expected}>"

    def feed(self, data: bytes) -> None:
        """Parse data."""
        size, start = len(data), 0
        while start < size and not self.is_stopped:
            if self.body_request is None:
                start = self._read_head(data, start)
            elif self._chunked_body is None:
                start = self._read_body(self.body_request, data, start)
            else:
                start = self._read_chunks(self.body_request, self._chunked_body, data, start)
        if self.body_request is not None:
            self.body_request.notify()

    def close(self) -> None:
        """Break the reference cycles of this parser; it must not be used any more."""
        self.is_stopped = True
        self.body_request = self._chunked_body = None
        del self._on_request, self._resume_body

    def reject(self, status: int, text: str) -> None:
        """Refuse the request whose head is incomplete."""
        if not self.is_stopped:
            self._refuse(self._find_size_error(self._head) or BadRequest(status, text))

    def abort_body(self) -> None:
        """Give the body up: it is malformed or too slow."""
        self.is_stopped = True
        if self.body_request is not None:
            self.body_request.is_broken = True
            self.body_request.notify()

    def _refuse(self, response: BadRequest) -> None:
        self.is_stopped = True
        self.in_head = False
        self._head.clear()
        self._on_request(response)

    # --- heads ------------------------------------------------------------------------------------

    def _read_head(self, data: bytes, start: int) -> int:
        """Read the next head, and what has arrived of its body; returns where that ends."""
        if self.in_head:
            return self._continue_head(data, start)
        if data[start] in _LINE_END:  # empty lines before a request are ignored
            return start + 1
        if self._is_last:
            self._refuse(BadRequest(400, "the request is not HTTP"))
            return len(data)
        end = data.find(_BLANK_LINE, start)
        if end >= 0:
            return self._begin_request(data[start : end + 2], data, end + 4)
        self.in_head = True
        self._head += data[start:]
        self._checked_size = 0
        self._check_incomplete_head()
        return len(data)

    def _continue_head(self, data: bytes, start: int) -> int:
        """Add data to the incomplete head."""
        head = self._head
        known = len(head)
        head += data[start : start + _HEAD_SIZE_FACTOR * self._max_line_size]
        end = head.find(_BLANK_LINE, max(known - 3, 0))
        if end < 0:
            self._check_incomplete_head()
            return len(data)
        whole = bytes(head[: end + 2])
        head.clear()
        self.in_head = False
        return self._begin_request(whole, data, start + end + 4 - known)

    def _check_incomplete_head(self) -> None:
        """Refuse an incomplete head as soon as it can't become a valid one."""
        head, checked, limit = self._head, self._checked_size, self._max_line_size
        end = head.rfind(b"\n", checked) + 1
        if len(head) > _HEAD_SIZE_FACTOR * limit:
            self._refuse(BadRequest(431, "the request's head is too large"))
        elif not end and len(head) - checked > 2 * limit:  # the search for a line end takes longer
            self.reject(431, "the request's head is too large")
        elif not end and not checked and len(head) <= limit and not _BEGUN_LINE.fullmatch(head):
            self._refuse(BadRequest(400, _BAD_FIRST_LINE))
        if self.is_stopped or not end:
            return
        lines = head[checked:end]
        try:
            if not checked:
                first_line, _, _ = bytes(lines).partition(_LINE_END)
                _match_request_line(first_line.decode("latin-1"))
            _check_line_ends(lines, lines.count(_LINE_END))
        except _HeadError as error:
            self._refuse(error.response)
        self._checked_size = end

    def _find_size_error(self, head: bytes | bytearray) -> BadRequest | None:
        """The error of a head with a part that is too large."""
        limit = self._max_line_size
        first, *lines = head.split(_LINE_END)
        _, _, target = first.partition(b" ")
        if len(target.partition(b" ")[0]) > limit:
            return BadRequest(414, "the request's target is too long")
        sizes = (len(line.replace(b":", b"", 1).replace(b" ", b"", 1)) for line in lines)
        if len(lines) > _MAX_HEADERS + 1 or any(size > limit for size in sizes):
            return BadRequest(431, "the request's headers are too large or too many")
        return None

    def _begin_request(self, head: bytes, data: bytes, start: int) -> int:
        """Begin the request with this head; its body is in ``data`` from ``start`` on.

        Returns where the part of the body that has arrived ends.
        """
        try:
            request = self._parse_head(head)
        except _HeadError as error:
            self._refuse(error.response)
            return len(data)
        end = start + self._body_left
        if self._chunked_body is not None:
            self.body_request = request
        elif end <= len(data):
            request.is_complete = True
            if self._body_left:
                request.add_data(data[start:end])
                start = end
        elif start < len(data):
            start = self._read_body(request, data, start)
        else:
            self.body_request = request
        self._on_request(request)
        return start

    def _parse_head(self, head: bytes) -> IncomingRequest:
        """The request with this head, without the blank line. Raises _HeadError."""
        if len(head) > self._max_line_size and (error := self._find_size_error(head)):
            raise _HeadError(error.status, error.message)
        try:  # an error handler would double the time
            text = head.decode()
        except UnicodeDecodeError:
            text = head.decode("utf-8", "surrogateescape")
        first_line, *lines = text.split("\r\n")
        lines.pop()
        method, target, version = _match_request_line(first_line)
        count = len(lines)
        _check_line_ends(head, count + 1)
        headers = _parse_headers(lines)
        is_http10 = version != "1.1"
        if is_http10 and version != "1.0":
            is_http2 = first_line == _HTTP2_PREFACE
            raise _HeadError(505, HTTP2_MESSAGE if is_http2 else _BAD_VERSION)
        host = headers["host"] if "host" in headers else "," * (not is_http10)
        if "," in host or " " in host:
            raise _HeadError(400, "the request must have one header Host")
        if count > _MAX_HEADERS:
            raise _HeadError(431, "the request's headers are too large or too many")
        self._read_framing(headers, is_http10=is_http10)
        if target[0] != "/":
            host, target = _split_origin(method, target)
            if host:
                headers["host"] = host
        path, _, query = target.partition("?")
        keeps = not is_http10 and method != "CONNECT"
        if "connection" in headers:
            keeps = _keeps_alive(headers["connection"], keeps=keeps)
        self._is_last = not keeps
        expects = (
            "expect" in headers and not is_http10 and headers["expect"].lower() == "100-continue"
        )
        return IncomingRequest(
            _loop=self._loop,
            _budget=self._memory,
            _resume_body=self._resume_body,
            method=method,
            path=path,
            query=query,
            headers=headers,
            is_http10=is_http10,
            keep_alive=keeps,
            expects_continue=expects,
        )

    # --- bodies -----------------------------------------------------------------------------------

    def _read_framing(self, headers: Mapping[str, str], *, is_http10: bool) -> None:
        """Read how the end of the body is found (RFC 9112, 6.3). Raises _HeadError."""
        self._chunked_body = None
        self._body_left = 0
        if "transfer-encoding" in headers:
            if "content-length" in headers:
                raise _HeadError(400, "the request has both Content-Length and Transfer-Encoding")
            if is_http10 or headers["transfer-encoding"].lower() != "chunked":
                raise _HeadError(400, "the body's transfer encoding is not supported")
            self._chunked_body = _ChunkedBody()
        elif "content-length" in headers:
            length = headers["content-length"]
            if not _CONTENT_LENGTH.fullmatch(length):
                raise _HeadError(400, "the request's Content-Length is not a number of bytes")
            self._body_left = int(length)

    def _read_body(self, request: IncomingRequest, data: bytes, start: int) -> int:
        """Read a piece of a body of known length; returns where it ends."""
        end = start + self._body_left
        if end > len(data):
            end = len(data)
            self.body_request = request
        else:
            request.is_complete = True
            self.body_request = None
        self._body_left -= end - start
        request.add_data(data[start:end])
        if request.is_complete and request.waiter is not None:
            request.notify()
        return end

    def _read_chunks(
        self, request: IncomingRequest, body: "_ChunkedBody", data: bytes, start: int
    ) -> int:
        """Read a piece of a body in chunks; returns where it ends."""
        try:
            end = body.feed(request, data, start)
        except HttpParserError:
            self.abort_body()
            return len(data)
        if request.is_complete:
            self.body_request = self._chunked_body = None
            request.notify()
        elif body.framing_size > _HEAD_SIZE_FACTOR * self._max_line_size:
            self.abort_body()
        return end


class _ChunkedBody:
    """Decodes a body that comes in chunks (RFC 9112, 7.1), by httptools.

    It is fed up to each blank line, where the body may end, so that httptools never sees what
    follows the body.
    """

    def __init__(self) -> None:
        self.framing_size = 0
        """Bytes since the last data of the body: chunk sizes and trailers."""
        self._tail = b""
        """The last bytes of input that did not end with a blank line."""
        self._request: IncomingRequest | None = None
        """The request whose body is fed."""
        self._parser = HttpRequestParser(self)
        self._parser.feed_data(_CHUNKED_HEAD)

    def feed(self, request: IncomingRequest, data: bytes, start: int) -> int:
        """Decode data up to the end of the body, or all of it; returns where it ends.

        Raises HttpParserError.
        """
        self._request = request
        size = len(data)
        try:
            while start < size and not request.is_complete:
                end = self._find_blank_line(data, start, size)
                self.framing_size += end - start
                self._parser.feed_data(memoryview(data)[start:end])
                start = end
        finally:
            self._request = None
        return start

    def on_body(self, data: bytes) -> None:
        """See httptools: a piece of the body."""
        self.framing_size = 0
        if self._request is not None:
            self._request.add_data(data)

    def on_message_complete(self) -> None:
        """See httptools: the end of the body."""
        if self._request is not None:
            self._request.is_complete = True

    def _find_blank_line(self, data: bytes, start: int, size: int) -> int:
        """Where the body may end: after the next blank line, or else at the end of the data."""
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


def _match_request_line(line: str) -> Sequence[str]:
    """Method, target and version (RFC 9112, 3). Raises _HeadError."""
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise _HeadError(400, _BAD_FIRST_LINE)
    return match.groups()


def _check_line_ends(data: bytes | bytearray, count: int) -> None:
    """Check that data has so many line ends, and no other control character. Raises _HeadError."""
    if len(data) - len(data.translate(None, _CONTROL_BYTES)) != 2 * count:
        raise _HeadError(400, _BAD_HEADER)


def _parse_headers(lines: Sequence[str]) -> dict[str, str]:
    """The headers in these lines (RFC 9112, 5). Raises _HeadError.

    Of several with one name, the first counts.
    """
    headers: dict[str, str] = {}
    names = _header_names
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise _HeadError(400, _BAD_HEADER)
        headers[names[name]] = value.strip(" \t")
    return headers if len(headers) == len(lines) else _resolve_duplicates(lines)


def _resolve_duplicates(lines: Sequence[str]) -> dict[str, str]:
    """The headers in lines of which some have the same name. Raises _HeadError."""
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        key, value = _header_names[name], value.strip(" \t")
        if key not in headers:
            headers[key] = value
        elif key in _JOINED_HEADERS or key.endswith(_JOINED_SUFFIX):
            headers[key] += f", {value}"
        elif key == "host":
            raise _HeadError(400, "the request must have one header Host")
        elif key in _SINGLE_HEADERS:
            raise _HeadError(400, f"the request must have at most one header {key.title()}")
    return headers


def _keeps_alive(connection: str, *, keeps: bool) -> bool:
    """Whether the client keeps the connection, by its header Connection and else ``keeps``."""
    options = [option.strip() for option in connection.lower().split(",")]
    if "close" in options:
        return False
    return keeps or "keep-alive" in options


def _split_origin(method: str, target: str) -> tuple[str, str]:
    """The host of a target that is not a path, which replaces the header's, and the path.

    See RFC 9112, 3.2.2. The host is "" where the target names none. Raises _HeadError.
    """
    if method == "CONNECT":
        return "", target
    if not _TARGET.match(target):
        raise _HeadError(400, _BAD_FIRST_LINE)
    scheme, separator, remainder = target.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        host = _AUTHORITY_END.split(remainder, maxsplit=1)[0]
        if not host or "@" in host or "\\" in host:
            raise _HeadError(400, _BAD_FIRST_LINE)
        path = remainder[len(host) :]
        return host, path if path.startswith("/") else f"/{path}"
    return "", target
