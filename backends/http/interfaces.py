"""Interfaces of the HTTP client: the pool uses ``HttpClient`` and ``UpstreamResponse`` only.

Errors never hold a worker's address or text:

WorkerUnreachable   no connection: refused, DNS, TLS or timeout; nothing was sent
StreamBroken        the connection ended before the response did, even at its first byte
WorkerFailed        the response is not HTTP
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol, runtime_checkable
from urllib.parse import urlsplit

from msgspec import Struct

from protocols.core.interfaces import Headers, UpstreamRequest

_API_KEY_PATTERN: Final = re.compile(r"[!-~]+")


class WorkerConfig(Struct, frozen=True):
    """A worker. ``url`` is its base URL, without the protocol's path.

    Raises ValueError for an invalid URL or API key.
    """

    url: str
    weight: int = 1
    max_concurrency: int | None = None
    """Concurrent requests; None: no limit."""
    bearer: str | None = None

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

        if self.bearer is not None and not _API_KEY_PATTERN.fullmatch(self.bearer):
            raise ValueError(f"the API key for {self.url!r} must be printable ASCII without spaces")

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
