"""What several processes are lent: each uses no more than that, and all of it is told."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from gateway.config.schema import KeyRateLimitConfig, RateLimitConfig, StoreFailurePolicy
from gateway.ratelimit.limiter import CounterRegistry, RateLimiter
from gateway.ratelimit.redis_limiter import (
    LEASE_IDLE_TIMEOUT,
    LeaseGrant,
    LeaseRenewer,
    LeaseRequest,
    LeaseStoreUnavailable,
)
from protocols.core.catalog import ModelInfo
from protocols.core.errors import GatewayError, Overloaded, RateLimitExceeded
from protocols.core.events import Usage
from tests.unit.gateway.ratelimit.test_limiter import Entry

CHAT: Final = ModelInfo("chat", (), task="embedding")
LASTS: Final = 2.0
RATES: Final = RateLimitConfig((64, 16), (640, 16), 8, 64_000)


class Bank:
    """What is left of each limit, in memory."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.spent: dict[str, tuple[float, float]] = {}
        self.held: dict[str, dict[str, tuple[int, float]]] = {}
        self.wishes: list[LeaseRequest] = []
        self.broken = False

    def lend(self, borrower: str, wish: LeaseRequest) -> LeaseGrant:
        now, limit, name = self.now(), wish.limit, wish.name
        held = self.held.setdefault(name, {})
        others = sum(n for who, (n, till) in held.items() if who != borrower and till > now)
        if limit.kind == "slots":
            granted = min(wish.requested, max(wish.retained, limit.amount - others))
            held[borrower] = granted, now + LASTS
            return LeaseGrant(granted, LASTS)
        spent, at = self.spent.get(name, (0.0, now))
        back = (now - at) * limit.amount / limit.period if limit.kind == "rate" else 0.0
        spent = max(0.0, max(0.0, spent - back) + wish.used)
        self.spent[name] = spent, now
        granted = max(0, int(min(wish.requested, limit.amount - spent - others - wish.retained)))
        held[borrower] = wish.retained + granted, now + LASTS
        return LeaseGrant(granted, LASTS, 3600.0 if limit.kind == "day" else 0.0)


class Process:
    """One of those that share."""

    def __init__(
        self, bank: Bank, name: str, policy: StoreFailurePolicy = "local", replicas: int = 2
    ) -> None:
        self.bank = bank
        self.name = name
        self.policy = policy
        self.replicas = replicas
        self.bell = asyncio.Event()
        self.accounts = CounterRegistry(bank.now, lambda: 86400 + bank.now(), self, self.bell.set)
        self.limiter = RateLimiter({"web": KeyRateLimitConfig(*astuple(RATES))}, self.accounts)
        self.running: list[Entry] = []
        self.leasing = LeaseRenewer(
            self, lambda: self.limiter.leased_counters, self.bell, bank.now, lambda: 0.5
        )

    async def request_leases(self, wishes: Sequence[LeaseRequest]) -> Sequence[LeaseGrant]:
        if self.bank.broken:
            raise LeaseStoreUnavailable
        self.bank.wishes += wishes
        return [self.bank.lend(self.name, wish) for wish in wishes]

    def tick(self, *, last: bool = False) -> None:
        asyncio.run(self.leasing.renew_leases(last=last))

    def ask(self, weight: int = 1) -> Entry:
        entry = Entry()
        entry.reserve(self.limiter, "chat", b"1234" * weight, target=CHAT)
        self.running.append(entry)
        return entry

    def refused(self, weight: int = 1) -> GatewayError:
        with pytest.raises(GatewayError) as caught:
            self.ask(weight)
        return caught.value

    def end(self, used: int) -> None:
        entry = self.running.pop(0)
        entry.usage = Usage(used, 0)
        entry.settle()

    def left(self) -> dict[str, int]:
        counters = self.accounts.build_counters("web", "", RATES)
        return {one.scope: one.get_status(self.bank.now()).remaining for one in counters}


class World:
    def __init__(self, *policies: StoreFailurePolicy) -> None:
        self.now = 1000.0
        self.bank = Bank(lambda: self.now)
        self.processes = [
            Process(self.bank, str(n), policy, len(policies)) for n, policy in enumerate(policies)
        ]

    def fail(self) -> None:
        """When the first process is to ask again, it can't."""
        self.bank.broken = True
        self.now += 1.25
        self.processes[0].tick()


def started(policy: StoreFailurePolicy = "local") -> tuple[World, Process]:
    """Two processes, of which the first was asked once and has its loans."""
    world = World(policy, policy)
    first = world.processes[0]
    first.ask()
    first.end(1)
    first.tick()
    return world, first


# --- without a loan -------------------------------------------------------------------------------


def test_who_has_no_loan_admits_what_one_would_be_and_has_more_asked_for_at_once() -> None:
    world = World("local", "local")
    one = world.processes[0]
    one.tick()
    assert not world.bank.wishes
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
    assert {wish.name: wish.used for wish in world.bank.wishes} == {
        "web/concurrency/": 0,
        "web/requests/": 3,
        "web/tokens/": 64,
        "web/budget/": 64,
    }
    one.ask(1)


def test_what_nobody_asks_for_is_let_go() -> None:
    world, one = started()
    for _ in range(int(4 * LEASE_IDLE_TIMEOUT)):
        world.now += 0.5
        one.tick()
    assert world.bank.wishes[-1].retained > 0
    count = len(world.bank.wishes)
    world.now += LEASE_IDLE_TIMEOUT
    one.tick()
    assert len(world.bank.wishes) == count
    assert one.left() == {"concurrency": 0, "requests": 0, "tokens": 0, "budget": 0}
    one.ask()


def test_a_loan_that_is_over_is_not_used() -> None:
    world, one = started()
    world.now += LASTS
    for _ in range(16):
        one.ask()
        one.end(0)
    assert one.refused().message == "at most 64 requests in 16 s are allowed"


# --- with one -------------------------------------------------------------------------------------


def test_a_loan_is_used_up_and_no_more() -> None:
    world, one = started()
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
    world.now += 0.25


def test_places_are_lent_as_they_are_wanted() -> None:
    _, one = started()
    two = Process(one.bank, "two")
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


def test_more_than_twice_what_is_needed_is_given_back() -> None:
    world, one = started()
    one.refused(320)
    one.tick()
    one.ask(320)
    one.tick()
    one.end(0)
    assert one.left()["tokens"] == 639
    for _ in range(2 * int(LEASE_IDLE_TIMEOUT) + 2):
        world.now += 0.5
        one.ask(0)
        one.end(0)
        one.tick()
    assert world.bank.spent["web/tokens/"][0] == 0
    assert one.left()["tokens"] == 320


def test_tokens_beyond_a_loan_are_told_and_taken_off_the_next() -> None:
    world, one = started()
    one.ask(10)
    one.end(500)
    assert one.left()["tokens"] == 0
    one.tick()
    assert one.bank.spent["web/tokens/"][0] == 501
    assert one.left()["tokens"] == 640 - 501
    world.now += 16
    one.ask(1)
    one.tick()
    assert one.bank.spent["web/tokens/"][0] == 1


def test_a_budget_is_spent_when_the_lender_has_no_more_of_it() -> None:
    world = World("local")
    [one] = world.processes
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
def test_all_together_never_use_more_than_there_is(
    steps: list[tuple[int, int, int, str]],
) -> None:
    world = World("local", "local")
    began, used, requests, most = world.now, 0, 0, 0
    for n, weight, pause, what in steps:
        process = world.processes[n]
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
                world.now += pause / 8
        most = max(most, sum(len(one.running) for one in world.processes))
        passed = (world.now - began) / 16
        assert requests <= 64 * (1 + passed) + 2 * 16  # as above
        assert most <= 8 + 2  # on credit
    for process in world.processes:
        while process.running:
            process.end(0)
        process.tick()
        process.tick(last=True)
    assert world.bank.spent.get("web/budget/", (0,))[0] == used
    assert not any(n for held in world.bank.held.values() for n, _ in held.values())


# --- while the lender fails -----------------------------------------------------------------------


def test_each_takes_its_part() -> None:
    world, one = started("local")
    world.fail()
    for _ in range(4):
        one.ask(0)
    assert one.refused(0).message == "at most 8 requests at a time are allowed"
    for _ in range(4):
        one.end(0)
    for _ in range(28):
        one.ask(0)
        one.end(0)
    assert one.refused(0).message == "at most 64 requests in 16 s are allowed"
    world.now += 16
    one.ask(320)
    assert one.refused(1).message.startswith("at most 640 tokens in 16 s")
    one.end(20)
    assert one.left() == {"concurrency": 4, "requests": 31, "tokens": 300, "budget": 31_979}


def test_usage_before_an_outage_counts_in_the_local_part() -> None:
    world = World("local")
    [one] = world.processes
    one.limiter = RateLimiter({"web": KeyRateLimitConfig(requests=(64, 3600))}, one.accounts)
    for _ in range(64):
        one.ask(0)
        one.end(0)
        one.tick()
    world.fail()
    assert one.refused(0).message == "at most 64 requests in 3600 s are allowed"


def test_outages_of_the_store_give_no_fresh_allowance() -> None:
    """The store is told what was used while it failed, once, without what was refilled since."""
    world = World("local")
    [one] = world.processes
    one.limiter = RateLimiter({"web": KeyRateLimitConfig(requests=(64, 3600))}, one.accounts)
    admitted = 0
    for _ in range(5):
        world.fail()
        for _ in range(20):
            with suppress(RateLimitExceeded):
                one.ask(0)
                one.end(0)
                admitted += 1
        world.bank.broken = False
        one.tick()
        for _ in range(20):
            with suppress(RateLimitExceeded):
                one.ask(0)
                one.end(0)
                admitted += 1
            one.tick()
    assert admitted == 64


def test_a_long_outage_leaves_no_debt_beyond_the_local_part() -> None:
    world = World("local")
    [one] = world.processes
    one.limiter = RateLimiter({"web": KeyRateLimitConfig(requests=(64, 64))}, one.accounts)
    one.ask(0)
    one.end(0)
    world.fail()
    for _ in range(300):
        world.now += 1.0
        one.ask(0)
        one.end(0)
        one.tick()
    world.bank.broken = False
    one.tick()
    assert world.bank.spent["web/requests/"][0] <= 2


def test_everything_is_admitted() -> None:
    world, one = started("open")
    world.fail()
    for _ in range(100):
        one.ask(100)
    for _ in range(100):
        one.end(100)
    world.bank.broken = False
    one.tick()
    assert world.bank.spent["web/budget/"][0] == 10_001
    assert world.bank.spent["web/tokens/"][0] == 0


def test_nothing_is_admitted() -> None:
    world, one = started("closed")
    world.fail()
    error = one.refused()
    assert isinstance(error, Overloaded)
    assert error.message == "rate limits can't be checked now, since their shared store is down"
    world.bank.broken = False
    one.tick()
    one.ask()


def test_nothing_of_a_day_is_admitted_while_its_limit_cannot_be_checked() -> None:
    world = World("closed")
    [one] = world.processes
    one.limiter = RateLimiter({"web": KeyRateLimitConfig(budget=100)}, one.accounts)
    one.ask()
    world.fail()
    assert isinstance(one.refused(), Overloaded)


@pytest.mark.parametrize("policy", ["local", "open"])
def test_what_began_before_and_after_a_failure_is_settled_where_it_was_taken(
    policy: StoreFailurePolicy,
) -> None:
    world, one = started(policy)
    one.ask(100)
    world.fail()
    one.tick()
    world.now += 0.25
    one.ask(50)
    one.end(30)
    world.bank.broken = False
    world.now += 0.25
    one.tick()
    assert world.bank.spent["web/tokens/"][0] == (30 + 46 if policy == "local" else 30)
    assert world.bank.spent["web/budget/"][0] == 30 + 50 + 1
    level = one.left()["tokens"]
    world.now += 0.25
    one.end(10)
    assert one.left()["tokens"] == level
    one.tick(last=True)
    assert world.bank.spent["web/budget/"][0] == 30 + 10 + 1
    assert not any(n for held in world.bank.held.values() for n, _ in held.values())


# --- who asks -------------------------------------------------------------------------------------


async def test_the_lender_is_asked_again_and_again_and_told_at_the_end() -> None:
    world = World("local")
    [one] = world.processes
    one.leasing.start()
    one.ask(7)
    async with asyncio.timeout(5):
        while not world.bank.wishes:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
        one.bell.clear()
        first = len(world.bank.wishes)
        world.now += LASTS
        while len(world.bank.wishes) == first:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    one.end(5)
    await one.leasing.aclose()
    assert world.bank.spent["web/budget/"][0] == 5
    assert not any(n for held in world.bank.held.values() for n, _ in held.values())


def test_more_is_asked_for_holders_of_tokens_by_the_limiter_that_they_have() -> None:
    world = World("local")
    [one] = world.processes
    former, one.limiter = (
        one.limiter,
        RateLimiter({}, one.accounts, KeyRateLimitConfig(*astuple(RATES))),
    )
    Entry(key="jwt:a").reserve(one.limiter, "chat", b"", target=CHAT)
    one.tick()
    assert {wish.name.partition("/")[0] for wish in world.bank.wishes} == {"jwt:a"}
    world.now += LASTS
    one.limiter = former
    world.bank.wishes.clear()
    one.tick()
    assert not world.bank.wishes


async def test_what_was_never_started_asks_for_nothing() -> None:
    world = World("local")
    await world.processes[0].leasing.aclose()
    assert not world.bank.wishes
