"""How many requests may be tried again."""

from hypothesis import given
from hypothesis import strategies as st

from backends.pool.retry import RetryBudget


def spent(budget: RetryBudget, now: float) -> int:
    """How many tries the budget has for one moment, all of which are used up."""
    tries = 0
    while budget.allows_retry(now):
        budget.record_retry(now)
        tries += 1
    return tries


def test_a_few_tries_need_no_requests() -> None:
    assert spent(RetryBudget(min_retries=3), 0.0) == 3
    assert spent(RetryBudget(min_retries=0), 0.0) == 0


def test_beside_them_it_is_a_share_of_the_requests() -> None:
    budget = RetryBudget(share=0.2, min_retries=3)
    for _ in range(50):
        budget.record_request(1.0)

    assert spent(budget, 1.0) == 13


def test_a_share_below_one_request_is_none() -> None:
    budget = RetryBudget(share=0.2, min_retries=0)
    for _ in range(4):
        budget.record_request(0.0)

    assert not budget.allows_retry(0.0)
    budget.record_request(0.0)
    assert spent(budget, 0.0) == 1


def test_what_is_used_up_comes_back_after_the_window() -> None:
    budget = RetryBudget(window=10.0)
    spent(budget, 0.0)

    assert not budget.allows_retry(8.9)
    assert spent(budget, 10.0) == 3


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=80))
def test_nothing_is_tried_again_past_the_share(steps: list[tuple[float, bool]]) -> None:
    budget, now, asked, retried = RetryBudget(), 0.0, list[float](), list[float]()
    for pause, fails in steps:
        now += pause
        budget.record_request(now)
        asked.append(now)
        if fails and budget.allows_retry(now):
            budget.record_retry(now)
            retried.append(now)
            tries = sum(one > now - 8.9 for one in retried)
            assert tries <= 3 + 0.2 * sum(one > now - 10.1 for one in asked)
