"""What a client sends, read as requests: each is told of when its head is there."""

import asyncio
from collections.abc import Callable
from typing import Final, final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from msgspec import Struct

from gateway.front.incoming import Incoming

_HEADERS: Final = 128
_HEADS: Final = 8
"""How many lines as long as one may be a head may take."""


@final
class Refused(Struct, frozen=True):
    """A request that can't be read: what is answered, before the connection ends."""

    status: int
    text: str


class Reader:
    """Reads the requests of one connection.

    ``arrived`` is called with each, in their order; after one that is refused nothing more is read.
    ``go_on`` is what a request calls that waits for its body.
    """

    def __init__(
        self,
        line: int,
        loop: asyncio.AbstractEventLoop,
        arrived: Callable[[Incoming | Refused], None],
        go_on: Callable[[], None],
    ) -> None:
        """``line`` is how many bytes the target and each header may have."""
        self.in_head = False
        """A head has begun, and not ended."""
        self.body: Incoming | None = None
        """The request whose body comes."""
        self.deaf = False
        """Nothing that comes is read any more."""
        self._line = line
        self._loop = loop
        self._arrived = arrived
        self._go_on = go_on
        self._parser = HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._hosts = False
        """Several headers Host have come."""
        self._count = 0
        self._size = 0
        self._most = 0
        """Bytes that came since some time before the head began: no part of it has more."""
        self._between = 0
        """How many bytes came since the last piece of the body: sizes of chunks, trailers."""
        self._refused: Refused | None = None
        self._offering: Incoming | None = None
        """The request whose head offers another protocol."""
        self._again = False
        """The head is one that was read before."""

    def feed(self, data: bytes) -> None:
        """Read on."""
        rest: bytes | memoryview = data
        while rest and not self.deaf:
            come = len(rest)
            if self.in_head:
                self._size += come
                self._most += come
            else:
                self._size = self._most = come
            if self.body is not None:
                self._between += come
            try:
                self._parser.feed_data(rest)
            except HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
                self._stay()
                continue
            except HttpParserError:
                self._fail()
            break
        if self.in_head and self._size > _HEADS * self._line:
            self.give_up(431, "the request's head is too large")
        if self.body is not None:
            if self._between > _HEADS * self._line:
                self.break_off()
            self.body.wake()

    def give_up(self, status: int, text: str) -> None:
        """Refuse the request whose head is not there."""
        if not self.deaf:
            self.deaf = True
            self.in_head = False
            self._arrived(self._refused or Refused(status, text))

    def break_off(self) -> None:
        """Nothing more of the body is worth waiting for."""
        self.deaf = True
        if self.body is not None:
            self.body.broken = True
            self.body.wake()

    # --- httptools ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self.in_head = not self._again
        self._url = b""
        self._headers = {}
        self._hosts = False
        self._count = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url
        if self._most > self._line and len(self._url) > self._line:
            self._refuse(414, "the request's target is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Of several of one name the first counts."""
        if not self.in_head:
            return  # what follows a body in chunks tells nothing here
        self._count += 1
        large = self._most > self._line and len(name) + len(value) > self._line
        if large or self._count > _HEADERS:
            self._refuse(431, "the request's headers are too large or too many")
            return
        known, headers = name.decode("latin-1").lower(), self._headers
        if known not in headers:
            try:  # nearly all are, and without a choice of errors that is half the work
                headers[known] = value.decode()
            except UnicodeDecodeError:
                headers[known] = value.decode("utf-8", "surrogateescape")
        elif known == "host":
            self._hosts = True

    def on_headers_complete(self) -> None:
        """A request can be served; its body may still come."""
        if self._again:
            return
        self.in_head = False
        self._size = 0
        if self.deaf:
            return
        made = self._told()
        if self._refused is None:
            self.body = made
            self._between = 0
            if self._parser.should_upgrade():
                self._offering = made
            self._arrived(made)
        else:
            self.deaf = True
            self._arrived(self._refused)

    def on_body(self, data: bytes) -> None:
        """A piece of a body."""
        self._between = 0
        if (body := self.body) is not None:
            body.parts.append(data)
            body.size += len(data)

    def on_message_complete(self) -> None:
        """A request is there as a whole, unless the parser awaits another protocol now."""
        if (body := self.body) is not None and self._offering is None:
            body.complete = True
            body.wake()
            self.body = None

    # --- within ---------------------------------------------------------------------------------

    def _stay(self) -> None:
        """Read on as plain HTTP after an offer of another protocol: that changes nothing here.

        The parser has left the request's body unread, and needs to be told of it again.
        """
        self._parser = HttpRequestParser(self)
        offering, self._offering = self._offering, None
        headers = {} if offering is None else offering.headers
        framing = ("content-length", "transfer-encoding")
        told = [f"{name}: {headers[name]}" for name in framing if name in headers]
        self._again = True
        self._parser.feed_data("\r\n".join(["POST / HTTP/1.1", *told, "", ""]).encode())
        self._again = False

    def _fail(self) -> None:
        if self.body is not None:
            self.break_off()
        else:
            self.give_up(400, "the request is not HTTP")

    def _refuse(self, status: int, text: str) -> None:
        self._refused = self._refused or Refused(status, text)

    def _told(self) -> Incoming:
        parser, headers = self._parser, self._headers
        method, version = parser.get_method().decode(), parser.get_http_version()
        http10 = version != "1.1"
        if http10 and version != "1.0":
            self._refuse(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        if self._hosts or ("host" not in headers and not http10):
            self._refuse(400, "the request must have one header Host")
        if "transfer-encoding" in headers and (
            http10 or headers["transfer-encoding"].lower() != "chunked"
        ):
            self._refuse(400, "the body's transfer encoding is not one that is read here")
        path, query = _target(self._url)
        keeps = parser.should_keep_alive() and method != "CONNECT"
        expects = "expect" in headers and not http10 and headers["expect"].lower() == "100-continue"
        return Incoming(
            self._loop,
            self._go_on,
            method,
            path,
            query,
            headers,
            http10=http10,
            keeps=keeps,
            expects=expects,
        )


def _target(url: bytes) -> tuple[str, str]:
    """Path and query of a request's target."""
    target, _, query = url.decode("utf-8", "surrogateescape").partition("?")
    return target if target[:1] == "/" else _path(target), query


def _path(target: str) -> str:
    """The path of a target that may name the host before it (RFC 9112, 3.2.2)."""
    scheme, found, rest = target.partition("://")
    if found and scheme.lower() in ("http", "https"):
        _, slash, path = rest.partition("/")
        return slash + path or "/"
    return target
