"""Leases of shared limits in a real Redis never exceed them and outlive no process."""

import asyncio
import itertools
import math
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.pool.settings import ClientTlsSettings
from gateway.config.schema import SharedStateConfig
from gateway.ratelimit import redis_leases
from gateway.ratelimit.leases import (
    DAILY_LEASE_SHARE,
    LEASE_IDLE_TIMEOUT,
    MIN_RENEW_INTERVAL,
    RATE_LEASE_SHARE,
    RENEW_INTERVAL,
    LeaseGrant,
    LeaseRequest,
    LeaseStoreUnavailable,
    SharedLimit,
)
from gateway.ratelimit.redis_leases import (
    LEASE_SECONDS,
    MAX_LEASES_PER_CALL,
    STORE_RETRY_DELAY,
    STORE_TIMEOUT,
    RedisLeaseStore,
)
from protocols.core.units import Secret
from tests.support.ports import reserve_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE

PEM = Path(__file__).parents[1] / "fault" / "loopback.pem"
PAGE = (PEM.parents[2] / "docs" / "howto" / "shared-rate-limits.md").read_text("utf-8")
CENTURY = 3.2e9
"""A period in which no budget is renewed during a test."""
HOUR = 3600.0
NAMES = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


class FakeClock:
    """A clock that a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def build_store(
    server: RedisServer, borrower: str, clock: FakeClock | None = None
) -> RedisLeaseStore:
    return RedisLeaseStore(
        SharedStateConfig(Secret(server.url)),
        borrower,
        clock=clock or FakeClock(),
        draw=lambda: 1.0,
    )


@pytest.fixture
async def stores(server: RedisServer) -> AsyncIterator[Sequence[RedisLeaseStore]]:
    """The stores of three processes whose clocks differ by hours."""
    opened = [build_store(server, name, FakeClock(n * HOUR)) for n, name in enumerate("abc")]
    yield opened
    for one in opened:
        await one.aclose()


def build_lease_request(
    limit: SharedLimit, wanted: int, held: int = 0, used: int = 0
) -> LeaseRequest:
    """Build a lease request for an unused counter."""
    return LeaseRequest(f"n{next(NAMES)}", limit, wanted, held, used)


def build_followup_request(
    request: LeaseRequest, wanted: int, held: int = 0, used: int = 0
) -> LeaseRequest:
    return LeaseRequest(request.name, request.limit, wanted, held, used)


async def request_amounts(store: RedisLeaseStore, *requests: LeaseRequest) -> list[int]:
    return [one.amount for one in await store.request_leases(requests)]


SLOW = SharedLimit("rate", 10, CENTURY)
DAY = SharedLimit("day", 10, 86400.0)
SLOTS = SharedLimit("slots", 10, 0.0)


# ── leases ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limit", [SLOW, DAY])
async def test_leased_or_consumed_amount_is_unavailable_to_other_processes(
    stores: Sequence[RedisLeaseStore], limit: SharedLimit
) -> None:
    a, b, _ = stores
    first = build_lease_request(limit, 4)

    assert await request_amounts(a, first) == [4]
    assert await request_amounts(b, build_followup_request(first, 100)) == [6]
    assert await request_amounts(a, build_followup_request(first, 1, held=1, used=3)) == [0]
    assert await request_amounts(b, build_followup_request(first, 0, held=2, used=2)) == [0]
    assert await request_amounts(a, build_followup_request(first, 9, held=1)) == [2]


@pytest.mark.parametrize("limit", [SLOW, DAY])
async def test_usage_above_the_lease_is_deducted_from_later_leases(
    stores: Sequence[RedisLeaseStore], limit: SharedLimit
) -> None:
    a, b, _ = stores
    first = build_lease_request(limit, 2)

    assert await request_amounts(a, first) == [2]
    assert await request_amounts(a, build_followup_request(first, 5, used=25)) == [0]
    assert await request_amounts(b, build_followup_request(first, 5)) == [0]
    assert await request_amounts(a, build_followup_request(first, 0, used=-20)) == [0]
    assert await request_amounts(b, build_followup_request(first, 9)) == [5]


@pytest.mark.parametrize("limit", [SLOW, DAY])
async def test_returned_usage_never_raises_the_limit_above_its_maximum(
    stores: Sequence[RedisLeaseStore], limit: SharedLimit
) -> None:
    """A restarted Redis may get back more than it ever leased."""
    first = build_lease_request(limit, 0, used=-7)
    assert await request_amounts(stores[0], first) == [0]
    assert await request_amounts(stores[1], build_followup_request(first, 99)) == [10]


async def test_leased_slots_are_unavailable_to_others_until_returned(
    stores: Sequence[RedisLeaseStore],
) -> None:
    a, b, c = stores
    first = build_lease_request(SLOTS, 4)

    assert await request_amounts(a, first) == [4]
    assert await request_amounts(b, build_followup_request(first, 9)) == [6]
    assert await request_amounts(c, build_followup_request(first, 3)) == [0]
    assert await request_amounts(a, build_followup_request(first, 1, held=1)) == [1]
    assert await request_amounts(c, build_followup_request(first, 9)) == [3]
    assert await request_amounts(b, build_followup_request(first, 6, held=6)) == [6]
    assert await request_amounts(a, build_followup_request(first, 0)) == [0]
    assert await request_amounts(c, build_followup_request(first, 9, held=3)) == [4]


async def test_running_requests_keep_their_slots_when_the_limit_shrinks(
    stores: Sequence[RedisLeaseStore],
) -> None:
    a, b, _ = stores
    first = build_lease_request(SLOTS, 8)
    assert await request_amounts(a, first) == [8]

    fewer = SharedLimit("slots", 5, 0.0)
    assert await request_amounts(a, LeaseRequest(first.name, fewer, 7, retained=6)) == [6]
    assert await request_amounts(b, LeaseRequest(first.name, fewer, 1)) == [0]


@settings(max_examples=100)  # each example uses the real server
@given(
    limit=st.sampled_from([SLOW, DAY, SLOTS]),
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 12), st.floats(0, 1), st.booleans()),
        max_size=25,
    ),
)
def test_leases_of_all_processes_never_exceed_the_limit(
    server: RedisServer, limit: SharedLimit, steps: list[tuple[int, int, float, bool]]
) -> None:
    """This holds for any sequence of leases, uses and returns, and for any lost responses."""
    name = f"n{next(NAMES)}"

    async def run() -> None:
        stores = [build_store(server, borrower) for borrower in "abc"]
        held, reported, spent = [0, 0, 0], [0, 0, 0], 0
        for who, wanted, part, lost in steps:
            used = int(held[who] * part)
            if limit.kind == "slots":
                request = LeaseRequest(name, limit, wanted, retained=min(used, wanted))
            else:
                spent += used
                reported[who] += used
                held[who] -= used
                request = LeaseRequest(name, limit, wanted, held[who], reported[who])
            [grant] = await stores[who].request_leases([request])
            if lost:
                held[who] = request.retained
            elif limit.kind == "slots":
                held[who] = grant.amount
            else:
                held[who] += grant.amount
                reported[who] = 0
            assert sum(held) + spent <= limit.amount
        for store in stores:
            await store.aclose()

    asyncio.run(run())


async def test_rate_limit_refills_gradually_by_the_redis_clock(
    stores: Sequence[RedisLeaseStore], server: RedisServer
) -> None:
    """The leased amount is the refill by the Redis clock, or little less."""

    def now() -> float:
        seconds, micros = server.call("TIME")
        return int(seconds) + int(micros) / 1e6

    a, b, _ = stores
    first, leased = build_lease_request(SharedLimit("rate", 20, 0.1), 0), 0
    began = now()
    for _ in range(100):
        for store in (a, b):
            [amount] = await request_amounts(store, build_followup_request(first, 3, used=0))
            await request_amounts(store, build_followup_request(first, 0, used=amount))
            leased += amount

    within = now() - began

    assert leased <= 20 + 200 * within
    assert leased >= min(200 * within, 600) - 20


async def test_grant_reports_retry_after_and_lease_duration(
    stores: Sequence[RedisLeaseStore],
) -> None:
    a, b, _ = stores
    rate = build_lease_request(SharedLimit("rate", 10, 100.0), 10)
    assert await request_amounts(a, rate) == [10]

    [one, day, slots] = await b.request_leases(
        [
            build_followup_request(rate, 1),
            build_lease_request(DAY, 99),
            build_lease_request(SLOTS, 99),
        ]
    )
    assert (one.amount, round(one.retry_after), one.seconds) == (0, 10, LEASE_SECONDS)
    assert 0 < day.retry_after <= 86400
    assert slots == LeaseGrant(10, LEASE_SECONDS, 1.0)


async def test_daily_budget_resets_at_the_end_of_the_day(
    stores: Sequence[RedisLeaseStore], server: RedisServer
) -> None:
    """The test's day is shorter than a second; days are counted from 1970."""
    short = build_lease_request(SharedLimit("day", 10, 0.5), 0, used=10)
    assert await request_amounts(stores[0], short) == [0]

    async with asyncio.timeout(PATIENCE):
        while (await request_amounts(stores[0], build_followup_request(short, 99)))[0] < 10:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.05)
    assert server.call("PTTL", f"interlingua:{short.name}") <= 1000 * (LEASE_SECONDS + 0.5)


# ── dead processes ────────────────────────────────────────────────────────────────────────────────


async def test_lease_of_a_dead_process_is_reclaimed_without_its_reported_usage(
    stores: Sequence[RedisLeaseStore],
) -> None:
    """The lease returns after it expires, less the usage that its process reported."""
    a, b, _ = stores
    rate, day, slots = (
        build_lease_request(SLOW, 7),
        build_lease_request(DAY, 7),
        build_lease_request(SLOTS, 7),
    )
    assert await request_amounts(a, rate, day, slots) == [7, 7, 7]

    requests = [
        build_followup_request(rate, 0, held=5, used=2),
        build_followup_request(day, 0, held=5, used=2),
    ]
    assert await request_amounts(a, *requests, build_followup_request(slots, 7, held=7)) == [
        0,
        0,
        7,
    ]

    requests = [build_followup_request(one, 10) for one in (rate, day, slots)]
    assert await request_amounts(b, *requests) == [3, 3, 3]

    requests = [
        build_followup_request(rate, 10, held=3),
        build_followup_request(day, 10, held=3),
        build_followup_request(slots, 10, held=3),
    ]
    async with asyncio.timeout(10 * LEASE_SECONDS):
        while (amounts := await request_amounts(b, *requests))[0] == 0:
            assert amounts == [0, 0, 3]
            await asyncio.sleep(0.02)
    assert amounts[:1] == [5]


async def test_unused_counter_expires_in_redis(
    stores: Sequence[RedisLeaseStore], server: RedisServer
) -> None:
    rate = build_lease_request(SharedLimit("rate", 10, 3.0), 5)
    await stores[0].request_leases([rate])

    assert (
        LEASE_SECONDS * 1000
        < server.call("PTTL", f"interlingua:{rate.name}")
        <= (3 + LEASE_SECONDS) * 1000
    )


# ── failures of Redis ─────────────────────────────────────────────────────────────────────────────


async def assert_store_unavailable(store: RedisLeaseStore) -> None:
    """Assert that the store fails, and does not wait for a Redis that never answers."""
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(LeaseStoreUnavailable):
            await store.request_leases([build_lease_request(SLOW, 1)])


async def test_lease_script_is_reloaded_after_a_redis_script_flush(server: RedisServer) -> None:
    store = build_store(server, "a")
    for _ in range(2):
        assert await request_amounts(store, build_lease_request(SLOW, 3)) == [3]
        server.call("SCRIPT", "FLUSH")

    assert (store.up, store.errors) == (True, 0)

    await store.aclose()


async def test_large_lease_requests_are_split_into_several_calls(server: RedisServer) -> None:
    store = build_store(server, "a")
    requests = [build_lease_request(SLOW, n % 7) for n in range(2 * MAX_LEASES_PER_CALL + 1)]

    assert await request_amounts(store, *requests) == [
        n % 7 for n in range(2 * MAX_LEASES_PER_CALL + 1)
    ]
    assert await store.request_leases([]) == []

    await store.aclose()


async def test_failed_redis_is_retried_after_a_delay_and_logged_once_without_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log has one line about the failure, and no password."""
    caplog.set_level("INFO")
    clock = FakeClock()
    with RedisServer("--requirepass", "canary-password") as server:
        url = server.url.replace("unix://", "unix://:canary-password@")
        store = RedisLeaseStore(SharedStateConfig(Secret(url)), "a", clock=clock, draw=lambda: 1.0)
        assert await request_amounts(store, build_lease_request(SLOW, 1)) == [1]

        server.kill()
        await assert_store_unavailable(store)
        assert (store.up, store.errors) == (False, 1)

        server.start()
        clock.now = 0.99 * STORE_RETRY_DELAY
        await assert_store_unavailable(store)
        assert store.errors == 1

        clock.now = STORE_RETRY_DELAY
        assert await request_amounts(store, build_lease_request(SLOW, 1)) == [1]
        assert (store.up, store.errors) == (True, 1)

        for _ in range(2):
            clock.now += STORE_RETRY_DELAY
            server.freeze()
            await assert_store_unavailable(store)
        server.thaw()
    await store.aclose()

    messages = [one.getMessage() for one in caplog.records if one.name == "interlingua"]

    assert [one.partition(":")[0] for one in messages] == [
        "rate limits are not shared, since Redis failed",
        "rate limits are shared again",
        "rate limits are not shared, since Redis failed",
    ]
    assert messages[2].endswith("it did not answer within 250 ms")
    assert "canary" not in f"{messages} {store!r} {vars(store)!r}"


async def test_redis_client_exception_counts_as_store_unavailable(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = build_store(server, "a")

    async def broken(*_: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'read'")

    monkeypatch.setattr(store._redis, "evalsha", broken)
    await assert_store_unavailable(store)
    assert store.errors == 1

    await store.aclose()


async def test_retry_delay_is_randomized_per_process() -> None:
    for draw, rest in ((0.0, STORE_RETRY_DELAY / 2), (0.5, 0.75 * STORE_RETRY_DELAY)):
        clock = FakeClock()
        store = RedisLeaseStore(
            SharedStateConfig(Secret("unix:///nowhere/socket")),
            "a",
            clock=clock,
            draw=itertools.repeat(draw).__next__,
        )
        await assert_store_unavailable(store)
        clock.now = rest - 0.01
        await assert_store_unavailable(store)
        assert store.errors == 1
        clock.now = rest
        await assert_store_unavailable(store)
        assert store.errors == 2
        await store.aclose()


async def test_redis_refusal_counts_as_store_unavailable(server: RedisServer) -> None:
    """Redis refuses without the password, without memory, and as a read-only replica."""
    with RedisServer("--requirepass", "word") as closed:
        store = build_store(closed, "a")
        await assert_store_unavailable(store)
        await store.aclose()
    for setting, value, back in (("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")):
        server.call("CONFIG", "SET", setting, value)
        store = build_store(server, "a")
        try:
            await assert_store_unavailable(store)
        finally:
            server.call("CONFIG", "SET", setting, back)
            await store.aclose()


async def test_documented_redis_acl_user_has_sufficient_permissions() -> None:
    """The user is created with the command in the documentation."""
    [line] = [one for one in PAGE.splitlines() if one.startswith("ACL SETUSER gateway")]
    with RedisServer() as server:
        server.call(*line.split())
        url = server.url.replace("unix://", "unix://gateway:PASSWORD@")
        store = RedisLeaseStore(
            SharedStateConfig(Secret(url)), "a", clock=FakeClock(), draw=lambda: 1.0
        )

        for _ in range(2):
            assert await request_amounts(
                store,
                build_lease_request(SLOW, 3),
                build_lease_request(DAY, 2),
                build_lease_request(SLOTS, 1),
            ) == [3, 2, 1]
            assert await request_amounts(store, build_lease_request(SLOW, 0)) == [0]

        other = RedisLeaseStore(
            SharedStateConfig(Secret(url), prefix="other"), "a", clock=FakeClock(), draw=lambda: 1.0
        )
        await assert_store_unavailable(other)

        await store.aclose()
        await other.aclose()


async def test_redis_tls_with_a_custom_ca(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_leases, "STORE_TIMEOUT", 5.0)  # a handshake on a busy machine
    port = str(reserve_port())
    keys = ("--tls-cert-file", str(PEM), "--tls-key-file", str(PEM), "--tls-ca-cert-file", str(PEM))
    with RedisServer("--tls-port", port, "--tls-auth-clients", "no", *keys) as tls:
        url = f"rediss://127.0.0.1:{port}/1"
        trusting = RedisLeaseStore(
            SharedStateConfig(Secret(url), tls=ClientTlsSettings(str(PEM))),
            "a",
            clock=FakeClock(),
            draw=lambda: 1.0,
        )
        wary = RedisLeaseStore(
            SharedStateConfig(Secret(url)), "b", clock=FakeClock(), draw=lambda: 1.0
        )

        assert await request_amounts(trusting, build_lease_request(SLOW, 3)) == [3]
        await assert_store_unavailable(wary)

        await wary.aclose()
        tls.freeze()
        await trusting.aclose()
        tls.thaw()


def test_documented_guarantees_match_the_constants() -> None:
    """Every number in the documentation is the constant in the code."""
    _, _, table = PAGE.partition("## Guarantees")
    documented = re.findall(r"[0-9.]+(?:%| ms| s\b)", table.partition("\n## ")[0])

    rest = [
        f"{STORE_RETRY_DELAY / 2:g}",
        f"{STORE_RETRY_DELAY:g} s",
        f"{math.ceil(STORE_RETRY_DELAY + RENEW_INTERVAL * 1.25 + STORE_TIMEOUT)} s",
    ]

    assert documented == [
        f"{DAILY_LEASE_SHARE:.0%}",
        f"{LEASE_IDLE_TIMEOUT:g} s",
        f"{RENEW_INTERVAL * 1000:g} ms",
        f"{MIN_RENEW_INTERVAL * 1000:g} ms",
        f"{STORE_TIMEOUT * 1000:g} ms",
        *rest[1:],
        f"{LEASE_SECONDS:g} s",
    ]
    assert f"{rest[0]} to {rest[1]}" in table
    assert f"for up to {MAX_LEASES_PER_CALL} limits" in table
    assert (RATE_LEASE_SHARE, "half of `amount / replicas`" in table) == (0.5, True)
