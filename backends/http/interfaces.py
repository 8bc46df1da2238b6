"""Interfaces of the HTTP client: the pool uses ``HttpClient`` and ``UpstreamResponse`` only.

Errors never hold a worker's address or text:

WorkerUnreachable   no connection: refused, DNS, TLS or timeout; nothing was sent
StreamBroken        the connection ended before the response did, even at its first byte
WorkerFailed        the response is not HTTP
"""

import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol, runtime_checkable
from urllib.parse import quote, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from protocols.core.interfaces import Headers, UpstreamRequest

DEFAULT_MAX_HEAD: Final = 64 << 10
"""Bytes of all headers of a response. Identity proxies before workers add long ones."""
MAX_READ: Final = 16 << 10
"""Bytes that are read of a connection at once."""
MAX_HELD_BYTES: Final = 32 << 10
"""Bytes that are held of a response that is not read, at most."""
_API_KEY_PATTERN: Final = re.compile(r"[!-~]+")
_MASK: Final = "***"
_SECRET: Final = 8
"""A shorter value of a header is no secret."""
_VERSION_SEGMENT: Final = re.compile(r"/v[0-9]+[a-z0-9]*(?=/|$)")


def parse_version_segment(path: str) -> str | None:
    """The first segment of a path, such as ``/v1`` or ``/v1beta``, if it names a version."""
    match = _VERSION_SEGMENT.match(path)
    return None if match is None else match[0]


def join_path(base_path: str, path: str) -> str:
    """The path of a request below the path of a worker's URL, which has no trailing slash.

    Paths of protocols begin with the version of their API, such as ``/v1``. It is left out if the
    URL ends with it, and ``/v1`` also if the URL names another version: ``/api/paas/v4``,
    ``/v1beta/openai``. A URL whose whole path is ``/v1`` means the same as one without a path.
    """
    if not base_path:
        return path
    if base_path == "/v1" and parse_version_segment(path) in ("/v1", None):
        return path
    root, slash, rest = path[1:].partition("/")
    if slash and (
        base_path.endswith(f"/{root}") or (root == "v1" and _VERSION_SEGMENT.search(base_path))
    ):
        return f"{base_path}/{rest}"
    return base_path + path


class WorkerCredentials(Struct, frozen=True):
    """What a worker requires of every request: headers, and parameters of the query.

    ``query`` is percent-encoded. ``secrets`` are the texts that must not be shown. Use a function
    below to create it.
    """

    headers: Headers = ()
    query: str = ""
    secrets: tuple[str, ...] = ()
    replaced: frozenset[str] = frozenset()
    """Names in lower case of headers that a request to the worker has from here alone."""

    def __repr__(self) -> str:
        return "WorkerCredentials()"

    def authorize(
        self, request: UpstreamRequest, headers: Headers
    ) -> tuple[UpstreamRequest, Headers]:
        """The request, and the headers of this request alone, with the credentials."""
        if self.query:
            path = f"{request.path}{'&' if '?' in request.path else '?'}{self.query}"
            request = UpstreamRequest(path, request.body, request.headers, request.method)
        if self.replaced:
            headers = self._without_replaced(headers)
            others = self._without_replaced(request.headers)
            request = UpstreamRequest(request.path, request.body, others, request.method)
        return request, (*headers, *self.headers)

    def add_headers(self, headers: Mapping[str, str]) -> "WorkerCredentials":
        """The same with further headers, which replace those of the request."""
        return replace(
            self,
            headers=(*self.headers, *headers.items()),
            secrets=(*self.secrets, *(text for text in headers.values() if len(text) >= _SECRET)),
            replaced=frozenset(map(str.lower, headers)),
        )

    def hide_secrets(self) -> "WorkerCredentials":
        """The same with each secret as ``***``."""
        name, is_set, _ = self.query.partition("=")
        return WorkerCredentials(
            tuple((header, _MASK) for header, _ in self.headers),
            f"{name}={_MASK}" if is_set else "",
            replaced=self.replaced,
        )

    def _without_replaced(self, headers: Headers) -> Headers:
        return tuple(header for header in headers if header[0].lower() not in self.replaced)

    def mask_text(self, text: str) -> str:
        """The text of a worker with each secret that it quotes as ``***``."""
        for secret in self.secrets:
            text = text.replace(secret, _MASK)
        return text


def make_bearer_credentials(token: str) -> WorkerCredentials:
    """A token in the header Authorization. Raises ValueError for one that no header may have."""
    return make_header_credentials("Authorization", token, "Bearer ")


def make_header_credentials(name: str, secret: str, prefix: str = "") -> WorkerCredentials:
    """A secret in a header. Raises ValueError for one that no header may have."""
    _check_secret(secret)
    return WorkerCredentials(((name, prefix + secret),), secrets=(secret,))


def make_query_credentials(name: str, secret: str) -> WorkerCredentials:
    """A secret as a parameter of the query. Raises ValueError for one with spaces."""
    _check_secret(secret)
    encoded = quote(secret, safe="")
    return WorkerCredentials((), f"{quote(name, safe='')}={encoded}", (secret, encoded))


def make_basic_credentials(user: str, password: str) -> WorkerCredentials:
    """HTTP Basic authentication (RFC 7617)."""
    token = b64encode(f"{user}:{password}".encode()).decode()
    return WorkerCredentials((("Authorization", f"Basic {token}"),), secrets=(password, token))


def _check_secret(secret: str) -> None:
    if not _API_KEY_PATTERN.fullmatch(secret):
        raise ValueError("the API key of a worker must be printable ASCII without spaces")


class WorkerConfig(Struct, frozen=True):
    """A worker. ``url`` is its base URL (see ``join_path``).

    Raises ValueError for an invalid URL.
    """

    url: str
    weight: int = 1
    max_concurrency: int | None = None
    """Concurrent requests; None: no limit."""
    credentials: WorkerCredentials | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            raise ValueError(f"{self.url!r} is not a URL") from None
        if not is_valid or parts.username is not None or set("?#\\") & set(self.url):
            raise ValueError(
                f"{self.url!r} is not a worker URL: expected http(s)://HOST[:PORT][/PATH]"
            )

    def __repr__(self) -> str:
        return f"Worker({self.url!r})"


BodyConsumer = Callable[[list[bytes]], bool]
"""Receives chunks of a body; returns whether it accepts more at once."""


class UpstreamResponse(Protocol):
    """A response that is being received. Status and headers are empty until the head arrives."""

    @property
    def status(self) -> int:
        """The HTTP status; 0 before the head has arrived."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, with names in lower case."""

    @property
    def complete(self) -> bool:
        """Whether all of it has been received; some of the body may still be unread."""

    def wait_headers(self) -> Awaitable[bool]:
        """Wait for the headers; False if the idle connection had been closed by the worker.

        In that case nothing was received, and the request may be sent again. Raises StreamBroken or
        WorkerFailed, after which the response is aborted.
        """

    def read_available(self) -> list[bytes]:
        """The unread part of the body received so far, in the chunks that were sent.

        No chunk is empty.
        """

    async def read(self) -> list[bytes]:
        """The next chunks, as soon as there are any; [] at the end. Raises StreamBroken."""

    async def forward_to(self, consumer: BodyConsumer) -> bool:
        """Pass chunks to ``consumer`` until it declines (False) or the body ends (True).

        ``consumer`` is called while the connection reads, so that no task is woken for each chunk.
        Raises StreamBroken, and what ``consumer`` raises.
        """

    def abort(self) -> None:
        """Close the connection at once. May be called again."""

    def release(self) -> None:
        """Stop reading: the connection can be reused if the response is complete.

        Otherwise as ``abort``. One of the two must be called for every response.
        """


class ConnectionCounts(Struct, frozen=True):
    """Connections to all workers: open, idle of these, created and failed so far."""

    open: int = 0
    idle: int = 0
    created: int = 0
    failed: int = 0
    """Failed connects."""


@runtime_checkable
class SupportsConnectionCounts(Protocol):
    """An HttpClient that counts its connections."""

    @property
    def connections(self) -> ConnectionCounts:
        """The current counts."""


class HttpClient(Protocol):
    """Sends requests to workers, by URL.

    A request's headers are those common to many requests; their encoding is cached.
    ``extra_headers`` are the headers of this request alone, which follow them.
    """

    def try_send(
        self, url: str, request: UpstreamRequest, extra_headers: Headers = ()
    ) -> UpstreamResponse | None:
        """Send ``request`` over an idle connection; None if there is none.

        Does not wait for the headers.
        """

    async def send_on_new_connection(
        self,
        url: str,
        request: UpstreamRequest,
        connect_timeout: float,
        extra_headers: Headers = (),
    ) -> UpstreamResponse:
        """Send ``request`` over a new connection and wait for the headers.

        ``connect_timeout`` (seconds) covers DNS, TCP and TLS. Cancelling closes the
        connection at once. Raises WorkerUnreachable, StreamBroken or WorkerFailed.
        """

    async def send(
        self,
        url: str,
        request: UpstreamRequest,
        connect_timeout: float,
        extra_headers: Headers = (),
    ) -> UpstreamResponse:
        """Send ``request`` over an idle or a new connection and wait for the headers.

        If the worker had closed the idle connection, a new one is used. Otherwise as
        ``send_on_new_connection``.
        """

    async def start(self) -> None:
        """Start; called once, in the event loop that will be used."""

    async def aclose(self) -> None:
        """Close all connections."""
