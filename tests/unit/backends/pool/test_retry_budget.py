"""The retry budget limits how many requests may be retried."""

from hypothesis import given
from hypothesis import strategies as st

from backends.pool.retry import RetryBudget


def spend_retries(budget: RetryBudget, now: float) -> int:
    """Use up the budget at one moment, and return the number of retries."""
    tries = 0
    while budget.allows_retry(now):
        budget.record_retry(now)
        tries += 1
    return tries


def test_minimum_retries_are_allowed_without_requests() -> None:
    assert spend_retries(RetryBudget(min_retries=3), 0.0) == 3
    assert spend_retries(RetryBudget(min_retries=0), 0.0) == 0


def test_retries_grow_with_the_number_of_requests() -> None:
    budget = RetryBudget(share=0.2, min_retries=3)
    for _ in range(50):
        budget.record_request(1.0)

    assert spend_retries(budget, 1.0) == 13


def test_share_below_one_request_allows_no_retry() -> None:
    budget = RetryBudget(share=0.2, min_retries=0)
    for _ in range(4):
        budget.record_request(0.0)

    assert not budget.allows_retry(0.0)

    budget.record_request(0.0)
    assert spend_retries(budget, 0.0) == 1


def test_spent_retries_return_after_the_window() -> None:
    budget = RetryBudget(window=10.0)
    spend_retries(budget, 0.0)

    assert not budget.allows_retry(8.9)
    assert spend_retries(budget, 10.0) == 3


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=80))
def test_retries_never_exceed_the_budget(steps: list[tuple[float, bool]]) -> None:
    budget, now, requests, retried = RetryBudget(), 0.0, list[float](), list[float]()
    for pause, fails in steps:
        now += pause
        budget.record_request(now)
        requests.append(now)
        if fails and budget.allows_retry(now):
            budget.record_retry(now)
            retried.append(now)
            tries = sum(one > now - 8.9 for one in retried)
            assert tries <= 3 + 0.2 * sum(one > now - 10.1 for one in requests)
