"""Responses that a request refers to are measured before they are loaded, and loaded once."""

import asyncio
import threading
from collections.abc import Container, Mapping, Sequence
from typing import Any

import pytest

from gateway.memory import MemoryBudget
from gateway.store import references
from gateway.store.references import ReferenceLoader
from gateway.store.response_store import StoredLocation
from protocols.core.errors import Overloaded, RequestTooLarge
from protocols.core.interfaces import StoredResponse

BODY = 100
LIMIT = 1000


class CountingStore:
    """Responses of one owner, each with one item; counts what is loaded.

    ``sizes`` are the sizes of the bodies: response ``r1`` has item ``i1``.
    """

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.loaded: list[str] = []
        self.loading = 0
        self.most_loading = 0

    async def locate_responses(
        self, owner: str, names: Sequence[str]
    ) -> Mapping[str, StoredLocation]:
        assert owner == "owner"
        ids = {name: f"r{name[1:]}" for name in names if f"r{name[1:]}" in self.sizes}
        return {name: StoredLocation(one, self.sizes[one] + 64) for name, one in ids.items()}

    async def find_response(self, owner: str, name: str) -> StoredResponse | None:
        assert owner == "owner"
        self.loaded.append(name)
        self.loading += 1
        self.most_loading = max(self.most_loading, self.loading)
        await asyncio.sleep(0)
        self.loading -= 1
        return StoredResponse(name, (), b"x" * self.sizes[name])

    async def add_response(self, owner: str, response: StoredResponse) -> None:
        raise NotImplementedError

    async def remove_response(self, owner: str, name: str) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


class Account:
    """The bytes that a request has reserved, and the most at a time."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.budget = MemoryBudget(limit)
        self.peak = 0

    def reserve_memory(self, size: int) -> None:
        self.budget.reserve("bodies", size)
        self.peak = max(self.peak, self.budget.used)


def read_parts(stored: StoredResponse, names: Container[str]) -> dict[str, bytes]:
    """Read a response by its id, and a tenth of it by its item's id."""
    parts = {stored.id: stored.body, f"i{stored.id[1:]}": stored.body[: len(stored.body) // 10]}
    return {name: part for name, part in parts.items() if name in names}


async def load(
    store: CountingStore, counts: Mapping[str, int], account: Account | None = None
) -> Mapping[str, bytes]:
    return await ReferenceLoader(store).load_parts(
        "owner",
        counts,
        lambda stored: read_parts(stored, counts),
        account=account or Account(),
        body_size=BODY,
        limit=LIMIT,
    )


async def test_parts_are_found_by_the_ids_of_responses_and_items() -> None:
    parts = await load(CountingStore(r1=100, r2=200), {"r1": 1, "i2": 1, "i9": 1})

    assert {name: len(part) for name, part in parts.items()} == {"r1": 100, "i2": 20}


async def test_response_is_loaded_once_however_many_ids_refer_to_it() -> None:
    store = CountingStore(r1=100)

    await load(store, {"r1": 1, "i1": 30})

    assert store.loaded == ["r1"]


async def test_parts_count_against_the_body_limit_as_often_as_they_are_referred_to() -> None:
    store = CountingStore(r1=100)

    assert await load(store, {"i1": (LIMIT - BODY) // 10})
    with pytest.raises(RequestTooLarge, match="larger than 1000 bytes") as excinfo:
        await load(store, {"i1": (LIMIT - BODY) // 10 + 1})

    assert excinfo.value.limit == LIMIT


async def test_responses_that_are_too_large_together_are_not_loaded() -> None:
    store = CountingStore(r1=2000, r2=2000)

    with pytest.raises(RequestTooLarge):
        await load(store, {"i1": 1, "i2": 1})

    assert store.loaded == []


async def test_number_of_responses_is_bounded_before_any_is_loaded() -> None:
    names = range(references.MAX_RESPONSES + 1)
    store = CountingStore(**{f"r{n}": 1 for n in names})

    with pytest.raises(RequestTooLarge, match="more than 256 stored responses"):
        await load(store, {f"i{n}": 1 for n in names})

    assert store.loaded == []


async def test_memory_is_reserved_before_a_response_is_loaded() -> None:
    store, account = CountingStore(r1=500), Account(limit=500)

    with pytest.raises(Overloaded):
        await load(store, {"i1": 1}, account)

    assert store.loaded == []
    assert account.budget.used == 0


async def test_only_the_parts_stay_reserved() -> None:
    account = Account()

    await load(CountingStore(r1=500, r2=500), {"i1": 2, "i2": 1}, account)

    assert account.budget.used == 3 * 50
    assert account.peak == 2 * 50 + 500 + 64


async def test_response_that_was_replaced_by_a_larger_one_is_not_used() -> None:
    store = CountingStore(r1=100)
    locate = store.locate_responses

    async def locate_before(owner: str, names: Sequence[str]) -> Mapping[str, StoredLocation]:
        results = await locate(owner, names)
        store.sizes["r1"] = 500
        return results

    store.locate_responses = locate_before  # type: ignore[method-assign]

    assert await load(store, {"r1": 1}) == {}


async def test_few_requests_load_at_the_same_time() -> None:
    store = CountingStore(**{f"r{n}": 10 for n in range(20)})
    loader = ReferenceLoader(store)

    async def load_one(n: int) -> Any:
        return await loader.load_response("owner", f"r{n}", Account())

    results = await asyncio.gather(*(load_one(n) for n in range(20)))

    assert [one.id for one in results] == [f"r{n}" for n in range(20)]
    assert store.most_loading == 2


async def test_large_response_is_read_by_a_thread() -> None:
    threads: list[threading.Thread] = []

    def read(stored: StoredResponse) -> dict[str, bytes]:
        threads.append(threading.current_thread())
        return {stored.id: b"x"}

    loader = ReferenceLoader(CountingStore(r1=100, r2=100_000))
    for name in ("r1", "r2"):
        await loader.load_parts(
            "owner", {name: 1}, read, account=Account(), body_size=0, limit=1 << 20
        )

    assert [one is threading.main_thread() for one in threads] == [True, False]


async def test_request_without_references_asks_the_store_for_nothing() -> None:
    store: Any = None

    assert await load(store, {}) == {}


async def test_single_response_is_found_by_its_own_id_and_reserved() -> None:
    store, account = CountingStore(r1=100), Account(limit=200)
    loader = ReferenceLoader(store)

    stored = await loader.load_response("owner", "r1", account)
    assert stored is not None
    assert account.budget.used == 164
    assert await loader.load_response("owner", "i1", account) is None
    assert await loader.load_response("owner", "r2", account) is None
    with pytest.raises(Overloaded):
        await loader.load_response("owner", "r1", account)
    assert store.loaded == ["r1"]
