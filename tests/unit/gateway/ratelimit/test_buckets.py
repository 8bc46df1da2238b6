"""Single limits: what they admit, how they refill, and that nothing leaks."""

from fractions import Fraction
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ratelimit.buckets import (
    SECONDS_PER_DAY,
    BucketState,
    ConcurrencyLimit,
    DailyBudget,
    TokenBucket,
)
from protocols.core.interfaces import RateLimitStatus

AMOUNT: Final = 64
PERIOD: Final = 16.0
MIDNIGHT: Final = 20_000 * SECONDS_PER_DAY


def make_bucket(spent: BucketState | None = None, *, by_token: bool = True) -> TokenBucket:
    return TokenBucket(AMOUNT, PERIOD, spent or BucketState(), by_token=by_token)


class ExactBucket:
    """The reference: a bucket with exact fractions."""

    def __init__(self) -> None:
        self.left = Fraction(AMOUNT)
        self.at = Fraction(0)

    def fill(self, now: Fraction) -> None:
        self.left = min(self.left + (now - self.at) * AMOUNT / Fraction(PERIOD), Fraction(AMOUNT))
        self.at = now

    def take(self, weight: int, now: Fraction) -> bool:
        self.fill(now)
        if weight > self.left:
            return False
        self.left -= weight
        return True

    def give(self, amount: int, now: Fraction) -> None:
        self.fill(now)
        self.left = min(self.left + amount, Fraction(AMOUNT))


STEPS = st.lists(
    st.tuples(
        st.integers(0, 40).map(lambda eighths: Fraction(eighths, 8)),
        st.integers(1, AMOUNT),
        st.one_of(st.none(), st.integers(0, 2 * AMOUNT)),
    ),
    max_size=60,
)
"""A pause, a weight, and the tokens that a request uses; None ends the oldest one unused."""


@settings(max_examples=300)
@given(STEPS)
def test_token_bucket_matches_a_bucket_of_exact_numbers(
    steps: list[tuple[Fraction, int, int | None]],
) -> None:
    counter, oracle, now = make_bucket(), ExactBucket(), Fraction(0)
    running: list[tuple[int, int]] = []
    for pause, weight, used in steps:
        now += pause
        wait = counter.reserve(weight, float(now))
        assert (wait == 0) == oracle.take(weight, now)
        if wait:
            assert wait == (weight - oracle.left) * Fraction(PERIOD) / AMOUNT
        else:
            running.append((weight, used or 0))
        if used is None and running:
            taken, spends = running.pop(0)
            counter.settle(taken, spends, 0.0, float(now))
            oracle.give(taken - spends, now)
        assert counter.get_status(float(now)).remaining == max(int(oracle.left), 0)


@settings(max_examples=300)
@given(STEPS)
def test_used_tokens_never_exceed_capacity_plus_refill(
    steps: list[tuple[Fraction, int, int | None]],
) -> None:
    counter, now, total = make_bucket(), 0.0, 0
    for pause, weight, used in steps:
        now += float(pause)
        if not counter.reserve(weight, now):
            spends = min(used or 0, weight)
            counter.settle(weight, spends, now, now)
            total += spends
        assert total <= AMOUNT + now * AMOUNT / PERIOD

    assert counter.get_status(now + PERIOD) == RateLimitStatus(AMOUNT, AMOUNT, 0.0)


def test_tokens_used_beyond_the_reservation_are_owed() -> None:
    counter = make_bucket()
    assert counter.reserve(10, 0.0) == 0

    counter.settle(10, 3 * AMOUNT, 0.0, 0.0)
    assert counter.get_status(0.0) == RateLimitStatus(AMOUNT, 0, 3 * PERIOD)
    assert counter.reserve(1, 0.0) == 2 * PERIOD + PERIOD / AMOUNT
    assert counter.reserve(AMOUNT, 3 * PERIOD) == 0


def test_request_bucket_counts_one_per_request_without_refund() -> None:
    spent = BucketState()
    counter = make_bucket(spent, by_token=False)
    waits = [counter.reserve(1000, 0.0) for _ in range(AMOUNT + 1)]

    assert waits == [0.0] * AMOUNT + [PERIOD / AMOUNT]

    counter.settle(1000, 5, 0.0, 0.0)
    assert counter.reserve(1000, 0.0) > 0

    counter.cancel_reservation(1000, 0.0, 0.0)
    assert counter.reserve(1000, 0.0) == 0
    assert counter.description == "64 requests in 16 s"


def test_used_amount_is_kept_when_the_limit_changes() -> None:
    spent = BucketState()
    assert make_bucket(spent).reserve(AMOUNT, 0.0) == 0

    wider = TokenBucket(2 * AMOUNT, PERIOD, spent, by_token=True)
    assert wider.reserve(AMOUNT + 1, 0.0) > 0
    assert wider.reserve(AMOUNT, 0.0) == 0
    assert make_bucket(spent).get_status(0.0).remaining == 0


# --- daily budgets --------------------------------------------------------------------------------


class FakeClock:
    """The monotonic and the wall clock."""

    def __init__(self, unix: float) -> None:
        self.unix = unix
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.unix += seconds
        self.now += seconds


def test_daily_token_budget_resets_at_midnight() -> None:
    clock = FakeClock(MIDNIGHT + SECONDS_PER_DAY - 10)
    day = DailyBudget(100, BucketState(), lambda: clock.unix)
    assert day.reserve(60, clock.now) == 0
    assert day.reserve(60, clock.now) == 10

    day.settle(60, 40, clock.now, clock.now)
    assert (day.spent_today, day.get_status(clock.now)) == (40, RateLimitStatus(100, 60, 10))

    clock.wait(10)
    assert day.spent_today == 0
    assert day.reserve(100, clock.now) == 0
    assert day.reserve(1, clock.now) == SECONDS_PER_DAY
    assert day.description == "100 tokens a day"


def test_tokens_are_charged_to_the_day_of_the_request_start() -> None:
    clock = FakeClock(MIDNIGHT - 10)
    day = DailyBudget(100, BucketState(), lambda: clock.unix)
    began = clock.now

    assert day.reserve(60, began) == 0

    clock.wait(20)
    assert day.reserve(50, clock.now) == 0

    day.settle(60, 10, began, clock.now)
    assert day.spent_today == 50

    day.cancel_reservation(50, clock.now, clock.now)
    assert day.spent_today == 0


def test_clock_jump_forward_does_not_exceed_the_daily_budget() -> None:
    clock = FakeClock(MIDNIGHT + 100)
    day = DailyBudget(100, BucketState(), lambda: clock.unix)
    assert day.reserve(60, clock.now) == 0

    clock.unix += 3 * SECONDS_PER_DAY
    day.settle(60, 10, clock.now, clock.now)
    assert day.spent_today == 0
    assert day.reserve(101, clock.now) > 0


def test_daily_budget_can_be_overdrawn_by_unreserved_tokens() -> None:
    day = DailyBudget(100, BucketState(), lambda: MIDNIGHT)
    assert day.reserve(100, 0.0) == 0

    day.settle(100, 300, 0.0, 0.0)
    assert day.spent_today == 300
    assert day.get_status(0.0).remaining == 0


# --- concurrency ----------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.lists(st.booleans(), max_size=60))
def test_concurrency_limit_is_exact(steps: list[bool]) -> None:
    slots, running = ConcurrencyLimit(3, BucketState()), 0
    for comes in steps:
        if comes:
            admitted = slots.reserve(5, 0.0) == 0
            assert admitted == (running < 3)
            running += admitted
        elif running:
            slots.settle(5, 7, 0.0, 0.0)
            running -= 1
        assert slots.get_status(0.0) == RateLimitStatus(3, 3 - running, 0.0)


def test_cancelled_reservation_releases_its_slot() -> None:
    slots = ConcurrencyLimit(1, BucketState(), of=" of the model 'm'")
    assert slots.reserve(1, 0.0) == 0
    assert slots.reserve(1, 0.0) == 1

    slots.cancel_reservation(1, 0.0, 0.0)
    assert slots.reserve(1, 0.0) == 0
    assert slots.description == "1 request at a time of the model 'm'"
