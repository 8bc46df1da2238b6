"""Which losses the gateway makes up for, and what it says of them."""

from typing import Any

import pytest

from gateway.core.loss import Loss, Reason
from gateway.core.types import EmbedRequest, GenerateRequest, Logprobs, Request, Stopping
from gateway.emulation import Plan, planned


def completion(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", kind="completion", prompts=("a", "b"), **fields)


def test_nothing_lost_needs_nothing_done() -> None:
    assert planned(completion(n=2), ()) == Plan()


@pytest.mark.parametrize("reason", ["dropped", "clamped", "approximated"])
@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("stopping.stop", completion(stopping=Stopping(stop=("x",)))),
        ("stopping.include_stop", completion(stopping=Stopping(include_stop=True))),
        ("stopping.include_stop", completion(stopping=Stopping(stop_token_ids=(1,)))),
        ("n", completion(n=2)),
        ("prompts", completion()),
        ("inputs", EmbedRequest(model="m", inputs=("a", "b"))),
        ("echo", completion(echo=True)),
        ("suffix", completion(suffix="!")),
    ],
)
def test_what_the_gateway_does_is_no_longer_lost(
    path: str, request_: Request, reason: Reason
) -> None:
    plan = planned(request_, [Loss("wire", reason, "4 to 2", path)])

    assert plan == Plan((Loss("wire", "emulated", "4 to 2", path),), frozenset({path}))
    assert plan.lost_parameters == ()


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("sampling.top_k", completion()),
        ("", completion()),
        ("echo", completion(echo=True, logprobs=Logprobs())),
        (
            "stopping.include_stop",
            completion(stopping=Stopping(stop=("x",), include_stop=True, stop_token_ids=(1,))),
        ),
    ],
)
def test_what_nobody_makes_up_for_stays_as_it_was(path: str, request_: Request) -> None:
    found = (Loss("wire", "dropped", path=path),)
    plan = planned(request_, found)

    assert plan == Plan(found)
    assert plan.lost_parameters == found


def test_each_loss_is_judged_by_itself_and_keeps_its_place() -> None:
    found = [Loss("top_k", "dropped", path="sampling.top_k"), Loss("n", "dropped", path="n")]
    plan = planned(completion(n=2), found)

    assert plan.unsupported_parameters == (found[0], Loss("n", "emulated", path="n"))
    assert plan.lost_parameters == (found[0],)
