"""A client's request as the model takes it."""

import random

import pytest

from backends.echo import EchoBackend
from gateway.pipeline.strategies import MAX_CHOICES, MAX_TOP_LOGPROBS, apply_model_settings
from gateway.routing.router import Router, Target, compile_model
from protocols.core.catalog import ModelInfo
from protocols.core.errors import InvalidParameter
from protocols.core.request import GenerationRequest, LogprobsOptions

TARGETS = {"1": Target("1", "real", EchoBackend(), "b")}
MODEL = compile_model(ModelInfo("m", ()), TARGETS, {"1": 1})
ROUTE = Router({"m": MODEL}, draw=random.Random(1).random).route("m")


def ask(prompts: int, n: int) -> GenerationRequest:
    return GenerationRequest(model="m", kind="completion", prompts=("a",) * prompts, n=n)


def test_the_target_s_own_name_is_asked_for() -> None:
    assert apply_model_settings(ask(1, 1), ROUTE, {}, "dialect").model == "real"


@pytest.mark.parametrize(("prompts", "n"), [(1, MAX_CHOICES), (MAX_CHOICES // 64, 64)])
def test_as_many_answers_as_anybody_may_ask_for(prompts: int, n: int) -> None:
    assert isinstance(
        apply_model_settings(ask(prompts, n), ROUTE, {}, "dialect"), GenerationRequest
    )


@pytest.mark.parametrize(("prompts", "n"), [(1, 10**15), (MAX_CHOICES // 64, 65)])
def test_more_answers_than_anybody_may_ask_for(prompts: int, n: int) -> None:
    with pytest.raises(InvalidParameter, match=r"'best' must be at most 8192 in all") as caught:
        apply_model_settings(ask(prompts, n), ROUTE, {"n": "best"}, "dialect")
    assert caught.value.problem == "above"


def test_more_alternatives_to_a_token_than_anybody_may_ask_for() -> None:
    many = GenerationRequest(
        model="m", kind="completion", prompts=("a",), logprobs=LogprobsOptions(MAX_TOP_LOGPROBS + 1)
    )
    with pytest.raises(InvalidParameter, match="'top' must be at most 1000 here"):
        apply_model_settings(many, ROUTE, {"logprobs.top": "top"}, "dialect")
