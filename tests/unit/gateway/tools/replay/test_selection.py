"""Which recorded requests a replay sends, and their expected cost."""

from collections import Counter
from typing import Any

import pytest

from gateway.observability.recording import RecordedRequest, RecordedUsage
from gateway.tools.replay.selection import (
    Prices,
    ReplayBudget,
    Selection,
    apply_budget,
    select_requests,
)


def record(number: int, **fields: Any) -> RecordedRequest:
    values: dict[str, Any] = {
        "id": f"r{number}",
        "at": float(number),
        "model": "chat",
        "operation": "chat",
        "request": {"model": "chat"},
        "usage": RecordedUsage(100, 10, "worker"),
    }
    return RecordedRequest(**(values | fields))


def ids(selection: Selection) -> list[str]:
    return [recorded.id for recorded in selection.requests]


def test_requests_are_sent_in_the_order_in_which_they_came() -> None:
    assert ids(select_requests([record(2), record(3), record(1)])) == ["r1", "r2", "r3"]


def test_requests_without_body_or_with_a_known_id_are_counted_and_left_out() -> None:
    recording = [
        record(1, request=None),
        record(2, request=None, request_text="not JSON"),
        record(3, redacted=["request.messages[0]"]),
        record(4, id="r3"),
        record(5),
    ]
    selection = select_requests(recording, done={"r5"})
    assert ids(selection) == ["r2", "r3"]

    counts = (selection.total, selection.without_body, selection.with_same_id)
    assert counts == (5, 1, 1)
    assert (selection.already_done, selection.with_redacted_text) == (1, 1)


def test_limit_takes_the_first_requests_by_default() -> None:
    assert ids(select_requests(map(record, range(9)), limit=3)) == ["r0", "r1", "r2"]


def test_random_sample_is_repeatable_and_in_order() -> None:
    samples = [
        ids(select_requests(map(record, range(99)), limit=9, sampling="random", seed=seed))
        for seed in (1, 1, 2)
    ]
    assert samples[0] == samples[1] != samples[2]

    numbers = [int(one[1:]) for one in samples[0]]
    assert numbers == sorted(numbers)
    assert len(numbers) == 9


def test_stratified_sample_has_each_stratum_by_its_share_and_at_least_once() -> None:
    recording = [
        record(number, protocol=protocol)
        for number, protocol in enumerate(["openai"] * 700 + ["triton"] * 290 + ["mindie"] * 10)
    ]
    for seed in range(5):
        selection = select_requests(recording, limit=30, sampling="stratified", seed=seed)
        count = Counter(recorded.protocol for recorded in selection.requests)
        assert count["mindie"] == 1
        assert count["triton"] in (8, 9)
        assert count.total() == 30


def test_stratified_sample_that_is_smaller_than_the_strata_has_different_ones() -> None:
    recording = [record(number, protocol=f"p{number % 8}") for number in range(80)]
    selection = select_requests(recording, limit=5, sampling="stratified")
    assert len({recorded.protocol for recorded in selection.requests}) == 5


def test_estimate_is_the_recorded_duration_and_usage() -> None:
    unknown = record(2, usage=None, request_size=400)
    embedding = record(3, usage=None, request_size=40, operation="embedding")
    selection = select_requests([record(1), unknown, embedding])

    estimate = apply_budget(selection, ReplayBudget(prices=Prices(1.0, 10.0)))

    assert (estimate.prompt_tokens, estimate.completion_tokens) == (210, 266)
    assert estimate.cost == pytest.approx((210 + 2660) / 1e6)
    assert selection.over_budget == 0


@pytest.mark.parametrize(
    "budget", [ReplayBudget(tokens=250), ReplayBudget(cost=0.00021, prices=Prices(1.0, 0.0))]
)
def test_requests_beyond_the_budget_are_left_out(budget: ReplayBudget) -> None:
    selection = select_requests(map(record, range(5)))
    estimate = apply_budget(selection, budget)

    assert ids(selection) == ["r0", "r1"]
    assert (estimate.tokens, selection.over_budget) == (220, 3)


def test_cost_is_unknown_without_prices() -> None:
    assert apply_budget(select_requests([record(1)]), ReplayBudget()).cost is None
