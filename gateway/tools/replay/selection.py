"""Which requests of a recording are sent again, in which order, and what they may cost."""

import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal

from msgspec import Struct

from gateway.observability.recording import RecordedRequest

Sampling = Literal["first", "random", "stratified"]

_BYTES_PER_TOKEN: Final = 4
"""For requests whose tokens nobody counted."""
_UNKNOWN_COMPLETION: Final = 256
"""Completion tokens of a request whose usage is unknown."""
_PER_MILLION: Final = 1e6


class Selection(Struct):
    """The requests to send, and how many were left out and why."""

    requests: Sequence[RecordedRequest] = ()
    total: int = 0
    """The requests of the recording."""
    without_body: int = 0
    """Recorded with ``bodies: none``, or too large to be recorded."""
    with_redacted_text: int = 0
    """Those to send in which redaction replaced something."""
    with_same_id: int = 0
    """Requests with the id of an earlier one: results are found by their id."""
    already_done: int = 0
    """Sent by an earlier run with the same output folder."""
    over_budget: int = 0
    """Left out since the estimate would exceed the limit."""


class Prices(Struct, frozen=True):
    """Prices of a million tokens, in any currency."""

    prompt: float
    completion: float

    def compute(self, prompt_tokens: int, completion_tokens: int) -> float:
        """The price of a request."""
        total = prompt_tokens * self.prompt + completion_tokens * self.completion
        return total / _PER_MILLION


class ReplayBudget(Struct, frozen=True):
    """The most that a replay may take, by its estimate; None: no limit."""

    tokens: int | None = None
    cost: float | None = None
    prices: Prices | None = None


class Estimate(Struct):
    """What the requests took when they were recorded, which is what they are expected to take."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    """None without prices."""

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.prompt_tokens + self.completion_tokens


def select_requests(
    recording: Iterable[RecordedRequest],
    *,
    limit: int | None = None,
    sampling: Sampling = "first",
    seed: int = 0,
    done: Collection[str] = (),
) -> Selection:
    """The requests to send, in the order in which they came.

    ``done`` are the ids of those that were sent already. ``seed`` makes a sample repeatable.
    """
    selection = Selection()
    seen = set[str]()
    candidates = list[RecordedRequest]()
    for recorded in recording:
        selection.total += 1
        if recorded.request is None and not recorded.request_text:
            selection.without_body += 1
        elif recorded.id in seen:
            selection.with_same_id += 1
        else:
            seen.add(recorded.id)
            candidates.append(recorded)
    candidates.sort(key=lambda recorded: recorded.at)
    if limit is not None and limit < len(candidates):
        rng = random.Random(seed)  # noqa: S311 - a sample
        candidates = _sample(candidates, limit, sampling, rng)
    requests = [recorded for recorded in candidates if recorded.id not in done]
    selection.already_done = len(candidates) - len(requests)
    selection.requests = requests
    selection.with_redacted_text = sum(bool(recorded.redacted) for recorded in requests)
    return selection


def _sample(
    requests: Sequence[RecordedRequest], limit: int, sampling: Sampling, rng: random.Random
) -> list[RecordedRequest]:
    """``limit`` of the requests, in their order."""
    if sampling == "first":
        return [*requests[:limit]]
    if sampling == "random":
        chosen: Sequence[int] = rng.sample(range(len(requests)), limit)
    else:
        chosen = _sample_strata(requests, limit, rng)
    return [requests[number] for number in sorted(chosen)]


def _sample_strata(
    requests: Sequence[RecordedRequest], limit: int, rng: random.Random
) -> Sequence[int]:
    """As many of each stratum as its share, and one of each as far as ``limit`` allows.

    A stratum is a model, version, protocol, operation and outcome, streamed or not.
    """
    strata = defaultdict[tuple[object, ...], list[int]](list)
    for number, one in enumerate(requests):
        stratum = (one.model, one.version, one.protocol, one.operation, one.outcome, one.stream)
        strata[stratum].append(number)
    for members in strata.values():
        rng.shuffle(members)
    # The n-th of m members stands at n/m: the first ones of all strata come before all others.
    ranked = sorted(
        (position / len(members), len(members), number)
        for members in strata.values()
        for position, number in enumerate(members)
    )
    return [number for _, _, number in ranked[:limit]]


def _add(total: Estimate, recorded: RecordedRequest, prices: Prices | None) -> None:
    usage = recorded.usage
    if usage is not None:
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
    else:
        prompt = recorded.request_size // _BYTES_PER_TOKEN
        completion = _UNKNOWN_COMPLETION if recorded.operation in ("chat", "completion") else 0
    total.prompt_tokens += prompt
    total.completion_tokens += completion
    if prices is not None and total.cost is not None:
        total.cost += prices.compute(prompt, completion)


def apply_budget(selection: Selection, budget: ReplayBudget) -> Estimate:
    """Leave out the requests that would exceed the budget; returns the estimate of the rest."""
    total = Estimate(cost=None if budget.prices is None else 0.0)
    within = list[RecordedRequest]()
    for recorded in selection.requests:
        before = (total.prompt_tokens, total.completion_tokens, total.cost)
        _add(total, recorded, budget.prices)
        if (budget.tokens is not None and total.tokens > budget.tokens) or (
            budget.cost is not None and total.cost is not None and total.cost > budget.cost
        ):
            total.prompt_tokens, total.completion_tokens, total.cost = before
            break
        within.append(recorded)
    selection.over_budget = len(selection.requests) - len(within)
    selection.requests = within
    return total
