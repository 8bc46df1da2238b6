"""Whether a failed request may be retried on another worker."""

import pytest

from backends.pool.retry import RetryBudget, RetryState, classify_error
from backends.pool.settings import RetryReason, RetrySettings
from protocols.core.errors import (
    DeadlineExceeded,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    UnsupportedFeature,
    WorkerFailed,
    WorkerUnreachable,
)

DOWN = WorkerUnreachable("x")
CUT = StreamBroken("x")
LATE = DeadlineExceeded("x", which="first_token")
BUSY = RateLimitExceeded("x", retry_after=7.0)
OVERLOADED = Overloaded("x", retry_after=3.0)
BAD_GATEWAY = WorkerFailed("x", status=502)


def make_retry(budget: RetryBudget | None = None, **settings: object) -> RetryState:
    return RetryState(RetrySettings(**settings), budget or RetryBudget(min_retries=100))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "accepted", "reason"),
    [
        (DOWN, False, "connect"),
        (BUSY, False, "429"),
        (BUSY, True, "429"),
        (OVERLOADED, False, "503"),
        (WorkerFailed("x", status=500), False, "500"),
        (BAD_GATEWAY, False, "502"),
        (WorkerFailed("x", status=503), False, "503"),
        (WorkerFailed("x", status=504), False, "504"),
        (WorkerFailed("x", status=501), False, None),
        (WorkerFailed("x", status=404), False, None),
        (WorkerFailed("not HTTP"), False, None),
        (WorkerFailed("an error as its first event", status=500), True, "before_first_token"),
        (WorkerFailed("not JSON"), True, "before_first_token"),
        (CUT, False, "before_first_token"),
        (CUT, True, "before_first_token"),
        (LATE, False, "before_first_token"),
        (DeadlineExceeded("x", which="idle"), True, None),
        (DeadlineExceeded("x"), False, None),
        (UnsupportedFeature("x"), False, None),
        (UnsupportedFeature("x"), True, None),
    ],
)
def test_error_is_classified_by_retry_reason(
    error: GatewayError, *, accepted: bool, reason: RetryReason | None
) -> None:
    assert classify_error(error, accepted=accepted) == reason


@pytest.mark.parametrize(
    ("most", "errors", "answers"),
    [
        (1, [DOWN] * 3, [True, True, True]),
        (1, [CUT, CUT], [True, False]),
        (1, [LATE, CUT], [True, False]),
        (1, [CUT, DOWN, CUT], [True, True, False]),
        (1, [OVERLOADED, OVERLOADED], [True, False]),
        (2, [BAD_GATEWAY, OVERLOADED, BAD_GATEWAY], [True, True, False]),
        (0, [BAD_GATEWAY], [False]),
        (0, [DOWN], [True]),
        (9, [CUT, CUT], [True, False]),
        (9, [BAD_GATEWAY, LATE, BAD_GATEWAY, CUT], [True, True, True, False]),
        (1, [BUSY] * 5, [True] * 5),
        (1, [BAD_GATEWAY, BUSY, BAD_GATEWAY], [True, True, False]),
    ],
)
def test_number_of_retries_is_limited_by_error_kind(
    most: int, errors: list[GatewayError], answers: list[bool]
) -> None:
    one = make_retry(max=most)

    assert [one.allows_retry(error, 0.0, accepted=False) for error in errors] == answers


def test_error_not_in_the_retry_list_is_not_retried() -> None:
    one = make_retry(on=frozenset({"500"}))

    assert not one.allows_retry(DOWN, 0.0, accepted=False)
    assert not one.allows_retry(BUSY, 0.0, accepted=False)
    assert one.allows_retry(WorkerFailed("x", status=500), 0.0, accepted=False)


def test_retry_budget_is_shared_by_all_requests() -> None:
    budget = RetryBudget(share=0.2, min_retries=3)
    for _ in range(10):
        budget.record_request(0.0)

    spent = [
        make_retry(budget).allows_retry(error, 0.0, accepted=False) for error in [BUSY, CUT] * 5
    ]

    assert sum(spent) == 5
    assert make_retry(budget).allows_retry(DOWN, 0.0, accepted=False), (
        "what was never sent costs nothing"
    )


def record_errors(one: RetryState, *errors: GatewayError) -> RetryState:
    for key, error in enumerate(errors):
        one.record_failure(key, error)
    return one


def test_tried_workers_are_recorded() -> None:
    assert record_errors(make_retry(), DOWN, BUSY).tried == {0, 1}


def test_final_rate_limit_error_has_the_shortest_retry_after() -> None:
    last = RateLimitExceeded("x", retry_after=9.0)
    one = record_errors(make_retry(), RateLimitExceeded("x"), BUSY, last)

    assert one.get_final_error(last, has_untried=False) is last
    assert last.retry_after == 7.0


def test_rate_limit_of_one_worker_becomes_overloaded() -> None:
    one = record_errors(make_retry(), BUSY)

    error = one.get_final_error(BUSY, has_untried=True)

    assert type(error) is Overloaded
    assert error.retry_after == 7.0


def test_rate_limit_error_is_final_if_429_is_not_retried() -> None:
    one = record_errors(make_retry(on=frozenset({"connect"})), BUSY)

    assert one.get_final_error(BUSY, has_untried=True) is BUSY


def test_final_error_keeps_retry_after_over_an_unreachable_worker() -> None:
    error = record_errors(make_retry(), BUSY, DOWN).get_final_error(DOWN, has_untried=False)

    assert type(error) is Overloaded
    assert error.retry_after == 7.0


@pytest.mark.parametrize("error", [CUT, LATE, BAD_GATEWAY])
def test_other_final_errors_are_returned_unchanged(error: GatewayError) -> None:
    assert record_errors(make_retry(), error).get_final_error(error, has_untried=False) is error
