"""The interface of response stores, and the store in memory."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from msgspec import Struct

from gateway.config.schema import ResponseStoreConfig
from gateway.observability.log_rate import RareWarnings
from protocols.core.errors import Overloaded
from protocols.core.interfaces import StoredResponse

UNAVAILABLE_MESSAGE: Final = "the store of responses is not available now"


class StoreUnavailable(Overloaded):
    """The store can't be read now."""


class StoredLocation(Struct, frozen=True):
    """The response that an id belongs to, and at least as many bytes as its body has."""

    id: str
    size: int


class ResponseStore(Protocol):
    """Stored responses by owner: the name of an API key, or "" without keys."""

    async def locate_responses(
        self, owner: str, names: Sequence[str]
    ) -> Mapping[str, StoredLocation]:
        """The responses with these ids, or with items of these ids, by the given id.

        None is loaded. Raises StoreUnavailable.
        """

    async def find_response(self, owner: str, name: str) -> StoredResponse | None:
        """The response with this id. Raises StoreUnavailable."""

    async def add_response(self, owner: str, response: StoredResponse) -> None:
        """Store a response; older ones may have to go.

        A failure is logged, since the client gets its response anyway.
        """

    async def remove_response(self, owner: str, name: str) -> None:
        """Remove the response with this id, if there is one. Raises StoreUnavailable."""

    async def aclose(self) -> None:
        """Release all resources. Never raises."""


class StoreLimits(Struct, frozen=True):
    """How much a store keeps, and for how many seconds.

    ``owner_count`` and ``owner_bytes`` are the limits of each owner.
    """

    retention: float
    owner_count: int
    owner_bytes: int
    total_bytes: int


def get_store_limits(config: ResponseStoreConfig) -> StoreLimits:
    """The limits of a configured store."""
    return StoreLimits(
        config.retention, config.responses_per_key, config.bytes_per_key, config.memory
    )


class _StoredEntry(Struct, frozen=True):
    response: StoredResponse
    expires_at: float

    @property
    def size(self) -> int:
        return count_stored_bytes(self.response)


def count_stored_bytes(response: StoredResponse) -> int:
    """The bytes that count against the limits: the body, and some for each id."""
    return len(response.body) + 64 * (1 + len(response.item_ids))


class _Owner:
    """The responses of one owner, oldest first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _StoredEntry] = OrderedDict()
        self.response_ids: dict[str, str] = {}
        """The response of each item's id."""
        self.size = 0

    def add(self, entry: _StoredEntry) -> None:
        self.entries[entry.response.id] = entry
        self.response_ids |= dict.fromkeys(entry.response.item_ids, entry.response.id)
        self.size += entry.size

    def remove(self, name: str) -> int:
        """Remove a response; returns its size, 0 if there is none."""
        entry = self.entries.pop(name, None)
        if entry is None:
            return 0
        for item_id in entry.response.item_ids:
            self.response_ids.pop(item_id, None)
        self.size -= entry.size
        return entry.size


class MemoryResponseStore:
    """Stores responses in the memory of this process; they do not survive a restart."""

    def __init__(self, limits: StoreLimits, wall_clock: Callable[[], float]) -> None:
        self._limits = limits
        self._wall_clock = wall_clock
        self._warnings = RareWarnings(wall_clock)
        self._owners: dict[str, _Owner] = {}
        self._order: OrderedDict[tuple[str, str], None] = OrderedDict()
        """All responses, oldest first: owner and id."""
        self.size = 0
        """The bytes of all responses."""

    async def locate_responses(
        self, owner: str, names: Sequence[str]
    ) -> Mapping[str, StoredLocation]:
        """See ``ResponseStore``."""
        self._remove_expired()
        responses = self._owners.get(owner)
        if responses is None:
            return {}
        located: dict[str, StoredLocation] = {}
        for name in names:
            response_id = responses.response_ids.get(name, name)
            entry = responses.entries.get(response_id)
            if entry is not None:
                located[name] = StoredLocation(response_id, entry.size)
        return located

    async def find_response(self, owner: str, name: str) -> StoredResponse | None:
        """See ``ResponseStore``."""
        self._remove_expired()
        responses = self._owners.get(owner)
        entry = None if responses is None else responses.entries.get(name)
        return None if entry is None else entry.response

    async def add_response(self, owner: str, response: StoredResponse) -> None:
        """See ``ResponseStore``."""
        limits = self._limits
        entry = _StoredEntry(response, self._wall_clock() + limits.retention)
        if entry.size > min(limits.owner_bytes, limits.total_bytes):
            self._warnings.add("a response of %d bytes is too large to be stored", entry.size)
            return
        self._remove_expired()
        responses = self._owners.setdefault(owner, _Owner())
        responses.add(entry)
        self._order[owner, response.id] = None
        self.size += entry.size
        while len(responses.entries) > limits.owner_count or responses.size > limits.owner_bytes:
            self._remove(owner, next(iter(responses.entries)))
        while self.size > limits.total_bytes:
            self._remove(*next(iter(self._order)))

    async def remove_response(self, owner: str, name: str) -> None:
        """See ``ResponseStore``."""
        self._remove(owner, name)

    async def aclose(self) -> None:
        """See ``ResponseStore``."""

    def _remove(self, owner: str, name: str) -> None:
        responses = self._owners.get(owner)
        if responses is None:
            return
        self.size -= responses.remove(name)
        self._order.pop((owner, name), None)
        if not responses.entries:
            del self._owners[owner]

    def _remove_expired(self) -> None:
        now = self._wall_clock()
        while self._order:
            owner, name = next(iter(self._order))
            if self._owners[owner].entries[name].expires_at > now:
                return
            self._remove(owner, name)
