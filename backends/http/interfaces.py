"""The data path's HTTP client, behind a seam: the pool knows ``Upstream`` and ``Reading`` only.

What goes wrong is told in the tree's words, and never with a worker's address or text:

WorkerUnreachable   no connection: refused, no such name, no TLS, not in time; nothing was sent
StreamBroken        the connection ended before the answer did, even if that was at its first byte
WorkerFailed        what came is not HTTP
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol, runtime_checkable
from urllib.parse import urlsplit

from msgspec import Struct

from protocols.core.interfaces import Headers, UpstreamRequest

_API_KEY_PATTERN: Final = re.compile(r"[!-~]+")


class WorkerConfig(Struct, frozen=True):
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

        if self.bearer is not None and not _API_KEY_PATTERN.fullmatch(self.bearer):
            raise ValueError(f"the key for {self.url!r} is not printable ASCII without spaces")

    def __repr__(self) -> str:
        return f"Worker({self.url!r})"


class QueueSettings(Struct, frozen=True):
    """How many requests may wait for a place at a worker, and for how many seconds."""

    max: int = 200
    wait: float = 10.0


BodyConsumer = Callable[[list[bytes]], bool]
"""Takes pieces of a body as they come; whether it takes more at once."""


class UpstreamResponse(Protocol):
    """An answer on its way. Before its head has come it has no status, and no headers."""

    @property
    def status(self) -> int:
        """As the worker sent it."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Names in lower case."""

    @property
    def complete(self) -> bool:
        """Whether all of it has come, though some may still be to be read."""

    def wait_headers(self) -> Awaitable[bool]:
        """Wait for the head; False where the connection had ended while it rested.

        Then nothing came, and it may be asked for anew. Raises StreamBroken or WorkerFailed. What
        fails is cut.
        """

    def read_available(self) -> list[bytes]:
        """All of the body that has come and was not taken yet, in the pieces that it was sent in.

        None of them is empty.
        """

    async def read(self) -> list[bytes]:
        """The same, as soon as something has come; [] at a clean end. Raises StreamBroken."""

    async def forward_to(self, take: BodyConsumer) -> bool:
        """Give ``take`` what comes, at once, for as long as it says so; True once all has come.

        It is called while the connection reads, so that no task is woken for each piece. Raises
        StreamBroken, and what ``take`` raises.
        """

    def abort(self) -> None:
        """Close the connection at once, whatever is still on its way. May be called again."""

    def release(self) -> None:
        """Nobody reads any more: the connection may serve again, if it brought the whole answer.

        Otherwise the same as ``abort``. One of the two is called for every reading.
        """


class ConnectionCounts(Struct, frozen=True):
    """Those to all workers: how many there are, how many of these rest, and what was made."""

    open: int = 0
    idle: int = 0
    created: int = 0
    failed: int = 0
    """Tries to make one that failed."""


@runtime_checkable
class SupportsConnectionCounts(Protocol):
    """What an Upstream may also be: one that tells of its connections."""

    @property
    def connections(self) -> ConnectionCounts:
        """As they are now."""


class HttpClient(Protocol):
    """Sends requests to workers, each at a ``url``.

    A request's headers are those that many have in common: how they are written is remembered.
    ``own`` are those of this request alone, which come after them, and are not.
    """

    def try_send(
        self, url: str, request: UpstreamRequest, own: Headers = ()
    ) -> UpstreamResponse | None:
        """Send ``request`` at once, over a connection that rests; None where there is none.

        Its head is still to come.
        """

    async def send_on_new_connection(
        self, url: str, request: UpstreamRequest, connect_timeout: float, own: Headers = ()
    ) -> UpstreamResponse:
        """Send it over a new connection, and wait for the head.

        ``connect_timeout`` (seconds) covers name, connection and TLS. Cancelling closes the
        connection at once. Raises WorkerUnreachable, StreamBroken or WorkerFailed.
        """

    async def send(
        self, url: str, request: UpstreamRequest, connect_timeout: float, own: Headers = ()
    ) -> UpstreamResponse:
        """Send it over a connection that rests or else over a new one, and wait for the head.

        One that ended while it rested is replaced once, unnoticed. Otherwise as ``dial``.
        """

    async def start(self) -> None:
        """Get ready; called once, in the event loop that will be used."""

    async def aclose(self) -> None:
        """Close every connection."""
