"""A request as it comes in: its head is there, its body may still be on its way."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from protocols.core.errors import MalformedRequest, RequestTooLarge

MAX_UNREAD_BODY: Final = 64 << 10
"""Bytes of a body that are held before anybody asks for it."""


class IncomingRequest(Struct, eq=False):
    """A gateway.seam.HttpRequest. ``_go_on`` lets more of the body come."""

    _loop: asyncio.AbstractEventLoop
    _resume_body: Callable[[], None]
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    is_complete: bool = False
    body_parts: list[bytes] = []
    """Those of the body that came."""
    body_size: int = 0
    """How many bytes these have."""
    peer: str = ""
    is_http10: bool = False
    keep_alive: bool = True
    """Whether the client will use the connection again."""
    expects_continue: bool = False
    """The client waits to be told before it sends the body."""
    is_broken: bool = False
    """The body is not what its head said."""
    _limit: int | None = None
    _waiter: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether no more of the body is wanted for now."""
        return self.body_size > (MAX_UNREAD_BODY if self._limit is None else self._limit)

    async def body(self, limit: int) -> bytes:
        """See ``gateway.seam.HttpRequest``. Raises Malformed for one that did not arrive whole."""
        self._limit = limit
        if not self.is_complete:
            await self._wait_for_body(limit)
        if self.body_size > limit:
            raise _build_too_large(limit)
        return b"".join(self.body_parts)

    async def _wait_for_body(self, limit: int) -> None:
        """Wait for the rest of the body, but not of one that is too large."""
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
        """Something of the body has come, or it never will."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _build_too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {limit} bytes", limit=limit)
