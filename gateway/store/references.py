"""Loads the stored responses that requests refer to: the one way from an id to its object.

What a request refers to is part of the request, so it is measured before it is loaded:

1. the store tells which responses the ids belong to, and their sizes, without loading any
2. each response is loaded once, however many ids refer to it, one after the other, while its size
   is reserved in the memory budget of bodies; only the parts that are referred to are kept
3. each part counts against the limit of bodies as often as it is referred to, and stays reserved
   until the response ends

Few requests load at the same time, since decoding delays all others.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from gateway.store.response_store import ResponseStore, StoredLocation
from protocols.core.errors import RequestTooLarge
from protocols.core.interfaces import StoredResponse

MAX_RESPONSES: Final = 256
"""The largest number of stored responses that one request may refer to."""
_MAX_LOADED: Final = 4
"""How many times the limit of bodies the responses may have in all that one request loads.

A stored response has its history, its input, its output, and what it repeats of the request.
"""
_CONCURRENT_LOADS: Final = 2
"""How many requests load at the same time."""
_SMALL: Final = 64 << 10
"""Up to so many bytes are read at once; more by a thread."""

ReadParts = Callable[[StoredResponse], Mapping[str, bytes]]
"""Returns the parts of a stored response that a request refers to, by id."""


class MemoryAccount(Protocol):
    """What one request takes of the memory budget of bodies."""

    def reserve_memory(self, size: int) -> None:
        """Take so many bytes until the response ends; give them back if negative.

        Raises Overloaded.
        """


class ReferenceLoader:
    """Loads what requests refer to. All of a process share one."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._slots = asyncio.Semaphore(_CONCURRENT_LOADS)

    async def load_parts(
        self,
        owner: str,
        counts: Mapping[str, int],
        read_parts: ReadParts,
        *,
        account: MemoryAccount,
        body_size: int,
        limit: int,
    ) -> Mapping[str, bytes]:
        """The parts that the ids in ``counts`` refer to; an id without a response has none.

        ``counts`` tells how often each id is referred to. Raises RequestTooLarge if they and the
        body have more than ``limit`` bytes, Overloaded if the budget has no room, and
        StoreUnavailable.
        """
        if not counts:
            return {}
        located = await self.store.locate_responses(owner, tuple(counts))
        responses = {location.id: location for location in located.values()}
        _check_responses(responses, limit)
        parts: dict[str, bytes] = {}
        async with self._slots:
            for location in responses.values():
                account.reserve_memory(location.size)
                try:
                    found = await self._read(owner, location, read_parts)
                finally:
                    account.reserve_memory(-location.size)
                size = sum(len(part) * counts[name] for name, part in found.items())
                body_size += size
                if body_size > limit:
                    raise _build_too_large(limit)
                account.reserve_memory(size)
                parts |= found
        return parts

    async def load_response(
        self, owner: str, name: str, account: MemoryAccount
    ) -> StoredResponse | None:
        """The response with this id, reserved until the response ends; None if there is none.

        Raises Overloaded and StoreUnavailable.
        """
        location = (await self.store.locate_responses(owner, (name,))).get(name)
        if location is None or location.id != name:
            return None
        async with self._slots:
            account.reserve_memory(location.size)
            return await self.store.find_response(owner, name)

    async def _read(
        self, owner: str, location: StoredLocation, read_parts: ReadParts
    ) -> Mapping[str, bytes]:
        response = await self.store.find_response(owner, location.id)
        if response is None or len(response.body) > location.size:  # it has just been replaced
            return {}
        if location.size <= _SMALL:
            return read_parts(response)
        return await asyncio.to_thread(read_parts, response)


def _check_responses(responses: Mapping[str, StoredLocation], limit: int) -> None:
    """Check what would be loaded. Raises RequestTooLarge."""
    if len(responses) > MAX_RESPONSES:
        text = f"the request refers to items of more than {MAX_RESPONSES} stored responses"
        raise RequestTooLarge(text, limit=limit)
    if sum(location.size for location in responses.values()) > _MAX_LOADED * limit:
        raise _build_too_large(limit)


def _build_too_large(limit: int) -> RequestTooLarge:
    text = f"the body and the stored items that it refers to are larger than {limit} bytes"
    return RequestTooLarge(text, limit=limit)
