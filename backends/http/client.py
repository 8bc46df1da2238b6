"""The HTTP client: an idle connection to the worker if there is one, else a new one.

Each worker's URL has a pool of connections. A request takes the connection that was used last, or
opens one (DNS, TCP and TLS within one timeout); a connection is in the pool again once its response
is complete. A worker that has closed an idle connection meanwhile answers nothing, so ``send`` then
opens a new one.

What must never happen:

- A request that a client's text has given another structure: ``build_request_head`` checks it.
- A connection to a link-local address, at which clouds serve credentials.
- An open connection that no pool knows, since nobody would close it.
"""

import asyncio
import functools
import re
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import Final
from urllib.parse import urlsplit

from aiohappyeyeballs import AddrInfoType, start_connection
from msgspec import Struct

from backends.http.connection import Http1Response, HttpConnection
from backends.http.interfaces import DEFAULT_MAX_HEAD, ConnectionCounts, join_path
from backends.write_batching import WriteBatcher
from protocols.core.errors import InternalError, WorkerUnreachable
from protocols.core.interfaces import Headers, UpstreamRequest

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_BODILESS_METHODS: Final = ("GET", "HEAD")
_PATH_PATTERN: Final = re.compile(r"/[!-\"$-~]*")
_MAX_CACHED_PATH: Final = 256
"""The longest path that is cached, so that long model names do not fill the memory."""
_TCP_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""TCP keepalive: seconds of silence, seconds between probes, probes. A dead peer shows in 30 s.

The system's default is two hours, and nothing else detects it during a long unary response.
"""
_HAPPY_EYEBALLS_DELAY: Final = 0.25
"""Seconds until the next address is tried in parallel (RFC 8305)."""
_MAX_CONCURRENT_CONNECTS: Final = 64
"""Concurrent connects to one worker: more would only wait in its accept queue."""


class WorkerOrigin(Struct, frozen=True):
    """A worker's address. ``base_path`` has no trailing slash; see ``join_path``."""

    host: str
    port: int
    tls: bool
    host_header: str
    """The value of the Host header."""
    base_path: str


@functools.lru_cache(maxsize=4096)
def parse_origin(url: str) -> WorkerOrigin:
    """Parse a URL that ``WorkerConfig`` has validated."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or _DEFAULT_PORTS[parts.scheme]
    host_header = f"[{host}]" if ":" in host else host
    if port != _DEFAULT_PORTS[parts.scheme]:
        host_header = f"{host_header}:{port}"
    return WorkerOrigin(host, port, parts.scheme == "https", host_header, parts.path.rstrip("/"))


class AsyncioHttpClient:
    """An ``HttpClient`` (see ``backends.http.interfaces``) on asyncio transports.

    ``ca`` is a PEM file of trusted certificate authorities; None: the system's. ``idle_timeout``
    is in seconds, and shorter than the five seconds of common servers, since a request that meets
    their close is lost. At most ``max_idle`` idle connections are kept per worker; the last used
    one is reused first.
    """

    def __init__(
        self,
        *,
        ca: str | None = None,
        idle_timeout: float = 4.0,
        max_idle: int = 256,
        max_response_head: int = DEFAULT_MAX_HEAD,
    ) -> None:
        self._max_response_head = max_response_head
        self._ca = ca
        self._idle_timeout = idle_timeout
        self._max_idle = max_idle
        self._tls: ssl.SSLContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._write_batcher = WriteBatcher(asyncio.get_running_loop)
        self._host_pools: dict[str, _HostConnectionPool] = {}
        """By the worker's URL."""
        self._created = self._failed_connects = 0
        self._idle_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<AsyncioHttpClient {[*self._host_pools.values()]}>"

    async def start(self) -> None:
        """See HttpClient."""
        self._loop = asyncio.get_running_loop()

    def try_send(
        self, url: str, request: UpstreamRequest, extra_headers: Headers = ()
    ) -> Http1Response | None:
        """See HttpClient."""
        host_pool = self._host_pools.get(url)
        connection = None if host_pool is None else host_pool.pop_idle(self._idle_timeout)
        if connection is None:
            return None
        return connection.send(build_request_head(url, request, extra_headers) + request.body)

    async def send_on_new_connection(
        self,
        url: str,
        request: UpstreamRequest,
        connect_timeout: float,
        extra_headers: Headers = (),
    ) -> Http1Response:
        """See HttpClient."""
        if self._loop is None:
            raise InternalError("the HTTP client was not started")
        data = build_request_head(url, request, extra_headers) + request.body
        host_pool = self._host_pools.get(url) or self._get_host_pool(url, self._loop)
        tls = self._get_tls_context() if host_pool.origin.tls else None
        try:
            connection = await host_pool.connect(tls, connect_timeout)
        except WorkerUnreachable:
            self._failed_connects += 1
            raise
        self._created += 1
        response = connection.send(data)
        await _wait_headers(response)
        return response

    async def send(
        self,
        url: str,
        request: UpstreamRequest,
        connect_timeout: float,
        extra_headers: Headers = (),
    ) -> Http1Response:
        """See HttpClient."""
        response = self.try_send(url, request, extra_headers)
        if response is not None and await _wait_headers(response):
            return response
        return await self.send_on_new_connection(url, request, connect_timeout, extra_headers)

    @property
    def connections(self) -> ConnectionCounts:
        """See SupportsConnectionCounts."""
        counts = [host_pool.counts for host_pool in self._host_pools.values()]
        open_count, idle_count = (
            (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        )
        return ConnectionCounts(open_count, idle_count, self._created, self._failed_connects)

    async def aclose(self) -> None:
        """See HttpClient. Connections in use are aborted."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        host_pools = list(self._host_pools.values())
        self._host_pools.clear()
        self._loop = None
        await asyncio.gather(*(host_pool.aclose() for host_pool in host_pools))

    def _get_host_pool(self, url: str, loop: asyncio.AbstractEventLoop) -> "_HostConnectionPool":
        host_pool = self._host_pools[url] = _HostConnectionPool(
            parse_origin(url), self._max_idle, loop, self._write_batcher, self._max_response_head
        )
        if self._idle_timer is None:
            self._idle_timer = loop.call_later(self._idle_timeout, self._close_idle, loop)
        return host_pool

    def _get_tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._ca)
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def _close_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close connections that were idle too long, and drop unused workers."""
        self._idle_timer = None
        deadline = loop.time() - self._idle_timeout
        for url, host_pool in list(self._host_pools.items()):
            host_pool.close_idle(deadline)
            if not host_pool.is_busy:
                del self._host_pools[url]
        if self._host_pools:
            self._idle_timer = loop.call_later(self._idle_timeout, self._close_idle, loop)


async def _wait_headers(response: Http1Response) -> bool:
    """Wait for the headers; on cancellation the response is aborted."""
    try:
        return await response.wait_headers()
    except BaseException:
        response.abort()
        raise


class _HostConnectionPool:
    """The connections of one worker."""

    def __init__(
        self,
        origin: WorkerOrigin,
        max_idle: int,
        loop: asyncio.AbstractEventLoop,
        write_batcher: WriteBatcher,
        max_head: int,
    ) -> None:
        self._max_head = max_head
        self._connections: set[HttpConnection] = set()
        self._all_closed = asyncio.Event()
        self.origin = origin
        self._max_idle = max_idle
        self._loop = loop
        self._write_batcher = write_batcher
        self._idle: deque[HttpConnection] = deque()
        self._connect_slots = asyncio.Semaphore(_MAX_CONCURRENT_CONNECTS)
        self._connecting = 0

    def __repr__(self) -> str:
        open_count, idle_count = self.counts
        return (
            f"<_HostConnectionPool {self.origin.host_header}, {open_count} connections open,"
            f" {idle_count} of them idle>"
        )

    @property
    def is_busy(self) -> bool:
        """Whether there are open connections or connects."""
        return bool(self._connections or self._connecting)

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of open and of idle connections."""
        return len(self._connections), len(self._idle)

    def pop_idle(self, idle_timeout: float) -> HttpConnection | None:
        """The last used connection, unless it was idle for ``idle_timeout`` seconds."""
        connections = self._idle
        if connections and connections[-1].idle_since + idle_timeout > self._loop.time():
            return connections.pop()
        return None

    async def connect(self, tls: ssl.SSLContext | None, seconds: float) -> HttpConnection:
        """A new connection. Raises WorkerUnreachable."""
        self._connecting += 1
        try:
            async with self._connect_slots:
                connection = await connect(self.origin, tls, seconds, self._make_connection)
        finally:
            self._connecting -= 1
        if connection.is_connected:
            self._connections.add(connection)
        return connection

    async def aclose(self) -> None:
        """Abort all connections and wait for their end."""
        while self._connections:
            self._all_closed.clear()
            for connection in list(self._connections):
                connection.abort()
            await self._all_closed.wait()

    def close_idle(self, deadline: float) -> None:
        """Close connections that have been idle since ``deadline`` or before."""
        while self._idle and self._idle[0].idle_since <= deadline:
            self._idle.popleft().abort()

    def _make_connection(self) -> HttpConnection:
        return HttpConnection(
            self._loop, self._write_batcher, self._on_idle, self._on_closed, self._max_head
        )

    def _on_idle(self, connection: HttpConnection) -> None:
        if len(self._idle) >= self._max_idle:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)

    def _on_closed(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()
        if connection in self._idle:
            self._idle.remove(connection)


async def connect(
    origin: WorkerOrigin,
    tls: ssl.SSLContext | None,
    seconds: float,
    factory: Callable[[], HttpConnection],
) -> HttpConnection:
    """A new connection. Raises WorkerUnreachable."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            results = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
            return await _connect_any(_filter_addresses(results), origin, tls, factory)
    except (OSError, UnicodeError) as error:  # TimeoutError is an OSError, too
        raise WorkerUnreachable("the worker is unreachable") from error


async def _connect_any(
    addresses: Sequence[AddrInfoType],
    origin: WorkerOrigin,
    tls: ssl.SSLContext | None,
    factory: Callable[[], HttpConnection],
) -> HttpConnection:
    """A connection to the first address that answers. Raises OSError."""
    loop = asyncio.get_running_loop()
    name = origin.host if tls is not None else None
    if len(addresses) == 1:
        # create_connection takes one turn of the loop less.
        host, port = addresses[0][4][:2]
        transport, connection = await loop.create_connection(
            factory, str(host), int(port), ssl=tls, server_hostname=name
        )
    else:
        sock = await start_connection(
            addresses, happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY, loop=loop
        )
        try:
            transport, connection = await loop.create_connection(
                factory, sock=sock, ssl=tls, server_hostname=name
            )
        except BaseException:
            sock.close()
            raise
    sock = transport.get_extra_info("socket")
    if sock is not None:
        _enable_keepalive(sock)
    return connection


def _filter_addresses(results: Sequence[AddrInfoType]) -> Sequence[AddrInfoType]:
    """The allowed addresses. Raises OSError if there is none.

    Link-local addresses are refused: cloud metadata services use them.
    """
    allowed = [result for result in results if not _is_link_local(str(result[4][0]))]
    if not allowed:
        raise OSError(
            "the host resolves to a forbidden address (link-local, multicast or unspecified)"
        )
    return allowed


def _is_link_local(address: str) -> bool:
    ip = ip_address(address)
    if isinstance(ip, IPv6Address):
        ip = ip.ipv4_mapped or ip
    return ip.is_link_local or ip.is_multicast or ip.is_unspecified


def _enable_keepalive(sock: socket.socket) -> None:
    """Enable TCP keepalive."""
    with suppress(OSError):  # already closed
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # not on every platform
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def build_request_head(url: str, request: UpstreamRequest, extra_headers: Headers = ()) -> bytes:
    """The request line and the headers; for ``extra_headers`` see ``HttpClient``.

    Raises InternalError for a path or header that would change the request's structure.
    """
    path, size = request.path, len(request.body)
    build_lines = (
        _build_common_lines_cached if len(path) <= _MAX_CACHED_PATH else _build_common_lines
    )
    text = build_lines(url, request.method, path, request.headers) + _format_headers(extra_headers)
    if not size and request.method in _BODILESS_METHODS:
        return f"{text}Accept-Encoding: identity\r\n\r\n".encode()
    return f"{text}Accept-Encoding: identity\r\nContent-Length: {size}\r\n\r\n".encode()


def _build_common_lines(url: str, method: str, path: str, headers: Headers) -> str:
    """The request line and the headers common to requests. Raises InternalError."""
    if not _PATH_PATTERN.fullmatch(path):
        shown_path = path.partition("?")[0][:100]  # a query may hold a key
        raise InternalError(f"invalid request path {shown_path!r}")
    origin = parse_origin(url)
    request_line = f"{method} {join_path(origin.base_path, path)} HTTP/1.1\r\n"
    return request_line + _format_headers((("Host", origin.host_header), *headers))


_build_common_lines_cached = functools.lru_cache(maxsize=1024)(_build_common_lines)
"""Most requests to a worker have these lines in common."""


def _format_headers(headers: Headers) -> str:
    """One line for each header. Raises InternalError for a line break in one."""
    text = ""
    for name, value in headers:
        text += f"{name}: {value}\r\n"
    if text.count("\n") + text.count("\r") != 2 * len(headers) or "\0" in text:
        raise InternalError("a request header contains a line break")
    return text
