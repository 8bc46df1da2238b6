"""Whether another worker may be asked."""

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


def retry(budget: RetryBudget | None = None, **settings: object) -> RetryState:
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
def test_the_reason_to_ask_another(
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
def test_how_often_another_is_asked(
    most: int, errors: list[GatewayError], answers: list[bool]
) -> None:
    one = retry(max=most)

    assert [one.allows_retry(error, 0.0, accepted=False) for error in errors] == answers


def test_what_is_not_named_is_final() -> None:
    one = retry(on=frozenset({"500"}))

    assert not one.allows_retry(DOWN, 0.0, accepted=False)
    assert not one.allows_retry(BUSY, 0.0, accepted=False)
    assert one.allows_retry(WorkerFailed("x", status=500), 0.0, accepted=False)


def test_all_requests_share_a_budget() -> None:
    budget = RetryBudget(share=0.2, min_retries=3)
    for _ in range(10):
        budget.record_request(0.0)

    spent = [retry(budget).allows_retry(error, 0.0, accepted=False) for error in [BUSY, CUT] * 5]

    assert sum(spent) == 5
    assert retry(budget).allows_retry(DOWN, 0.0, accepted=False), (
        "what was never sent costs nothing"
    )


def failed(one: RetryState, *errors: GatewayError) -> RetryState:
    for key, error in enumerate(errors):
        one.record_failure(key, error)
    return one


def test_who_was_tried_is_remembered() -> None:
    assert failed(retry(), DOWN, BUSY).tried == {0, 1}


def test_when_all_have_too_much_to_do_the_shortest_wait_is_told() -> None:
    last = RateLimitExceeded("x", retry_after=9.0)
    one = failed(retry(), RateLimitExceeded("x"), BUSY, last)

    assert one.get_final_error(last, has_untried=False) is last
    assert last.retry_after == 7.0


def test_that_one_of_several_has_too_much_to_do_is_not_the_clients_fault() -> None:
    one = failed(retry(), BUSY)

    told = one.get_final_error(BUSY, has_untried=True)

    assert type(told) is Overloaded
    assert told.retry_after == 7.0


def test_where_nobody_else_is_to_be_asked_a_worker_speaks_for_all() -> None:
    one = failed(retry(on=frozenset({"connect"})), BUSY)

    assert one.get_final_error(BUSY, has_untried=True) is BUSY


def test_a_worker_that_said_when_to_come_again_is_heard_over_one_that_is_not_there() -> None:
    told = failed(retry(), BUSY, DOWN).get_final_error(DOWN, has_untried=False)

    assert type(told) is Overloaded
    assert told.retry_after == 7.0


@pytest.mark.parametrize("error", [CUT, LATE, BAD_GATEWAY])
def test_anything_else_is_told_as_it_is(error: GatewayError) -> None:
    assert failed(retry(), error).get_final_error(error, has_untried=False) is error
