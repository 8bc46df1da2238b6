"""Several processes lease shares of a limit, use no more, and report all usage."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from gateway.config.schema import KeyRateLimitConfig, RateLimitConfig, StoreFailurePolicy
from gateway.ratelimit.counters import CounterRegistry
from gateway.ratelimit.leases import (
    LEASE_IDLE_TIMEOUT,
    LeaseGrant,
    LeaseRenewer,
    LeaseRequest,
    LeaseStoreUnavailable,
)
from gateway.ratelimit.limiter import RateLimiter
from protocols.core.catalog import ModelInfo
from protocols.core.errors import GatewayError, Overloaded, RateLimitExceeded
from protocols.core.events import Usage
from tests.support.waiting import PATIENCE
from tests.unit.gateway.ratelimit.test_limiter import LimitedRequest

CHAT: Final = ModelInfo("chat", (), task="embedding")
LASTS: Final = 2.0
RATES: Final = RateLimitConfig((64, 16), (640, 16), 8, 64_000)


class FakeLeaseStore:
    """The remaining amount of each limit, in memory."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.spent: dict[str, tuple[float, float]] = {}
        self.held: dict[str, dict[str, tuple[int, float]]] = {}
        self.requests: list[LeaseRequest] = []
        self.broken = False

    def lend(self, borrower: str, request: LeaseRequest) -> LeaseGrant:
        now, limit, name = self.now(), request.limit, request.name
        held = self.held.setdefault(name, {})
        others = sum(n for who, (n, till) in held.items() if who != borrower and till > now)
        if limit.kind == "slots":
            granted = min(request.requested, max(request.retained, limit.amount - others))
            held[borrower] = granted, now + LASTS
            return LeaseGrant(granted, LASTS)
        spent, at = self.spent.get(name, (0.0, now))
        back = (now - at) * limit.amount / limit.period if limit.kind == "rate" else 0.0
        spent = max(0.0, max(0.0, spent - back) + request.used)
        self.spent[name] = spent, now
        granted = max(
            0, int(min(request.requested, limit.amount - spent - others - request.retained))
        )
        held[borrower] = request.retained + granted, now + LASTS
        return LeaseGrant(granted, LASTS, 3600.0 if limit.kind == "day" else 0.0)


class FakeProcess:
    """One of the processes that share a limit."""

    def __init__(
        self,
        bank: FakeLeaseStore,
        name: str,
        policy: StoreFailurePolicy = "local",
        replicas: int = 2,
    ) -> None:
        self.bank = bank
        self.name = name
        self.policy = policy
        self.replicas = replicas
        self.bell = asyncio.Event()
        self.accounts = CounterRegistry(bank.now, lambda: 86400 + bank.now(), self, self.bell.set)
        self.limiter = RateLimiter({"web": KeyRateLimitConfig(*astuple(RATES))}, self.accounts)
        self.running: list[LimitedRequest] = []
        self.leasing = LeaseRenewer(
            self, lambda: self.limiter.leased_counters, self.bell, bank.now, lambda: 0.5
        )

    async def request_leases(self, requests: Sequence[LeaseRequest]) -> Sequence[LeaseGrant]:
        if self.bank.broken:
            raise LeaseStoreUnavailable
        self.bank.requests += requests
        return [self.bank.lend(self.name, request) for request in requests]

    def tick(self, *, last: bool = False) -> None:
        asyncio.run(self.leasing.renew_leases(last=last))

    def ask(self, weight: int = 1) -> LimitedRequest:
        entry = LimitedRequest()
        entry.reserve(self.limiter, "chat", b"1234" * weight, target=CHAT)
        self.running.append(entry)
        return entry

    def refused(self, weight: int = 1) -> GatewayError:
        with pytest.raises(GatewayError) as excinfo:
            self.ask(weight)
        return excinfo.value

    def end(self, used: int) -> None:
        entry = self.running.pop(0)
        entry.usage = Usage(used, 0)
        entry.settle()

    def left(self) -> dict[str, int]:
        counters = self.accounts.build_counters("web", "", RATES)
        return {one.scope: one.get_status(self.bank.now()).remaining for one in counters}


class RedisLimiterTestBench:
    def __init__(self, *policies: StoreFailurePolicy) -> None:
        self.now = 1000.0
        self.bank = FakeLeaseStore(lambda: self.now)
        self.processes = [
            FakeProcess(self.bank, str(n), policy, len(policies))
            for n, policy in enumerate(policies)
        ]

    def fail(self) -> None:
        """The next lease request of the first process fails."""
        self.bank.broken = True
        self.now += 1.25
        self.processes[0].tick()


def start_with_lease(
    policy: StoreFailurePolicy = "local",
) -> tuple[RedisLimiterTestBench, FakeProcess]:
    """Two processes, the first of which has leases."""
    bench = RedisLimiterTestBench(policy, policy)
    first = bench.processes[0]
    first.ask()
    first.end(1)
    first.tick()
    return bench, first


# --- without a lease ------------------------------------------------------------------------------


def test_limiter_without_a_lease_admits_an_initial_amount_and_requests_one() -> None:
    bench = RedisLimiterTestBench("local", "local")
    one = bench.processes[0]
    one.tick()

    assert not bench.bank.requests

    for _ in range(2):
        one.ask(30)
    assert one.bell.is_set()
    assert "requests at a time" in one.refused().message

    one.end(30)
    one.end(30)
    error = one.refused(321)

    assert isinstance(error, RateLimitExceeded)
    assert error.scope == "tokens"

    one.ask(4)
    one.end(4)
    one.tick()

    assert {request.name: request.used for request in bench.bank.requests} == {
        "web/concurrency/": 0,
        "web/requests/": 3,
        "web/tokens/": 64,
        "web/budget/": 64,
    }

    one.ask(1)


def test_idle_lease_is_released() -> None:
    bench, one = start_with_lease()
    for _ in range(int(4 * LEASE_IDLE_TIMEOUT)):
        bench.now += 0.5
        one.tick()
    assert bench.bank.requests[-1].retained > 0

    count = len(bench.bank.requests)
    bench.now += LEASE_IDLE_TIMEOUT
    one.tick()

    assert len(bench.bank.requests) == count
    assert one.left() == {"concurrency": 0, "requests": 0, "tokens": 0, "budget": 0}

    one.ask()


def test_expired_lease_is_not_used() -> None:
    bench, one = start_with_lease()
    bench.now += LASTS

    for _ in range(16):
        one.ask()
        one.end(0)

    assert one.refused().message == "at most 64 requests in 16 s are allowed"


# --- with a lease ---------------------------------------------------------------------------------


def test_requests_beyond_the_lease_are_rejected() -> None:
    bench, one = start_with_lease()
    assert one.left() == {"concurrency": 2, "requests": 16, "tokens": 160, "budget": 640}

    for _ in range(16):
        one.ask()
        one.end(0)
    one.bell.clear()
    error = one.refused()

    assert (error.message, error.retry_after) == ("at most 64 requests in 16 s are allowed", 1.0)
    assert one.bell.is_set()

    one.tick()
    assert one.left()["requests"] == 32

    bench.now += 0.25


def test_concurrency_slots_are_leased_on_demand() -> None:
    _, one = start_with_lease()
    two = FakeProcess(one.bank, "two")
    for _ in range(2):
        one.ask(0)
    error = one.refused(0)

    assert (error.message, error.retry_after) == ("at most 8 requests at a time are allowed", 1.0)

    one.tick()
    assert one.left()["concurrency"] == 2

    for _ in range(20):
        two.tick()
        with suppress(RateLimitExceeded):
            two.ask(0)
    assert (len(one.running), len(two.running)) == (2, 4)

    for _ in range(2):
        one.end(0)
    for _ in range(100):
        one.tick()
        two.tick()
    assert one.left()["concurrency"] == 2


def test_lease_of_more_than_twice_the_demand_is_returned() -> None:
    bench, one = start_with_lease()
    one.refused(320)
    one.tick()
    one.ask(320)
    one.tick()
    one.end(0)

    assert one.left()["tokens"] == 639

    for _ in range(2 * int(LEASE_IDLE_TIMEOUT) + 2):
        bench.now += 0.5
        one.ask(0)
        one.end(0)
        one.tick()
    assert bench.bank.spent["web/tokens/"][0] == 0
    assert one.left()["tokens"] == 320


def test_tokens_used_beyond_the_lease_reduce_the_next_lease() -> None:
    bench, one = start_with_lease()
    one.ask(10)
    one.end(500)

    assert one.left()["tokens"] == 0

    one.tick()
    assert one.bank.spent["web/tokens/"][0] == 501
    assert one.left()["tokens"] == 640 - 501

    bench.now += 16
    one.ask(1)
    one.tick()

    assert one.bank.spent["web/tokens/"][0] == 1


def test_daily_budget_is_exhausted_when_the_store_grants_no_more() -> None:
    bench = RedisLimiterTestBench("local")
    [one] = bench.processes
    one.limiter = RateLimiter({"web": KeyRateLimitConfig(budget=1000)}, one.accounts)
    one.ask(10)
    error = one.refused(1)

    assert isinstance(error, RateLimitExceeded)
    assert error.scope == "tokens"
    assert error.message == ("at most 1000 tokens a day are allowed, and this request may take 1")

    one.tick()
    one.ask(10)
    one.end(980)
    one.tick()
    one.ask(10)

    assert one.refused(1).message == (
        "the budget of 1000 tokens a day is spent: 0 are left, and this request may take 1"
    )


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.integers(0, 100), st.integers(0, 4), st.sampled_from("aaets")
        ),
        max_size=60,
    )
)
def test_processes_together_never_exceed_the_limits(
    steps: list[tuple[int, int, int, str]],
) -> None:
    bench = RedisLimiterTestBench("local", "local")
    began, used, requests, most = bench.now, 0, 0, 0
    for n, weight, pause, what in steps:
        process = bench.processes[n]
        match what:
            case "a":
                with suppress(GatewayError):
                    process.ask(weight)
                    requests += 1
            case "e" if process.running:
                used += weight
                process.end(weight)
            case "t":
                process.tick()
            case _:
                bench.now += pause / 8
        most = max(most, sum(len(one.running) for one in bench.processes))
        passed = (bench.now - began) / 16
        assert requests <= 64 * (1 + passed) + 2 * 16  # the same bound as above
        assert most <= 8 + 2  # the overdraft

    for process in bench.processes:
        while process.running:
            process.end(0)
        process.tick()
        process.tick(last=True)

    assert bench.bank.spent.get("web/budget/", (0,))[0] == used
    assert not any(n for held in bench.bank.held.values() for n, _ in held.values())


# --- while the store fails ------------------------------------------------------------------------


def test_local_policy_applies_a_share_of_each_limit_if_the_store_fails() -> None:
    bench, one = start_with_lease("local")
    bench.fail()
    for _ in range(4):
        one.ask(0)

    assert one.refused(0).message == "at most 8 requests at a time are allowed"

    for _ in range(4):
        one.end(0)
    for _ in range(28):
        one.ask(0)
        one.end(0)
    assert one.refused(0).message == "at most 64 requests in 16 s are allowed"

    bench.now += 16
    one.ask(320)
    assert one.refused(1).message.startswith("at most 640 tokens in 16 s")

    one.end(20)
    assert one.left() == {"concurrency": 4, "requests": 31, "tokens": 300, "budget": 31_979}


def test_usage_before_an_outage_counts_in_the_local_part() -> None:
    bench = RedisLimiterTestBench("local")
    [one] = bench.processes
    one.limiter = RateLimiter({"web": KeyRateLimitConfig(requests=(64, 3600))}, one.accounts)
    for _ in range(64):
        one.ask(0)
        one.end(0)
        one.tick()

    bench.fail()

    assert one.refused(0).message == "at most 64 requests in 3600 s are allowed"


def test_outages_of_the_store_give_no_fresh_allowance() -> None:
    """Usage during an outage is reported once, less the refill of that time."""
    bench = RedisLimiterTestBench("local")
    [one] = bench.processes
    one.limiter = RateLimiter({"web": KeyRateLimitConfig(requests=(64, 3600))}, one.accounts)
    admitted = 0

    for _ in range(5):
        bench.fail()
        for _ in range(20):
            with suppress(RateLimitExceeded):
                one.ask(0)
                one.end(0)
                admitted += 1
        bench.bank.broken = False
        one.tick()
        for _ in range(20):
            with suppress(RateLimitExceeded):
                one.ask(0)
                one.end(0)
                admitted += 1
            one.tick()

    assert admitted == 64


def test_a_long_outage_leaves_no_debt_beyond_the_local_part() -> None:
    bench = RedisLimiterTestBench("local")
    [one] = bench.processes
    one.limiter = RateLimiter({"web": KeyRateLimitConfig(requests=(64, 64))}, one.accounts)
    one.ask(0)
    one.end(0)
    bench.fail()
    for _ in range(300):
        bench.now += 1.0
        one.ask(0)
        one.end(0)
        one.tick()
    bench.bank.broken = False

    one.tick()

    assert bench.bank.spent["web/requests/"][0] <= 2


def test_open_policy_admits_all_requests_if_the_store_fails() -> None:
    bench, one = start_with_lease("open")
    bench.fail()
    for _ in range(100):
        one.ask(100)
    for _ in range(100):
        one.end(100)
    bench.bank.broken = False

    one.tick()

    assert bench.bank.spent["web/budget/"][0] == 10_001
    assert bench.bank.spent["web/tokens/"][0] == 0


def test_closed_policy_rejects_all_requests_if_the_store_fails() -> None:
    bench, one = start_with_lease("closed")
    bench.fail()

    error = one.refused()

    assert isinstance(error, Overloaded)
    assert error.message == "rate limits can't be checked now, since their shared store is down"

    bench.bank.broken = False
    one.tick()
    one.ask()


def test_closed_policy_rejects_requests_with_a_daily_budget() -> None:
    bench = RedisLimiterTestBench("closed")
    [one] = bench.processes
    one.limiter = RateLimiter({"web": KeyRateLimitConfig(budget=100)}, one.accounts)
    one.ask()

    bench.fail()

    assert isinstance(one.refused(), Overloaded)


@pytest.mark.parametrize("policy", ["local", "open"])
def test_requests_around_a_store_failure_are_settled_with_their_own_counter(
    policy: StoreFailurePolicy,
) -> None:
    bench, one = start_with_lease(policy)
    one.ask(100)
    bench.fail()
    one.tick()
    bench.now += 0.25
    one.ask(50)
    one.end(30)
    bench.bank.broken = False
    bench.now += 0.25
    one.tick()

    assert bench.bank.spent["web/tokens/"][0] == (30 + 46 if policy == "local" else 30)
    assert bench.bank.spent["web/budget/"][0] == 30 + 50 + 1

    level = one.left()["tokens"]
    bench.now += 0.25
    one.end(10)

    assert one.left()["tokens"] == level

    one.tick(last=True)
    assert bench.bank.spent["web/budget/"][0] == 30 + 10 + 1
    assert not any(n for held in bench.bank.held.values() for n, _ in held.values())


# --- keys -----------------------------------------------------------------------------------------


async def test_leases_are_renewed_periodically_and_returned_at_close() -> None:
    bench = RedisLimiterTestBench("local")
    [one] = bench.processes
    one.leasing.start()
    one.ask(7)
    async with asyncio.timeout(PATIENCE):
        while not bench.bank.requests:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
        one.bell.clear()
        first = len(bench.bank.requests)
        bench.now += LASTS
        while len(bench.bank.requests) == first:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    one.end(5)

    await one.leasing.aclose()

    assert bench.bank.spent["web/budget/"][0] == 5
    assert not any(n for held in bench.bank.held.values() for n, _ in held.values())


def test_leases_of_jwt_principals_are_requested_by_their_current_limiter() -> None:
    bench = RedisLimiterTestBench("local")
    [one] = bench.processes
    former, one.limiter = (
        one.limiter,
        RateLimiter({}, one.accounts, KeyRateLimitConfig(*astuple(RATES))),
    )
    LimitedRequest(key="jwt:a").reserve(one.limiter, "chat", b"", target=CHAT)
    one.tick()

    assert {request.name.partition("/")[0] for request in bench.bank.requests} == {"jwt:a"}

    bench.now += LASTS
    one.limiter = former
    bench.bank.requests.clear()
    one.tick()

    assert not bench.bank.requests


async def test_unstarted_lease_renewer_requests_no_lease() -> None:
    bench = RedisLimiterTestBench("local")
    await bench.processes[0].leasing.aclose()
    assert not bench.bank.requests


def test_request_with_many_choices_enlarges_lease() -> None:
    _, one = start_with_lease()
    first, alone = one.ask(0), 4
    assert first.reservation is not None

    first.reservation.reserve_choices(100)
    assert one.left()["concurrency"] == 0, "alone it gets its process's share"

    one.end(0)
    one.tick()
    assert one.left()["concurrency"] >= alone

    second = one.ask(0)
    third = one.ask(0)
    assert second.reservation is not None
    assert third.reservation is not None

    second.reservation.reserve_choices(3)
    one.end(0)
    one.end(0)
    one.tick()

    assert one.left()["concurrency"] >= alone
