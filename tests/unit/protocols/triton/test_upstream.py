"""Requests for workers, by the parameters of each backend."""

import json
from typing import Any

import pytest
from msgspec import Raw

from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    ChoiceFormat,
    GenerationRequest,
    GrammarFormat,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    PromptOptions,
    RegexFormat,
    Request,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
)
from protocols.triton.endpoints import Triton

MESSAGES = (Message("user", (TextPart("hi"),)),)
RAW = PromptOptions(mode="raw")
FLAGS = {
    "vllm": {"exclude_input_in_output": True, "return_finish_reason": True,
             "return_num_input_tokens": True, "return_num_output_tokens": True},
    "trtllm": {"exclude_input_in_output": True, "return_num_input_tokens": True,
               "return_num_output_tokens": True},
    "llmapi": {"sampling_param_exclude_input_from_output": True, "return_finish_reason": True,
               "return_stop_reason": True},
    "plain": {},
}  # fmt: skip
"""Fields of every request, so that the response can be decoded."""


def make_chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "m", "kind": "chat", "messages": MESSAGES, **fields})


def make_completion(*prompts: Any, **fields: Any) -> GenerationRequest:
    fields = {"prompts": prompts or ("hi",), "templating": RAW, **fields}
    return GenerationRequest(model="m", kind="completion", **fields)


def encode_body(request: Request, adapter: Triton | str = "vllm", path: str = "generate") -> Any:
    """Return the body without the prompt and the constant fields, with parameters unpacked."""
    adapter = adapter if isinstance(adapter, Triton) else Triton(adapter)
    wire = adapter.encode_request(request)
    assert (wire.method, wire.path) == ("POST", f"/v2/models/m/{path}")
    assert wire.headers == (("Content-Type", "application/json"),)
    body = json.loads(wire.body)
    if "sampling_parameters" in body:
        body["sampling_parameters"] = json.loads(body["sampling_parameters"])
    return body


def encode_parameters(request: Request, profile: str) -> Any:
    body = encode_body(request, profile)
    assert body.pop("text_input") == "hi"
    assert not body.pop({"llmapi": "streaming"}.get(profile, "stream"))
    for name, value in FLAGS[profile].items():
        assert body.pop(name) is value
    if profile == "vllm":
        assert body.keys() == {"sampling_parameters"}
        return body["sampling_parameters"]
    if profile == "plain":
        assert body.keys() <= {"parameters"}
        return body.get("parameters", {})
    return body


def list_unsupported_parameters(
    request: Request, adapter: Triton | str = "vllm", **names: str
) -> set[tuple[str, str]]:
    """Return the losses, without that of the chat template."""
    adapter = adapter if isinstance(adapter, Triton) else Triton(adapter)
    unsupported = adapter.unsupported_parameters(
        request, {path.replace("__", "."): wire for path, wire in names.items()}
    )
    return {(one.field, one.reason) for one in unsupported if one.detail != "no chat template"}


@pytest.mark.parametrize(
    ("fields", "vllm", "trtllm", "llmapi", "plain"),
    [
        ({}, {}, {"max_tokens": 512}, {}, {}),
        (
            {"stopping": StopConditions(max_tokens=5)},
            {"max_tokens": 5},
            {"max_tokens": 5},
            {"sampling_param_max_tokens": 5},
            {"max_tokens": 5},
        ),
        (
            {"stopping": StopConditions(max_tokens=5, stop=("a",))},
            {"max_tokens": 5, "stop": ["a"]},
            {"max_tokens": 5, "stop_words": ["a"]},
            {"sampling_param_max_tokens": 5, "sampling_param_stop": ["a"]},
            {"max_tokens": 5, "stop": "a"},
        ),
        (
            {"sampling": SamplingParams(temperature=1, top_p=0.5, seed=2**64 - 1)},
            {"temperature": 1, "top_p": 0.5, "seed": 2**63 - 1},
            {"max_tokens": 512, "temperature": 1.0, "top_p": 0.5, "seed": 2**64 - 1},
            {
                "sampling_param_temperature": 1.0,
                "sampling_param_top_p": 0.5,
                "sampling_param_seed": 2**64 - 1,
            },
            {"temperature": 1, "top_p": 0.5, "seed": 2**63 - 1},
        ),
        (
            {"sampling": SamplingParams(do_sample=False)},
            {"temperature": 0.0},
            {"max_tokens": 512, "temperature": 0.0},
            {"sampling_param_temperature": 0.0},
            {"temperature": 0.0},
        ),
        ({"n": 2}, {"n": 2}, {"max_tokens": 512, "num_return_sequences": 2}, {}, {}),
        ({"best_of": 2}, {}, {"max_tokens": 512}, {"sampling_param_best_of": 2}, {"best_of": 2}),
    ],
)
def test_parameters_are_encoded_per_profile(
    fields: Any, vllm: Any, trtllm: Any, llmapi: Any, plain: Any
) -> None:
    request = make_completion(**fields)

    assert encode_parameters(request, "vllm") == vllm
    assert encode_parameters(request, "trtllm") == trtllm
    assert encode_parameters(request, "llmapi") == llmapi
    assert encode_parameters(request, "plain") == plain


@pytest.mark.parametrize("profile", Triton.profiles)
def test_stream_flag_is_set_in_path_and_body(profile: str) -> None:
    body = encode_body(make_completion(stream=True), profile, "generate_stream")

    assert body[{"llmapi": "streaming"}.get(profile, "stream")] is True


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("m", "/v2/models/m"),
        ("m/versions/2", "/v2/models/m/versions/2"),
        ("a b/c?#", "/v2/models/a%20b%2Fc%3F%23"),
        ("m/versions/x", "/v2/models/m%2Fversions%2Fx"),
        ("a/b/versions/2", "/v2/models/a%2Fb%2Fversions%2F2"),
    ],
)
def test_model_name_is_escaped_except_for_its_version(model: str, path: str) -> None:
    adapter = Triton()
    request = GenerationRequest(model=model, kind="chat", messages=MESSAGES)

    question, metadata = adapter.metadata_requests(model)

    assert adapter.encode_request(request).path == f"{path}/generate"
    assert (question.method, question.path, question.body) == ("GET", f"{path}/config", b"")
    assert (metadata.method, metadata.path, metadata.body) == ("GET", path, b"")


def test_health_check_requests_v2_health_ready() -> None:
    assert Triton().health_request.path == "/v2/health/ready"
    assert Triton().health_request.method == "GET"


@pytest.mark.parametrize(
    ("output", "vllm", "trtllm"),
    [
        (JsonObjectFormat(), {"json_object": True}, {"guided_decoding_guide_type": "json"}),
        (
            JsonSchemaFormat(Raw(b'{"type":"object"}')),
            {"json": {"type": "object"}},
            {
                "guided_decoding_guide_type": "json_schema",
                "guided_decoding_guide": '{"type":"object"}',
            },
        ),
        (
            RegexFormat("a+"),
            {"regex": "a+"},
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"},
        ),
        (
            GrammarFormat("g"),
            {"grammar": "g"},
            {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "g"},
        ),
        (ChoiceFormat(("a", "b")), {"choice": ["a", "b"]}, {}),
    ],
)
def test_output_format_is_encoded_per_profile(output: Any, vllm: Any, trtllm: Any) -> None:
    request = make_completion(output=output)

    assert json.loads(encode_parameters(request, "vllm")["structured_outputs"]) == vllm
    assert encode_parameters(request, "trtllm") == {"max_tokens": 512, **trtllm}
    assert ("output", "dropped") not in list_unsupported_parameters(request, "vllm")
    assert (("output", "dropped") in list_unsupported_parameters(request, "trtllm")) is (not trtllm)
    assert (
        list_unsupported_parameters(request, "llmapi")
        == list_unsupported_parameters(request, "plain")
        == {("output", "dropped")}
    )


def test_chat_is_rendered_to_a_prompt() -> None:
    class Shout:
        def render_prompt(self, request: GenerationRequest) -> str:
            return request.messages[0].text.upper()

    assert encode_body(make_chat(), Triton(renderer=Shout()))["text_input"] == "HI"
    assert encode_body(make_chat())["text_input"] == "hi"
    assert Triton(renderer=Shout()).unsupported_parameters(make_chat(), {}) == ()
    assert Triton().unsupported_parameters(make_chat(), {"messages": "input"}) == (
        UnsupportedParameter("input", "approximated", "no chat template", "messages"),
    )


def test_losses_of_a_chat_are_reported_once() -> None:
    observed = Message("user", (ImagePart("x"), TextPart("y")))
    request = make_chat(messages=(observed,), tools=(Tool("f"),), parallel_tools=False)

    assert [one.field for one in Triton().unsupported_parameters(request, {})] == [
        "parallel_tools",
        "messages",
        "messages[0].content[0]",
        "tools",
    ]


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "vllm", "trtllm", "llmapi", "plain"),
    [
        (
            {"stopping": StopConditions(max_tokens=1, stop=("a", "b"))},
            set(),
            {("stop", "approximated")},
            set(),
            {("stop", "dropped")},
        ),
        (
            {"stopping": StopConditions(max_tokens=2**40, ignore_eos=True)},
            set(),
            {("max_tokens", "clamped"), ("ignore_eos", "dropped")},
            {("max_tokens", "clamped"), ("ignore_eos", "dropped")},
            {("ignore_eos", "dropped")},
        ),
        (
            {
                "sampling": SamplingParams(top_p=0, do_sample=False),
                "stopping": StopConditions(max_tokens=1),
            },
            {("top_p", "clamped")},
            {("top_p", "clamped")},
            set(),
            {("top_p", "clamped")},
        ),
        (
            {"n": 2, "stopping": StopConditions(max_tokens=1, overflow="error")},
            set(),
            set(),
            {("n", "dropped")},
            {("n", "dropped")},
        ),
        (
            {"logprobs": LogprobsOptions(2, prompt=1), "stopping": StopConditions(max_tokens=1)},
            {("prompt", "dropped")},
            {("prompt", "dropped"), ("top", "approximated")},
            {("prompt", "dropped"), ("top", "dropped")},
            {("prompt", "dropped"), ("top", "dropped")},
        ),
        (
            {
                "response_options": ResponseOptions(token_ids=True),
                "stopping": StopConditions(max_tokens=1),
            },
            *[{("token_ids", "dropped")}] * 4,
        ),
        (
            {"best_of": 2, "stopping": StopConditions(max_tokens=1, overflow="truncate")},
            {("best_of", "dropped"), ("overflow", "dropped")},
            {("best_of", "dropped"), ("overflow", "dropped")},
            {("overflow", "dropped")},
            {("overflow", "dropped")},
        ),
    ],
)
def test_unsupported_parameters_per_profile(
    fields: Any, vllm: Any, trtllm: Any, llmapi: Any, plain: Any
) -> None:
    request = make_completion(**fields)

    assert list_unsupported_parameters(request, "vllm") == vllm
    assert list_unsupported_parameters(request, "trtllm") == trtllm
    assert list_unsupported_parameters(request, "llmapi") == llmapi
    assert list_unsupported_parameters(request, "plain") == plain


def test_every_loss_has_its_internal_path() -> None:
    request = make_completion(
        "a",
        "b",
        stream=True,
        n=2,
        logprobs=LogprobsOptions(1),
        stopping=StopConditions(stop=("x",), ignore_eos=True),
        output=ChoiceFormat(("x",)),
    )
    adapter = Triton("trtllm")

    adapter.load_metadata("m", [b'{"input": [{"name": "text_input"}, {"name": "max_tokens"}]}'])

    assert {
        (one.path, one.field) for one in adapter.unsupported_parameters(request, {"n": "count"})
    } == {
        ("prompts", "prompt"),
        ("n", "count"),
        ("stream", "stream"),
        ("logprobs.top", "top"),
        ("stopping.stop", "stop"),
        ("stopping.ignore_eos", "ignore_eos"),
        ("stopping.max_tokens", "max_tokens"),
        ("output", "output"),
    }


@pytest.mark.parametrize("profile", Triton.profiles)
def test_n_is_dropped_for_streaming_requests(profile: str) -> None:
    losses = Triton(profile).unsupported_parameters(make_completion(stream=True, n=2), {})

    assert [one.reason for one in losses if one.path == "n"] == ["dropped"]


def test_only_the_first_prompt_is_sent() -> None:
    request = make_completion("hi", "there")

    assert encode_body(request)["text_input"] == "hi"
    assert Triton().unsupported_parameters(request, {"prompts": "inputs"}) == (
        UnsupportedParameter("inputs", "dropped", path="prompts"),
    )


def test_trtllm_gets_a_default_max_tokens() -> None:
    adapter = Triton("trtllm", max_tokens=7)

    assert encode_body(make_completion(), adapter)["max_tokens"] == 7
    assert adapter.unsupported_parameters(
        make_completion(), {"stopping.max_tokens": "max_new_tokens"}
    ) == (
        UnsupportedParameter(
            "max_new_tokens", "defaulted", "the model needs one: 7", "stopping.max_tokens"
        ),
    )
    assert (
        adapter.unsupported_parameters(make_completion(stopping=StopConditions(max_tokens=3)), {})
        == ()
    )


def test_logprobs_flags_are_encoded() -> None:
    request = make_completion(logprobs=LogprobsOptions(2), stopping=StopConditions(max_tokens=1))

    body = encode_body(request)
    assert body["return_logprobs"] is True
    assert body["sampling_parameters"] == {"max_tokens": 1, "logprobs": 2}
    assert encode_body(request, "trtllm")["return_log_probs"] is True
    assert "return_logprobs" not in encode_body(make_completion())
