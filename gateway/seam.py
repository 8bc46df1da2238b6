"""What the life of an exchange sees of the network: a request, and a sink for the answer.

A front (``gateway.front``) makes both out of sockets. Nothing above it knows which front it is.
"""

from collections.abc import Mapping
from typing import Protocol

from protocols.core.interfaces import Headers


class HttpRequest(Protocol):
    """One HTTP request, its body not yet read."""

    method: str
    path: str
    """Raw, still percent-encoded, without the query."""
    query: str
    headers: Mapping[str, str]
    """Found by lower-case name."""
    peer: str

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises TooLarge past ``limit`` bytes, having read no more than that."""


class ResponseWriter(Protocol):
    """Takes one answer: ``whole``, or in pieces, from ``start`` to ``finish``."""

    @property
    def started(self) -> bool:
        """Whether an answer has begun."""

    @property
    def needs_drain(self) -> bool:
        """Whether ``drain`` must be awaited before writing more."""

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """All of the answer."""

    def start(self, status: int, headers: Headers) -> None:
        """Begin an answer in pieces. It may be sent later, with some of them.

        The front adds the headers by which nobody on the way keeps or gathers it.
        """

    def write(self, data: bytes) -> None:
        """A piece of the body. It may be sent later, with others."""

    def finish(self) -> None:
        """The body is complete."""

    async def drain(self) -> None:
        """Send what was written, as fast as the client takes it."""
