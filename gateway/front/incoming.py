"""A request as it comes in: its head is there, its body may still be on its way."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from gateway.core.errors import Malformed, TooLarge

UNASKED: Final = 64 << 10
"""Bytes of a body that are held before anybody asks for it."""


class Incoming:
    """A gateway.seam.Request. ``go_on`` lets more of the body come."""

    __slots__ = (
        "_go_on",
        "_limit",
        "_loop",
        "_parts",
        "_size",
        "_waiter",
        "broken",
        "complete",
        "expects",
        "headers",
        "http10",
        "keeps",
        "method",
        "path",
        "peer",
        "query",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, go_on: Callable[[], None]) -> None:
        self.method = ""
        self.path = ""
        self.query = ""
        self.peer = ""
        self.headers: Mapping[str, str] = {}
        self.http10 = False
        self.expects = False
        """The client waits to be told before it sends the body."""
        self.keeps = True
        """Whether the client will use the connection again."""
        self.complete = False
        self.broken = False
        """The body is not what its head said."""
        self._loop = loop
        self._go_on = go_on
        self._parts: list[bytes] = []
        self._size = 0
        self._limit: int | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """Whether no more of the body is wanted for now."""
        return self._size > (UNASKED if self._limit is None else self._limit)

    async def body(self, limit: int) -> bytes:
        """See ``gateway.seam.Request``. Raises Malformed for one that did not arrive whole."""
        self._limit = limit
        if int(self.headers.get("content-length", "0")) > limit:
            raise _too_large(limit)
        while not self.complete:
            if self.broken:
                raise Malformed("the body did not arrive whole")
            if self.full:
                raise _too_large(limit)
            self._go_on()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.full:
            raise _too_large(limit)
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def take(self, data: bytes) -> None:
        """A piece of the body."""
        self._size += len(data)
        self._parts.append(data)

    def wake(self) -> None:
        """Something of the body has come, or it never will."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit} bytes", limit=limit)
