"""The limiter admits or rejects requests and settles their usage."""

import gc
import itertools
import sys
from contextlib import suppress
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import asdict

from gateway.config.schema import KeyRateLimitConfig, RateLimitConfig
from gateway.observability.metrics.rate_limits import RateLimitCollector
from gateway.ratelimit.counters import CounterRegistry
from gateway.ratelimit.limiter import RateLimiter
from gateway.ratelimit.reservation import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_ESTIMATED_PROMPT,
    Reservation,
    estimate_tokens,
)
from protocols.core.catalog import ModelInfo
from protocols.core.errors import GatewayError, QuotaExceeded, RateLimitExceeded
from protocols.core.events import Usage
from protocols.core.interfaces import ClientAdapter, Headers
from protocols.openai.endpoints import OpenAI
from protocols.triton.endpoints import Triton

CHAT: Final = ModelInfo("chat", ())
OPENAI, TRITON = OpenAI(), Triton()
ALL: Final = RateLimitConfig((3, 60), (1000, 60), 2, 5000)


class LimitedRequest(Struct):
    key: str = "web"
    usage: Usage | None = None
    tokens: int = 0
    outcome: str = "ok"
    reservation: Reservation | None = None

    @property
    def rate_limit_headers(self) -> Headers:
        return () if self.reservation is None else self.reservation.headers

    def reserve(
        self,
        limiter: RateLimiter,
        model: str,
        body: bytes | None,
        adapter: ClientAdapter = TRITON,
        target: ModelInfo = CHAT,
    ) -> None:
        """Reserve like the handler."""
        reservation = self.reservation = limiter.reserve(self.key, model, target, body, adapter)
        if reservation is not None:
            reservation.check()

    def settle(self) -> None:
        """Settle like the handler."""
        if self.reservation is not None:
            self.reservation.settle(self)


class LimiterTestBench:
    """A limiter and its clocks."""

    def __init__(self, wide: RateLimitConfig = ALL, **models: RateLimitConfig) -> None:
        self.now = 100.0
        self.accounts = CounterRegistry(lambda: self.now, lambda: 86400.0 + self.now)
        self.limiter = self.limiting(wide, **models)

    def limiting(self, wide: RateLimitConfig, **models: RateLimitConfig) -> RateLimiter:
        return RateLimiter(
            {"web": KeyRateLimitConfig(**asdict(wide), models=models)}, self.accounts
        )

    def ask(self, weight: int = 0, model: str = "chat", protocol: Any = TRITON) -> LimitedRequest:
        entry = LimitedRequest()
        body = b'{"max_tokens":%d}' % weight  # 4 tokens for a weight of three digits
        entry.reserve(self.limiter, model, body, protocol)
        return entry

    def refused(self, weight: int = 0, model: str = "chat") -> GatewayError:
        with pytest.raises(GatewayError) as excinfo:
            self.ask(weight, model)
        return excinfo.value

    def end(self, entry: LimitedRequest, usage: Usage | None = None, **fields: Any) -> None:
        entry.usage = usage
        for name, value in fields.items():
            setattr(entry, name, value)
        entry.settle()

    def left(self, key: str = "web") -> dict[str, int]:
        """Return what is left of each limit of a key."""
        counters = self.accounts.build_counters(key, "", ALL)
        return {one.scope: one.get_status(self.now).remaining for one in counters}


# --- tokens of a request --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "model", "tokens"),
    [
        (b'{"prompt": "twenty bytes of it"}', CHAT, (8, DEFAULT_COMPLETION_TOKENS)),
        (b'{"max_tokens": 7}', CHAT, (4, 7)),
        (b'{"max_completion_tokens" : 8}', CHAT, (7, 8)),
        (b'{"parameters":{"max_new_tokens":9}}', CHAT, (8, 9)),
        (rb'{"prompt": "\"max_tokens\": 7"}', CHAT, (7, DEFAULT_COMPLETION_TOKENS)),
        (b'{"min_tokens": 7}', ModelInfo("m", (), max_tokens=50), (4, 50)),
        (b"x" * 2_000_000, CHAT, (MAX_ESTIMATED_PROMPT, DEFAULT_COMPLETION_TOKENS)),
        (b"x" * 2000, ModelInfo("m", (), context_length=100), (100, DEFAULT_COMPLETION_TOKENS)),
        (b'{"max_tokens": 7}', ModelInfo("m", (), task="embedding"), (4, 0)),
    ],
)
def test_request_tokens_are_estimated_from_its_body(
    body: bytes, model: ModelInfo, tokens: tuple[int, int]
) -> None:
    assert estimate_tokens(body, model) == tokens


# --- rejections -----------------------------------------------------------------------------------


def test_each_limit_has_its_own_error_message() -> None:
    bench = LimiterTestBench()
    admitted = [bench.ask(), bench.ask()]
    error = bench.refused()

    assert (error.message, error.retry_after) == ("at most 2 requests at a time are allowed", 1.0)
    assert isinstance(error, RateLimitExceeded)
    assert error.scope == "concurrency"

    bench.end(admitted.pop(), outcome="worker_error")
    error = bench.refused(999)
    assert error.message == (
        "at most 1000 tokens in 60 s are allowed, and this request may take 1000"
    )
    assert isinstance(error, RateLimitExceeded)
    assert error.scope == "tokens"

    bench.end(bench.ask(), outcome="worker_error")
    error = bench.refused()
    assert (error.message, error.retry_after) == ("at most 3 requests in 60 s are allowed", 20.0)

    bench.now += 20
    bench.end(bench.ask(), Usage(4000, 900))
    bench.now += 300
    error = bench.refused(200)

    assert isinstance(error, QuotaExceeded)
    assert error.message == (
        "the budget of 5000 tokens a day is spent: 96 are left, and this request may take 204"
    )


def test_rejected_request_consumes_no_limit() -> None:
    bench = LimiterTestBench(
        RateLimitConfig((3, 60), None, 2, 5000), other=RateLimitConfig(tokens=(10, 60))
    )
    bench.end(bench.ask(5, "other"), Usage(5, 5))

    before = bench.left()

    assert bench.refused(5, "other").message == (
        "at most 10 tokens in 60 s of the model 'other' are allowed, and this request may take 9"
    )
    assert bench.left() == before


def test_state_of_a_limiter_and_a_reservation_is_shown() -> None:
    bench = LimiterTestBench(RateLimitConfig(tokens=(10, 60)))

    entry = bench.ask(2)

    assert repr(bench.limiter) == "<RateLimiter 1 keys, 1 of them used>"
    assert repr(entry.reservation) == "<Reservation 6 tokens, 1 choices>"


def test_key_without_limits_is_never_rejected() -> None:
    bench = LimiterTestBench(RateLimitConfig())
    entry = LimitedRequest(key="free")
    entry.reserve(bench.limiter, "chat", b"")

    entry.settle()

    assert (entry.reservation, entry.rate_limit_headers) == (None, ())

    bench.end(bench.ask(10**9))


def test_request_larger_than_a_limit_may_use_the_full_limit() -> None:
    bench = LimiterTestBench(RateLimitConfig(tokens=(1000, 60), budget=5000))
    bench.end(bench.ask(4000), Usage(2000, 0))

    assert bench.left()["tokens"] == 0
    assert bench.left()["budget"] == 3000


def test_model_limits_apply_in_addition_to_key_limits() -> None:
    bench = LimiterTestBench(RateLimitConfig((3, 60)), other=RateLimitConfig((1, 60)))
    bench.end(bench.ask(model="other"))
    assert bench.refused(model="other").message == (
        "at most 1 request in 60 s of the model 'other' are allowed"
    )

    bench.end(bench.ask())
    bench.end(bench.ask())
    assert bench.refused().retry_after == 20


def test_request_without_a_body_reserves_no_tokens() -> None:
    bench = LimiterTestBench()
    entry = LimitedRequest()

    entry.reserve(bench.limiter, "chat", None)

    assert bench.left() == {"concurrency": 1, "requests": 2, "tokens": 1000, "budget": 5000}


def test_each_jwt_principal_has_the_default_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ratelimit.limiter.MAX_JWT_PRINCIPALS", 2)
    bench = LimiterTestBench()
    common = KeyRateLimitConfig((1, 60))

    def asks(who: str) -> bool:
        try:
            LimitedRequest(key=who).reserve(limiter, "chat", b"")
        except RateLimitExceeded:
            return False
        return True

    limiter = RateLimiter({}, bench.accounts, common)
    assert [asks(who) for who in ("jwt:a", "jwt:b", "jwt:a", "jwt:b")] == [True, True, False, False]

    limiter = RateLimiter({}, bench.accounts, common)
    assert not asks("jwt:a")
    assert asks("jwt:c")
    assert not asks("jwt:a")
    assert asks("jwt:b")
    assert limiter.daily_budgets == {}


# --- settling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "used"),
    [
        ({"usage": Usage(30, 20)}, 50),
        ({"usage": Usage(30, 20), "outcome": "truncated", "tokens": 25}, 55),
        ({"outcome": "cancelled", "tokens": 11}, 4 + 11),
        ({"outcome": "truncated", "tokens": 12}, 4 + 12),
        ({"outcome": "ok"}, 4),
        ({"outcome": "worker_error"}, 0),
        ({"outcome": "client_error"}, 0),
        ({"outcome": "gateway_error"}, 0),
    ],
)
def test_unused_tokens_are_refunded(usage: dict[str, Any], used: int) -> None:
    bench = LimiterTestBench()
    entry = bench.ask(100)
    assert bench.left() == {"concurrency": 1, "requests": 2, "tokens": 896, "budget": 4896}

    bench.end(entry, **usage)
    left = {"concurrency": 2, "requests": 2, "tokens": 1000 - used, "budget": 5000 - used}
    assert bench.left() == left


WIDE: Final = RateLimitConfig((50, 8), (4096, 8), 5, 100_000)
NARROW: Final = RateLimitConfig(None, (512, 8), 2)
STEPS: Final = st.lists(
    st.tuples(
        st.sampled_from(["chat", "other", "", ""]),
        st.integers(0, 5000),
        st.integers(0, 8),
        st.booleans(),
    ),
    max_size=40,
)
"""Each step admits a request for a model or ends one; then time passes."""


@settings(max_examples=300)
@given(STEPS)
def test_random_requests_leak_no_reservation(steps: list[tuple[str, int, int, bool]]) -> None:
    bench = LimiterTestBench(WIDE, other=NARROW)
    running: list[LimitedRequest] = []
    used = 0
    for model, number, pause, first in steps:
        if model:
            with suppress(GatewayError):
                running.append(bench.ask(number, model))
        elif running:
            used += number
            bench.end(running.pop(0 if first else -1), Usage(number, 0))
        bench.now += pause / 8
        assert len(running) <= 5
    for entry in running:
        bench.end(entry, outcome="worker_error")
    bench.now += 8 + used / 512 * 8
    counters = [
        *bench.accounts.build_counters("web", "", WIDE),
        *bench.accounts.build_counters("web", "other", NARROW),
    ]

    left = [one.get_status(bench.now).remaining for one in counters]

    assert left == [5, 50, 4096, max(100_000 - used, 0), 2, 512]


# --- reloads --------------------------------------------------------------------------------------


def test_used_amounts_are_kept_across_reloads() -> None:
    bench = LimiterTestBench()
    entry = bench.ask(100)
    bench.limiter = bench.limiting(RateLimitConfig((9, 60), (2000, 60), 1, 10_000))

    assert bench.refused().message == "at most 1 request at a time are allowed"

    bench.end(entry, Usage(300, 0))
    left = {"concurrency": 2, "requests": 2, "tokens": 700, "budget": 4700}
    assert bench.left() == left


def test_counters_of_removed_limits_are_dropped() -> None:
    bench = LimiterTestBench()
    bench.end(bench.ask(100), Usage(300, 0))
    bench.limiter = bench.limiting(RateLimitConfig((3, 60)))
    left = {"concurrency": 2, "requests": 2, "tokens": 1000, "budget": 5000}

    assert bench.left() == left


# --- headers --------------------------------------------------------------------------------------


def test_rate_limit_headers_show_the_tightest_limit() -> None:
    bench = LimiterTestBench(RateLimitConfig((3, 60), (1000, 60)), other=RateLimitConfig((2, 1)))
    headers = dict(bench.ask(100, "other", OPENAI).rate_limit_headers)
    assert headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "500ms",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "896",
        "x-ratelimit-reset-tokens": "7s",
    }
    assert bench.ask().rate_limit_headers == ()

    bench = LimiterTestBench(RateLimitConfig((2, 60)), other=RateLimitConfig((3, 1)))
    assert (
        dict(bench.ask(100, "other", OPENAI).rate_limit_headers)["x-ratelimit-limit-requests"]
        == "2"
    )


def test_rejected_response_has_rate_limit_headers() -> None:
    bench = LimiterTestBench(RateLimitConfig((1, 60)))
    bench.ask()
    entry = LimitedRequest()

    with pytest.raises(RateLimitExceeded):
        entry.reserve(bench.limiter, "chat", b"", OPENAI)
    assert dict(entry.rate_limit_headers)["x-ratelimit-remaining-requests"] == "0"

    left = bench.left()
    entry.settle()
    assert bench.left() == left


def test_rate_limit_decisions_and_budgets_are_exported() -> None:
    bench = LimiterTestBench(
        RateLimitConfig((2, 60), None, 9, 5000), other=RateLimitConfig(budget=100)
    )
    bench.end(bench.ask(100), Usage(30, 0))
    bench.ask(20, "other")
    bench.refused()

    metrics = itertools.chain.from_iterable(
        one.samples for one in RateLimitCollector(lambda: bench.limiter).collect()
    )

    assert {(one.name, *one.labels.values()): one.value for one in metrics} == {
        ("interlingua_ratelimit_decisions_total", "concurrency", "admitted"): 2,
        ("interlingua_ratelimit_decisions_total", "requests", "admitted"): 2,
        ("interlingua_ratelimit_decisions_total", "budget", "admitted"): 2,
        ("interlingua_ratelimit_decisions_total", "requests", "refused"): 1,
        ("interlingua_budget_tokens", "web", ""): 5000,
        ("interlingua_budget_tokens", "web", "other"): 100,
        ("interlingua_budget_spent_tokens", "web", ""): 54,
        ("interlingua_budget_spent_tokens", "web", "other"): 24,
    }
    assert not [
        *itertools.chain(*(one.samples for one in RateLimitCollector(lambda: None).collect()))
    ]


# --- number of calls ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "calls"),
    [(RateLimitConfig((3, 60)), 14), (RateLimitConfig((3, 60), (10**6, 60)), 22), (ALL, 34)],
)
def test_rate_limiting_uses_a_bounded_number_of_calls(rates: RateLimitConfig, calls: int) -> None:
    """OpenAI's headers have a bound of their own."""
    bench = LimiterTestBench(rates)
    bench.end(bench.ask())
    entry, body, call_count = LimitedRequest(usage=Usage(1, 2)), b'{"max_tokens":5}', 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal call_count
        call_count += event in ("call", "c_call")

    gc.disable()  # what it would finalize of other tests makes calls, too
    sys.setprofile(count)
    try:
        reservation = bench.limiter.reserve("web", "chat", CHAT, body, TRITON)
        assert reservation is not None
        reservation.check()
        reservation.settle(entry)
    finally:
        sys.setprofile(None)
        gc.enable()

    assert call_count - 1 <= calls  # without the call that ends the counting
