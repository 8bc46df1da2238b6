"""Which unsupported parameters the gateway emulates, and what it reports."""

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


def make_completion(**fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", kind="completion", prompts=("a", "b"), **fields)


def test_no_loss_needs_no_emulation() -> None:
    assert plan_emulation(make_completion(n=2), ()) == EmulationPlan()


@pytest.mark.parametrize("reason", ["dropped", "clamped", "approximated"])
@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("stopping.stop", make_completion(stopping=StopConditions(stop=("x",)))),
        ("stopping.include_stop", make_completion(stopping=StopConditions(include_stop=True))),
        ("stopping.include_stop", make_completion(stopping=StopConditions(stop_token_ids=(1,)))),
        ("n", make_completion(n=2)),
        ("prompts", make_completion()),
        ("inputs", EmbeddingRequest(model="m", inputs=("a", "b"))),
        ("echo", make_completion(echo=True)),
        ("suffix", make_completion(suffix="!")),
    ],
)
def test_emulated_parameter_is_not_reported_as_lost(
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
        ("sampling.top_k", make_completion()),
        ("", make_completion()),
        ("echo", make_completion(echo=True, logprobs=LogprobsOptions())),
        (
            "stopping.include_stop",
            make_completion(
                stopping=StopConditions(stop=("x",), include_stop=True, stop_token_ids=(1,))
            ),
        ),
    ],
)
def test_parameter_that_cannot_be_emulated_stays_lost(path: str, request_: Request) -> None:
    unsupported = (UnsupportedParameter("wire", "dropped", path=path),)
    plan = plan_emulation(request_, unsupported)

    assert plan == EmulationPlan(unsupported)
    assert plan.lost_parameters == unsupported


def test_losses_are_planned_independently_in_order() -> None:
    unsupported = [
        UnsupportedParameter("top_k", "dropped", path="sampling.top_k"),
        UnsupportedParameter("n", "dropped", path="n"),
    ]
    plan = plan_emulation(make_completion(n=2), unsupported)

    assert plan.unsupported_parameters == (
        unsupported[0],
        UnsupportedParameter("n", "emulated", path="n"),
    )
    assert plan.lost_parameters == (unsupported[0],)
