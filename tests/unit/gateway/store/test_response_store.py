"""Stored responses follow the same rules in memory, in SQLite and in Redis."""

import logging
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.config.schema import ResponseStoreConfig
from gateway.runtime.build import build_response_store
from gateway.store.redis_store import RedisResponseStore
from gateway.store.response_store import (
    MemoryResponseStore,
    ResponseStore,
    StoreUnavailable,
    count_stored_bytes,
)
from gateway.store.sqlite_store import SqliteResponseStore
from protocols.core.interfaces import StoredResponse
from protocols.core.units import Secret
from tests.support.fakes import FakeClock
from tests.support.redis_server import RedisServer

CONFIG = ResponseStoreConfig(retention=100, responses_per_key=3, bytes_per_key=1000, memory=2000)
CreateStore = Callable[[ResponseStoreConfig], ResponseStore]


def response(name: str, size: int = 10) -> StoredResponse:
    return StoredResponse(f"resp_{name}", (f"msg_{name}",), b"x" * size)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def create(
    request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock
) -> AsyncIterator[CreateStore]:
    stores: list[ResponseStore] = []

    def make(config: ResponseStoreConfig) -> ResponseStore:
        if request.param == "sqlite":
            config = replace(config, sqlite=str(tmp_path / "new" / "responses.db"))
        elif request.param == "redis":
            url = request.getfixturevalue("redis").url
            config = replace(config, redis=Secret(url), prefix=tmp_path.name)
        store = build_response_store(config, clock)
        assert store is not None
        stores.append(store)
        return store

    yield make
    for store in stores:
        await store.aclose()


async def list_stored(store: ResponseStore, owner: str, *names: str) -> list[str]:
    return [one for one in names if await store.find_response(owner, f"resp_{one}") is not None]


async def test_response_is_found_by_its_id_and_by_those_of_its_items(create: CreateStore) -> None:
    store = create(CONFIG)
    await store.add_response("a", response("1"))

    located = await store.locate_responses("a", ("resp_1", "msg_1", "msg_2"))
    assert located.keys() == {"resp_1", "msg_1"}

    for location in located.values():
        stored = await store.find_response("a", location.id)
        assert stored is not None
        assert (stored.id, stored.body) == ("resp_1", b"x" * 10)
        assert location.size >= 10
    assert await store.find_response("a", "resp_2") is None


async def test_owners_are_separated(create: CreateStore) -> None:
    store = create(CONFIG)
    await store.add_response("a", response("1"))

    assert await store.find_response("b", "resp_1") is None
    assert await store.find_response("", "resp_1") is None
    assert await store.find_response("a:resp", "1") is None
    assert await store.locate_responses("b", ("resp_1", "msg_1")) == {}

    await store.remove_response("b", "resp_1")
    assert await store.find_response("a", "resp_1") is not None


async def test_removed_response_is_gone_with_its_items(create: CreateStore) -> None:
    store = create(CONFIG)
    await store.add_response("a", response("1"))
    await store.add_response("a", response("2"))

    await store.remove_response("a", "resp_1")
    await store.remove_response("a", "resp_1")

    assert await store.locate_responses("a", ("resp_1", "msg_1")) == {}
    assert await list_stored(store, "a", "1", "2") == ["2"]


async def test_oldest_responses_of_an_owner_make_room(
    create: CreateStore, clock: FakeClock
) -> None:
    store = create(CONFIG)
    for name in "1234":
        clock.now += 1
        await store.add_response("a", response(name))

    await store.add_response("b", response("1"))

    assert await list_stored(store, "a", *"1234") == ["2", "3", "4"]
    assert await list_stored(store, "b", "1") == ["1"]


async def test_bytes_of_an_owner_are_limited(create: CreateStore, clock: FakeClock) -> None:
    store = create(CONFIG)
    for name in "12":
        clock.now += 1
        await store.add_response("a", response(name, 600))

    assert await list_stored(store, "a", *"12") == ["2"]


async def test_response_larger_than_the_limit_is_not_stored(
    create: CreateStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = create(CONFIG)
    await store.add_response("a", response("1"))

    with caplog.at_level(logging.WARNING, "interlingua"):
        await store.add_response("a", response("2", 1000))

    assert await list_stored(store, "a", "1", "2") == ["1"]
    assert "too large to be stored" in caplog.text


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_old_responses_expire(kind: str, tmp_path: Path, clock: FakeClock) -> None:
    config = CONFIG if kind == "memory" else replace(CONFIG, sqlite=str(tmp_path / "r.db"))
    store: Any = build_response_store(config, clock)
    await store.add_response("a", response("1"))
    clock.now += 60
    await store.add_response("a", response("2"))

    clock.now += 50
    assert await list_stored(store, "a", "1", "2") == ["2"]

    await store.add_response("b", response("3"))
    assert await list_stored(store, "a", "1", "2") == ["2"]

    await store.aclose()


# --- memory ---------------------------------------------------------------------------------------


async def test_memory_of_all_owners_is_limited(clock: FakeClock) -> None:
    store: Any = build_response_store(CONFIG, clock)
    size = count_stored_bytes(response("1", 800))
    for owner in "abc":
        await store.add_response(owner, response("1", 800))

    assert isinstance(store, MemoryResponseStore)
    assert store.size == 2 * size
    assert await list_stored(store, "a", "1") == []

    for owner in "bc":
        await store.remove_response(owner, "resp_1")
    assert store.size == 0


def test_nothing_is_stored_if_it_is_turned_off(clock: FakeClock) -> None:
    assert build_response_store(ResponseStoreConfig(enabled=False), clock) is None


# --- SQLite ---------------------------------------------------------------------------------------


async def test_file_is_shared_and_private(tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "responses.db"
    config = replace(CONFIG, sqlite=str(path))
    first, second = (build_response_store(config, clock) for _ in "12")

    assert first is not None
    assert second is not None

    await first.add_response("a", response("1"))

    assert isinstance(first, SqliteResponseStore)
    assert await list_stored(second, "a", "1") == ["1"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    for store in (first, second):
        await store.aclose()


async def test_unusable_file_is_reported(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "responses.db"
    path.write_text("this is no database, and long enough to be seen as none" * 100)
    store: Any = build_response_store(replace(CONFIG, sqlite=str(path)), clock)

    with caplog.at_level(logging.WARNING, "interlingua"):
        await store.add_response("a", response("1"))
        with pytest.raises(StoreUnavailable):
            await store.find_response("a", "resp_1")
        with pytest.raises(StoreUnavailable):
            await store.remove_response("a", "resp_1")

    assert "was not stored in" in caplog.text
    assert "can't be read from" in caplog.text

    await store.aclose()


async def test_responses_that_cannot_be_stored_log_one_warning_a_minute(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "responses.db"
    path.write_text("this is no database, and long enough to be seen as none" * 100)
    store: Any = build_response_store(replace(CONFIG, sqlite=str(path)), clock)

    with caplog.at_level(logging.WARNING, "interlingua"):
        for _ in range(30):
            await store.add_response("a", response("1"))
        clock.now += 60
        await store.add_response("a", response("1"))

    first, second = caplog.messages
    assert first.startswith("a response was not stored in")
    assert second == f"{first} (29 more since the last such warning)"

    await store.aclose()


# --- Redis ----------------------------------------------------------------------------------------


async def test_unreachable_redis_is_reported_without_its_url(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(CONFIG, redis=Secret("redis://user:canary-password@127.0.0.1:1/0"))
    store: Any = build_response_store(config, clock)

    with caplog.at_level(logging.WARNING, "interlingua"):
        await store.add_response("a", response("1"))
        with pytest.raises(StoreUnavailable):
            await store.find_response("a", "resp_1")
        with pytest.raises(StoreUnavailable):
            await store.remove_response("a", "resp_1")

    assert isinstance(store, RedisResponseStore)
    assert "was not stored in Redis" in caplog.text
    assert "canary-password" not in caplog.text

    await store.aclose()


async def test_responses_in_redis_expire_by_themselves(
    redis: RedisServer, clock: FakeClock
) -> None:
    config = replace(CONFIG, redis=Secret(redis.url), prefix="expiry")
    store: Any = build_response_store(config, clock)
    await store.add_response("a", response("1"))

    client = store._redis
    keys = await client.keys("expiry:*")

    assert len(keys) == 3
    for key in keys:
        assert 0 < await client.ttl(key) <= 100
        assert b"a:" not in key.removeprefix(b"expiry:")[:2]

    await store.aclose()
