"""A client's request is adapted to its target: passthrough, translation and clamping."""

import random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from backends.echo import EchoBackend
from backends.interfaces import (
    BackendRequest,
    Deadline,
    PreparedRequest,
    RequestContext,
    collect_items,
    ignore_memory,
)
from gateway.config.schema import OnLoss
from gateway.pipeline.model_settings import MAX_CHOICES, MAX_TOP_LOGPROBS, apply_model_settings
from gateway.pipeline.strategies import TargetAttempt
from gateway.routing.router import Route, Router, Target, compile_model
from protocols.core.catalog import ModelInfo
from protocols.core.errors import InvalidParameter, UnsupportedFeature
from protocols.core.events import ChoiceEnd, Event, PromptEcho, TextDelta, Usage
from protocols.core.interfaces import (
    ClientRequest,
    PassthroughRequest,
    ResponseContext,
    UpstreamRequest,
)
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import GenerationRequest, LogprobsOptions
from protocols.openai.endpoints import OpenAI

TARGETS = {"1": Target("1", "real", EchoBackend(), "b")}
MODEL = compile_model(ModelInfo("m", ()), TARGETS, {"1": 1})
ROUTE = Router({"m": MODEL}, draw=random.Random(1).random).route("m")


def make_request(prompts: int, n: int) -> GenerationRequest:
    return GenerationRequest(model="m", kind="completion", prompts=("a",) * prompts, n=n)


def test_request_uses_the_model_name_of_the_target() -> None:
    assert apply_model_settings(make_request(1, 1), ROUTE, {}, "protocol").model == "real"


@pytest.mark.parametrize(("prompts", "n"), [(1, MAX_CHOICES), (MAX_CHOICES // 64, 64)])
def test_maximum_number_of_choices_is_accepted(prompts: int, n: int) -> None:
    assert isinstance(
        apply_model_settings(make_request(prompts, n), ROUTE, {}, "protocol"), GenerationRequest
    )


@pytest.mark.parametrize(("prompts", "n"), [(1, 10**15), (MAX_CHOICES // 64, 65)])
def test_too_many_choices_are_rejected(prompts: int, n: int) -> None:
    with pytest.raises(InvalidParameter, match=r"'best' must be at most 8192 in all") as excinfo:
        apply_model_settings(make_request(prompts, n), ROUTE, {"n": "best"}, "protocol")
    assert excinfo.value.problem == "above"


def test_too_many_top_logprobs_are_rejected() -> None:
    many = GenerationRequest(
        model="m", kind="completion", prompts=("a",), logprobs=LogprobsOptions(MAX_TOP_LOGPROBS + 1)
    )
    with pytest.raises(InvalidParameter, match="'top' must be at most 1000 here"):
        apply_model_settings(many, ROUTE, {"logprobs.top": "top"}, "protocol")


# --- strategies -----------------------------------------------------------------------------------


class LossyBackend(EchoBackend):
    """A backend without support for seed that accepts a limited number of passthrough requests."""

    offered = 0

    def prepare(self, request: BackendRequest) -> PreparedRequest:
        self.offered += request.passthrough is not None
        decoded, names = request.decode()
        return PreparedRequest(
            decoded, (UnsupportedParameter(names["sampling.seed"], "dropped", "sampling.seed"),)
        )


def make_strategy(
    backend: EchoBackend, on_loss: OnLoss = "report", *, strict: str = "", **fields: object
) -> TargetAttempt:
    adapter = OpenAI()
    [endpoint] = [one for one in adapter.endpoints if one.path == "/v1/completions"]
    body = msgspec.json.encode({"model": "m", "prompt": "say hi", **fields})
    headers = {"x-interlingua-strict": strict} if strict else {}
    call = ClientRequest(endpoint, {}, headers, "", body, endpoint.path)
    targets = {"1": Target("1", "real", backend, "b")}
    model = compile_model(ModelInfo("m", ()), targets, {"1": 1}, on_loss)
    route: Route = Router({"m": model}, draw=random.Random(1).random).route("m")
    clock = lambda: 0.0  # noqa: E731 - it stands still
    about = ResponseContext("r", 1, "m", "1", "real", clock)
    context = RequestContext("r", Deadline(clock, 9.0), clock, ignore_memory)
    return TargetAttempt.prepare(adapter, call, route, response_context=about, context=context)


@pytest.mark.parametrize(
    ("on_loss", "strict", "offered"),
    [("report", "", 1), ("ignore", "", 1), ("report", "0", 1), ("report", "1", 1)],
)
def test_strict_request_is_offered_for_passthrough_as_any_other(
    on_loss: OnLoss, strict: str, offered: int
) -> None:
    backend = LossyBackend()
    if strict == "1":
        with pytest.raises(UnsupportedFeature, match="can't honour: seed"):
            make_strategy(backend, on_loss, strict=strict)
    else:
        strategy = make_strategy(backend, on_loss, strict=strict)
        reported = [one.field for one in strategy.unsupported_parameters]
        assert reported == ([] if on_loss == "ignore" else ["seed"])

    assert backend.offered == offered


def test_on_loss_reject_rejects_what_is_not_passed_through() -> None:
    backend = LossyBackend()
    with pytest.raises(UnsupportedFeature):
        make_strategy(backend, "reject")
    assert backend.offered == 1


class ClampingBackend(EchoBackend):
    """A backend that passes requests through with a clamped max_tokens."""

    def prepare(self, request: BackendRequest) -> PreparedRequest:
        assert request.passthrough is not None
        passed = PassthroughRequest(
            request.decode()[0], UpstreamRequest("/", b""), lambda: (("a", "b"),), CLAMPED_READER
        )
        changed = (UnsupportedParameter("max_tokens", "clamped", "9 to 5"),)
        return PreparedRequest(passed.request, changed, passed)


CLAMPED_READER: Any = None
"""The response is not read."""


def test_what_the_model_s_settings_change_of_a_passed_through_request_is_reported() -> None:
    strategy = make_strategy(ClampingBackend())

    headers = (("a", "b"), ("x-interlingua-loss", "max_tokens=clamped"))
    assert strategy.get_stream_headers() == headers
    assert strategy.build_response((), b"{}").headers == headers


@pytest.mark.parametrize(("on_loss", "strict"), [("reject", ""), ("report", "1")])
def test_what_the_model_s_settings_change_is_rejected_in_strict_mode(
    on_loss: OnLoss, strict: str
) -> None:
    with pytest.raises(UnsupportedFeature, match="can't honour: max_tokens"):
        make_strategy(ClampingBackend(), on_loss, strict=strict)


async def collect_events(strategy: TargetAttempt, *, unary: bool) -> list[Event]:
    items = await (strategy.send_unary() if unary else collect_items(strategy.stream()))
    return [event for _, batch in items for event in strategy.process_events(batch)]


@pytest.mark.parametrize("unary", [False, True], ids=["stream", "unary"])
@pytest.mark.parametrize("stop", [None, "!"], ids=["as it is", "emulated"])
async def test_observer_gets_the_reported_events(stop: str | None, *, unary: bool) -> None:
    strategy = make_strategy(EchoBackend(script=["Hello", "!"]), echo=True, stop=stop)
    if stop:
        strategy.plan = replace(strategy.plan, emulated_fields=frozenset({"stopping.stop"}))
    observed: list[Event] = []
    strategy.observe_events = observed.extend

    events = await collect_events(strategy, unary=unary)

    assert observed == events
    assert [type(event) for event in events].count(Usage) == 1
    assert [one for one in events if isinstance(one, PromptEcho)] == [PromptEcho(0, "say hi")]

    text = "".join(one.text for one in events if isinstance(one, TextDelta))
    assert text == ("Hello" if stop else "Hello!")
    assert [one.finish_reason for one in events if isinstance(one, ChoiceEnd)] == [
        "stop" if stop else "eos"
    ]
