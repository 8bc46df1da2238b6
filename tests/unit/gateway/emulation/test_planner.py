"""Which losses the gateway makes up for, and what it says of them."""

from typing import Any

import pytest

from gateway.emulation.planner import EmulationPlan, plan_emulation
from protocols.core.loss import LossReason, UnsupportedParameter
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    LogprobsOptions,
    Request,
    StopConditions,
)


def completion(**fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", kind="completion", prompts=("a", "b"), **fields)


def test_nothing_lost_needs_nothing_done() -> None:
    assert plan_emulation(completion(n=2), ()) == EmulationPlan()


@pytest.mark.parametrize("reason", ["dropped", "clamped", "approximated"])
@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("stopping.stop", completion(stopping=StopConditions(stop=("x",)))),
        ("stopping.include_stop", completion(stopping=StopConditions(include_stop=True))),
        ("stopping.include_stop", completion(stopping=StopConditions(stop_token_ids=(1,)))),
        ("n", completion(n=2)),
        ("prompts", completion()),
        ("inputs", EmbeddingRequest(model="m", inputs=("a", "b"))),
        ("echo", completion(echo=True)),
        ("suffix", completion(suffix="!")),
    ],
)
def test_what_the_gateway_does_is_no_longer_lost(
    path: str, request_: Request, reason: LossReason
) -> None:
    plan = plan_emulation(request_, [UnsupportedParameter("wire", reason, "4 to 2", path)])

    assert plan == EmulationPlan(
        (UnsupportedParameter("wire", "emulated", "4 to 2", path),), frozenset({path})
    )
    assert plan.lost_parameters == ()


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("sampling.top_k", completion()),
        ("", completion()),
        ("echo", completion(echo=True, logprobs=LogprobsOptions())),
        (
            "stopping.include_stop",
            completion(
                stopping=StopConditions(stop=("x",), include_stop=True, stop_token_ids=(1,))
            ),
        ),
    ],
)
def test_what_nobody_makes_up_for_stays_as_it_was(path: str, request_: Request) -> None:
    found = (UnsupportedParameter("wire", "dropped", path=path),)
    plan = plan_emulation(request_, found)

    assert plan == EmulationPlan(found)
    assert plan.lost_parameters == found


def test_each_loss_is_judged_by_itself_and_keeps_its_place() -> None:
    found = [
        UnsupportedParameter("top_k", "dropped", path="sampling.top_k"),
        UnsupportedParameter("n", "dropped", path="n"),
    ]
    plan = plan_emulation(completion(n=2), found)

    assert plan.unsupported_parameters == (
        found[0],
        UnsupportedParameter("n", "emulated", path="n"),
    )
    assert plan.lost_parameters == (found[0],)
