"""Parameters that some kinds of workers support and others do not: sent or reported."""

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given as forall
from hypothesis import strategies as st
from msgspec import Raw

from protocols.chat import upstream
from protocols.core.errors import UnsupportedFeature
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AudioPart,
    ChoiceFormat,
    GenerationRequest,
    ImagePart,
    LogprobsOptions,
    Message,
    ResponseOptions,
    StopConditions,
    TextPart,
    Tool,
)
from protocols.openai.endpoints import OpenAI
from protocols.params import ParsedParams

MESSAGES = (Message("user", (TextPart("hi"),)),)
TOOLS = (Tool("f"),)
ALL = LogprobsOptions(top=-1)


def make_chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", kind="chat", messages=MESSAGES, **fields)


TABLE: list[tuple[str, GenerationRequest, dict[str, Any], set[tuple[str, str]]]] = [
    (
        "openai",
        make_chat(tools=TOOLS),
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        set(),
    ),
    ("openai", make_chat(parallel_tools=False), {}, set()),
    (
        "openai",
        make_chat(response_options=ResponseOptions(token_ids=True)),
        {},
        {("token_ids", "dropped")},
    ),
    (
        "vllm",
        make_chat(response_options=ResponseOptions(token_ids=True)),
        {"return_token_ids": True},
        set(),
    ),
    (
        "openai",
        make_chat(logprobs=ALL),
        {"logprobs": True, "top_logprobs": 20},
        {("top", "clamped")},
    ),
    ("vllm", make_chat(logprobs=ALL), {"logprobs": True, "top_logprobs": -1}, set()),
    (
        "vllm",
        make_chat(logprobs=LogprobsOptions(top=30)),
        {"logprobs": True, "top_logprobs": 30},
        set(),
    ),
    (
        "openai",
        make_chat(stopping=StopConditions(overflow="truncate")),
        {},
        {("overflow", "dropped")},
    ),
    (
        "vllm",
        make_chat(stopping=StopConditions(overflow="truncate")),
        {"truncate_prompt_tokens": -1},
        set(),
    ),
    (
        "openai",
        make_chat(stream=True),
        {"stream": True, "stream_options": {"include_usage": True}},
        set(),
    ),
    (
        "vllm",
        make_chat(stream=True, response_options=ResponseOptions(usage="each")),
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        set(),
    ),
]


@pytest.mark.parametrize(("profile", "request_", "body", "losses"), TABLE)
def test_parameter_is_encoded_or_reported_per_profile(
    profile: str, request_: GenerationRequest, body: dict[str, Any], losses: set[tuple[str, str]]
) -> None:
    adapter = OpenAI(profile)

    sent = json.loads(adapter.encode_request(request_).body)
    lost = {(loss.field, loss.reason) for loss in adapter.unsupported_parameters(request_, {})}

    assert {
        name: value for name, value in sent.items() if name not in ("model", "messages")
    } == body
    assert lost == losses


def test_extra_fields_of_another_protocol_are_dropped() -> None:
    request = GenerationRequest(
        model="m", kind="completion", prompts=("x",), extra={"foo": Raw(b"1")}, source="elsewhere"
    )
    own = msgspec.structs.replace(request, source="openai")
    vllm = OpenAI("vllm")

    assert b"foo" not in vllm.encode_request(request).body
    assert vllm.unsupported_parameters(request, {}) == (UnsupportedParameter("foo", "dropped"),)
    assert b'"foo":1' in vllm.encode_request(own).body
    assert vllm.unsupported_parameters(own, {}) == ()


PARAMETERS: dict[str, tuple[Any, ...]] = {
    "sampling.temperature": (0.0, 0.5, 5.0),
    "sampling.top_k": (1, 2, 3),
    "sampling.do_sample": (False,),
    "sampling.seed": (2**63,),
    "sampling.logit_bias": ({1: 0.5},),
    "sampling.beam_width": (1, 2),
    "stopping.max_tokens": (1, 2, 3),
    "stopping.stop": (("x",) * 20,),
    "stopping.truncate_prompt": (3,),
    "stopping.overflow": ("error", "truncate"),
    "response_options.usage": ("none", "each"),
    "response_options.token_ids": (True,),
    "templating.mode": ("server",),
    "prompts": ((), ("a", "b"), ((1, 2),)),
    "n": (1, 2),
    "echo": (False, True),
    "logprobs.top": (0, 30),
    "logprobs.prompt": (1,),
    "output": (ChoiceFormat(("a", "b")),),
    "tools": (TOOLS,),
    "messages": ((Message("user", (ImagePart("https://a/b"), AudioPart("aa", "wav"))),),),
    "labels": ({"user": "u"},),
    "stream": (True,),
    "suffix": ("end",),
}


def build_request(fields: dict[str, Any]) -> GenerationRequest:
    values = ParsedParams()
    values.provided_fields = {"max_completion_tokens"}
    values |= {"prompts": ("a b",), "templating.mode": "raw", **fields}
    return GenerationRequest(model="m", kind="completion", **values.build_request_arguments())


VALUES = [(path, value) for path, values in PARAMETERS.items() for value in values]
TRIPLES = st.lists(
    st.sampled_from(VALUES), min_size=3, max_size=3, unique_by=lambda parameter: parameter[0]
)


def list_pairs() -> Iterator[dict[str, Any]]:
    """Yield no parameter, each value of each, and each pair of values of two."""
    yield {}
    for first in VALUES:
        yield dict([first])
    for first, second in combinations(VALUES, 2):
        if first[0] != second[0]:
            yield dict([first, second])


def encode_or_return_error(request: GenerationRequest, profile: str) -> Any:
    """Return the encoded parameters and the losses, or the error."""
    adapter = OpenAI(profile)
    try:
        return adapter.encode_request(request).body, adapter.unsupported_parameters(request, {})
    except UnsupportedFeature as error:
        return error.message


@pytest.mark.parametrize("profile", OpenAI.profiles)
def test_table_fast_path_equals_full_encoding(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [build_request(fields) for fields in list_pairs()]
    fast = [encode_or_return_error(request, profile) for request in requests]

    monkeypatch.setattr(upstream, "_SPECIAL_PATHS", frozenset({"model"}))
    full = [encode_or_return_error(request, profile) for request in requests]

    different = [request for request, a, b in zip(requests, fast, full, strict=True) if a != b]
    assert different == []


@forall(parameters=TRIPLES, profile=st.sampled_from(OpenAI.profiles))
def test_table_fast_path_equals_full_encoding_of_any_three_parameters(
    parameters: list[tuple[str, Any]], profile: str
) -> None:
    request = build_request(dict(parameters))
    fast = encode_or_return_error(request, profile)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upstream, "_SPECIAL_PATHS", frozenset({"model"}))
        full = encode_or_return_error(request, profile)

    assert full == fast


@pytest.mark.parametrize("field", ["audio", "prompt_logprobs", "return_hidden_states"])
def test_field_that_adds_keys_to_the_answer_reaches_workers_of_the_client_s_protocol(
    field: str,
) -> None:
    """Only a client of that protocol gets the keys that the worker adds."""
    for source, is_sent in (("openai", True), ("ovms", False)):
        request = make_chat(extra={field: Raw(b"1")}, source=source)

        body = json.loads(OpenAI().encode_request(request).body)
        losses = OpenAI().unsupported_parameters(request, {})

        assert (field in body) is is_sent
        assert (UnsupportedParameter(field, "dropped") in losses) is not is_sent


def test_unknown_field_that_the_profile_lacks_is_dropped() -> None:
    request = make_chat(extra={"modalities": Raw(b'["text"]')}, source="openai")

    assert "modalities" not in json.loads(OpenAI("mistral").encode_request(request).body)
    losses = OpenAI("mistral").unsupported_parameters(request, {})
    assert UnsupportedParameter("modalities", "dropped") in losses
