"""The data path's HTTP client, behind a seam: the pool knows ``Upstream`` and ``Reading`` only.

What goes wrong is told in the tree's words, and never with a worker's address or text:

WorkerUnreachable   no connection: refused, no such name, no TLS, not in time; nothing was sent
StreamBroken        the connection ended before the answer did, even if that was at its first byte
WorkerFailed        what came is not HTTP
"""

import asyncio
import io
import re
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Protocol
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.connector import Connection
from msgspec import Struct
from yarl import URL

from gateway.core.errors import InternalError, StreamBroken, WorkerFailed, WorkerUnreachable
from gateway.core.ports import WireRequest

_BUFFER: Final = 64 << 10
"""Bytes of an answer held before the worker is made to wait; twice as many at most."""
_LARGE: Final = 1 << 20
"""A body from here on is written in pieces, with other work between them."""
_HEADER_BYTES: Final = 8190
_HEADERS: Final = 128
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence, then between questions, and how many: a line that broke is found out in 30 s.

The system would wait two hours, and before a whole answer nothing else notices.
"""
_PATH: Final = re.compile(r"/[!-\"$-~]*")
_KEY: Final = re.compile(r"[!-~]+")
_UNWANTED: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that the client would add of itself."""


class Worker(Struct, frozen=True):
    """One process behind a URL, which is its base, without the dialect's path.

    Raises ValueError for a URL that is not plainly that, and for a key that no header can hold.
    """

    url: str
    weight: int = 1
    max_concurrency: int | None = None
    """Requests at a time; None means that the worker takes what comes."""
    bearer: str | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            plain = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            raise ValueError(f"{self.url!r} is not a URL") from None
        if not plain or parts.username is not None or set("?#\\") & set(self.url):
            raise ValueError(
                f"{self.url!r} is not a worker's URL: http or https, host, port, and a path"
            )

        if self.bearer is not None and not _KEY.fullmatch(self.bearer):
            raise ValueError(f"the key for {self.url!r} is not printable ASCII without spaces")

    def __repr__(self) -> str:
        return f"Worker({self.url!r})"


class Queue(Struct, frozen=True):
    """How many requests may wait for a place at a worker, and for how many seconds."""

    max: int = 200
    wait: float = 10.0


class Reading(Protocol):
    """An answer, once its head has come."""

    @property
    def status(self) -> int:
        """As the worker sent it."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Names in lower case."""

    async def read(self) -> bytes:
        """What has come, as soon as something has; b"" at a clean end. Raises StreamBroken."""

    def abort(self) -> None:
        """Close the connection at once, whatever is still on its way. May be called again."""

    def release(self) -> None:
        """Nobody reads any more: the connection may serve again, if it brought the whole answer.

        Otherwise the same as ``abort``. One of the two is called for every reading.
        """


class Upstream(Protocol):
    """Sends requests to workers."""

    async def open(self, url: str, request: WireRequest, connect_timeout: float) -> Reading:
        """Send ``request`` to the worker at ``url`` and wait for the head of its answer.

        ``connect_timeout`` (seconds) covers name, connection and TLS. Cancelling closes the
        connection at once. Raises WorkerUnreachable, StreamBroken or WorkerFailed.
        """

    async def start(self) -> None:
        """Get ready; called once, in the event loop that will be used."""

    async def aclose(self) -> None:
        """Close every connection."""


class AiohttpUpstream:
    """An Upstream on aiohttp's client.

    ``ca`` is a PEM file of those whose signature on a worker's certificate is trusted, in place of
    the system's. ``idle`` (seconds) is how long an unused connection may serve again: less than the
    five seconds after which common servers close it, since a request that meets that end is lost.
    Of each worker ``keep`` connections are kept at most, and the one used last serves first.
    """

    def __init__(self, *, ca: str | None = None, idle: float = 4.0, keep: int = 256) -> None:
        self._tls = ssl.create_default_context(cafile=ca) if ca else None
        self._idle = idle
        self._keep = keep
        self._resting: dict[str, deque[_Lane]] = {}
        self._busy: set[_Lane] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._resolver: AbstractResolver | None = None

    async def start(self) -> None:
        """Make what needs an event loop."""
        self._resolver = aiohttp.DefaultResolver()

    async def open(self, url: str, request: WireRequest, connect_timeout: float) -> Reading:
        """See Upstream. A connection that ended while it rested is replaced once, unnoticed."""
        if not _PATH.fullmatch(request.path):
            raise InternalError("a worker's path is not one")
        target = URL(url.rstrip("/") + request.path, encoded=True)
        resting = self._resting.get(url)
        lane = resting.pop() if resting else self._lane()
        reading = await self._send(lane, url, target, request, connect_timeout)
        if reading is None:
            reading = await self._send(self._lane(), url, target, request, connect_timeout)
        if reading is None:
            raise StreamBroken("the worker closed the connection before its answer")
        return reading

    async def aclose(self) -> None:
        """Close every connection; those in use are cut."""
        lanes = [*self._busy, *(lane for lanes in self._resting.values() for lane in lanes)]
        self._busy.clear()
        self._resting.clear()
        for lane in lanes:
            lane.cut()
        await asyncio.gather(*(lane.aclose() for lane in lanes), *self._closing)
        if self._resolver is not None:
            await self._resolver.close()

    def _lane(self) -> "_Lane":
        if self._resolver is None:
            raise InternalError("the HTTP client was not started")
        return _Lane(self._tls, self._resolver, self._idle)

    async def _send(
        self, lane: "_Lane", url: str, target: URL, request: WireRequest, connect_timeout: float
    ) -> "_Reading | None":
        """None when a resting connection proved to be closed, and nothing of an answer came."""
        self._busy.add(lane)
        connects = lane.connects
        sent = False
        try:
            response = await lane.send(target, request, connect_timeout)
            sent = True
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as e:
            raise WorkerUnreachable("the worker can't be reached") from e
        except aiohttp.ClientResponseError as e:
            raise WorkerFailed("the worker's answer is not HTTP") from e
        except (aiohttp.ClientError, OSError) as e:
            if lane.connects == connects and not _has_begun(e):
                return None
            raise StreamBroken("the worker closed the connection before its answer") from e
        finally:
            if not sent:
                lane.cut()
                self.rest(lane, url, warm=False)
        return lane.carry(_Reading(response, lane, url, self), response.connection)

    def rest(self, lane: "_Lane", url: str, *, warm: bool) -> None:
        """Take a lane back. One without a connection serves only when no other is left."""
        if lane not in self._busy:
            return
        self._busy.remove(lane)
        resting = self._resting.setdefault(url, deque())
        if len(resting) >= self._keep:
            lane.cut()
            closing = asyncio.get_running_loop().create_task(lane.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        elif warm:
            resting.append(lane)
        else:
            resting.appendleft(lane)


def _has_begun(error: Exception) -> bool:
    """Whether a part of an answer's head came before the connection's end."""
    return isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)


class _Lane:
    """A session with one connection at most.

    aiohttp's own pool takes the connection that has rested longest, which is the likeliest to be
    closed, and does not tell whether one was reused; a session for each connection leaves both to
    us. Idle ones are retired by aiohttp.
    """

    def __init__(self, tls: ssl.SSLContext | None, resolver: AbstractResolver, idle: float) -> None:
        self.connects = 0
        self._reading: _Reading | None = None
        self._watched: object = None
        self._sockets: list[socket.socket] = []
        connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=idle,
            ssl=tls or True,
            resolver=resolver,
            socket_factory=self._socket,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_UNWANTED,
            auto_decompress=False,
            trust_env=False,
            read_bufsize=_BUFFER,
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
            max_headers=_HEADERS,
        )

    async def send(
        self, target: URL, request: WireRequest, connect_timeout: float
    ) -> aiohttp.ClientResponse:
        body = request.body
        return await self._session.request(
            request.method,
            target,
            data=io.BytesIO(body) if len(body) > _LARGE else body or None,
            headers=[*request.headers, ("Accept-Encoding", "identity")],
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(
                total=None, connect=connect_timeout, sock_connect=connect_timeout
            ),
        )

    def cut(self) -> None:
        """End the connection now: closing it would first wait for what is not yet written."""
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    async def aclose(self) -> None:
        await self._session.close()

    def carry(self, reading: "_Reading", connection: Connection | None) -> "_Reading":
        """Tell ``reading`` when the connection is lost.

        aiohttp forgets to where the bytes that came last were not HTTP: it would wait for ever.
        """
        self._reading = reading
        protocol = connection.protocol if connection is not None else None
        if protocol is None or protocol is self._watched:
            return reading
        self._watched = protocol
        if (closed := protocol.closed) is None:
            reading.lost()
        else:
            closed.add_done_callback(self._lost)
        return reading

    def _lost(self, closed: asyncio.Future[None]) -> None:
        if not closed.cancelled():
            closed.exception()  # so that it counts as seen
        if self._reading is not None:
            self._reading.lost()

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # not on every system
                made.setsockopt(socket.IPPROTO_TCP, option, value)
        self.connects += 1
        self._sockets = [one for one in self._sockets if one.fileno() >= 0]
        self._sockets.append(made)
        return made


class _Reading:
    """An answer on a lane; the lane goes back when it is over."""

    def __init__(
        self, response: aiohttp.ClientResponse, lane: _Lane, url: str, upstream: AiohttpUpstream
    ) -> None:
        self.status = response.status
        self._response = response
        self._content = response.content
        self._lane = lane
        self._url = url
        self._upstream = upstream
        self._over = False

    @property
    def headers(self) -> Mapping[str, str]:
        return {name.lower(): value for name, value in self._response.headers.items()}

    async def read(self) -> bytes:
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError, RuntimeError) as e:  # the last: it has no connection
            if not self._over and (held := self._held()):
                return held
            raise StreamBroken("the worker's answer stopped before its end") from e

    def abort(self) -> None:
        if not self._over:
            self._over = True
            self._lane.cut()
            self._response.close()
            self._upstream.rest(self._lane, self._url, warm=False)

    def release(self) -> None:
        if self._response.connection is not None:  # aiohttp gives it back at the end
            self.abort()
        elif not self._over:
            self._over = True
            self._upstream.rest(self._lane, self._url, warm=True)

    def lost(self) -> None:
        """The connection is no more."""
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(aiohttp.ClientPayloadError("the connection was lost"))

    def _held(self) -> bytes:
        """What came before the connection broke; aiohttp would not give it out any more."""
        return self._content._read_nowait(-1)  # noqa: SLF001 - as said
