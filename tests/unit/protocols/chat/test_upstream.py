"""Requests for workers, by profile, and their losses."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from protocols.core.errors import UnsupportedFeature
from protocols.core.interfaces import ClientRequest
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AllowedTools,
    ChoiceFormat,
    EmbeddingRequest,
    GenerationRequest,
    GrammarFormat,
    ImagePart,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    NamedTool,
    PromptOptions,
    ReasoningPart,
    RegexFormat,
    Request,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
    ToolCall,
)
from protocols.openai.endpoints import OpenAI

MakeCall = Callable[..., ClientRequest]
MESSAGES = (Message("user", (TextPart("hi"),)),)
HI = [{"role": "user", "content": "hi"}]
TOOLS = (Tool("f", parameters=Raw(b'{"type": "object"}')), Tool("g"))


def make_chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "m", "kind": "chat", "messages": MESSAGES, **fields})


def make_completion(**fields: Any) -> GenerationRequest:
    fields = {"prompts": ("a b",), "templating": PromptOptions(mode="raw"), **fields}
    return GenerationRequest(model="m", kind="completion", **fields)


def encode_path_and_body(
    request: Request, profile: str = "openai", **options: Any
) -> tuple[str, Any]:
    """Return the path, and the body without the model and plain messages."""
    wire = OpenAI(profile, **options).encode_request(request)
    assert wire.method == "POST"
    body = json.loads(wire.body)
    assert body.pop("model") == "m"
    if body.get("messages") == HI:
        del body["messages"]
    return wire.path, body


def list_unsupported_parameters(
    request: Request, profile: str = "openai", **options: Any
) -> set[tuple[str, str]]:
    unsupported = OpenAI(profile, **options).unsupported_parameters(request, {})
    return {(loss.field, loss.reason) for loss in unsupported}


@pytest.mark.parametrize(
    ("request_", "path", "body"),
    [
        (make_chat(), "/v1/chat/completions", {}),
        (
            make_chat(stopping=StopConditions(max_tokens=3)),
            "/v1/chat/completions",
            {"max_completion_tokens": 3},
        ),
        (
            make_chat(
                stopping=StopConditions(max_tokens=3, stop=("x",)),
                provided_fields=frozenset({"max_completion_tokens"}),
            ),
            "/v1/chat/completions",
            {"max_completion_tokens": 3, "stop": ["x"]},
        ),
        (
            make_chat(sampling=SamplingParams(temperature=0.0, seed=-1, logit_bias={5: -1.0})),
            "/v1/chat/completions",
            {"temperature": 0.0, "seed": -1, "logit_bias": {"5": -1.0}},
        ),
        (
            make_chat(stream=True, response_options=ResponseOptions(usage="none")),
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"include_usage": True}},
        ),
        (
            make_chat(logprobs=LogprobsOptions(2), n=2),
            "/v1/chat/completions",
            {"logprobs": True, "top_logprobs": 2, "n": 2},
        ),
        (make_chat(logprobs=LogprobsOptions()), "/v1/chat/completions", {"logprobs": True}),
        (
            make_chat(labels={"user": "u", "metadata.team": "a"}),
            "/v1/chat/completions",
            {"user": "u", "metadata": {"team": "a"}},
        ),
        (make_completion(), "/v1/completions", {"prompt": "a b"}),
        (
            make_completion(
                prompts=("a", (1, 2)), echo=True, insert_before="z", logprobs=LogprobsOptions(3, 3)
            ),
            "/v1/completions",
            {"prompt": ["a", [1, 2]], "echo": True, "suffix": "z", "logprobs": 3},
        ),
        (
            make_completion(prompts=("hi",), templating=PromptOptions(mode="server")),
            "/v1/chat/completions",
            {},
        ),
        (EmbeddingRequest(model="m", inputs=("a",)), "/v1/embeddings", {"input": "a"}),
        (
            EmbeddingRequest(model="m", inputs=("a", (1,)), dimensions=2, encoding="base64"),
            "/v1/embeddings",
            {"input": ["a", [1]], "dimensions": 2, "encoding_format": "base64"},
        ),
    ],
)
def test_openai_profile_encodes_standard_parameters_without_loss(
    request_: Request, path: str, body: dict[str, Any]
) -> None:
    assert encode_path_and_body(request_) == (path, body)
    assert list_unsupported_parameters(request_) == set()


def test_chat_messages_are_encoded() -> None:
    messages = (
        Message("developer", (TextPart("a"), TextPart("b"))),
        Message("user", (TextPart("see"), ImagePart("data:x", "low")), name="n"),
        Message("assistant", (ReasoningPart("hm"),), tool_calls=(ToolCall("c1", "f", "{}"),)),
        Message("tool", (TextPart("42"),), tool_call_id="c1"),
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    expected: list[dict[str, Any]] = [
        {"role": "developer", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [
            {"type": "text", "text": "see"},
            {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}], "name": "n"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]  # fmt: skip
    request = make_chat(messages=messages)

    assert encode_path_and_body(request)[1]["messages"] == expected
    assert list_unsupported_parameters(request) == set()
    assert encode_path_and_body(request, "vllm")[1]["messages"] == expected
    assert list_unsupported_parameters(request, "vllm") == set()


def test_tools_are_encoded() -> None:
    request = make_chat(tools=TOOLS, tool_choice=NamedTool("f"), parallel_tools=False)
    assert encode_path_and_body(request)[1] == {
        "parallel_tool_calls": False,
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
            {"type": "function", "function": {"name": "g"}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }


def test_allowed_tools_are_filtered_for_vllm_workers() -> None:
    request = make_chat(tools=TOOLS, tool_choice=AllowedTools("required", ("g",)))
    plain = encode_path_and_body(request)[1]["tool_choice"]
    assert plain["type"] == "allowed_tools"

    narrow = encode_path_and_body(request, "vllm")[1]
    assert [tool["function"]["name"] for tool in narrow["tools"]] == ["g"]
    assert narrow["tool_choice"] == "required"


EXTENDED = make_chat(
    sampling=SamplingParams(top_k=5, min_p=0.1, repetition_penalty=1.1, typical_p=0.5),
    stopping=StopConditions(ignore_eos=True, min_tokens=2, include_stop=True),
    templating=PromptOptions(arguments={"a": Raw(b"1")}),
)


@pytest.mark.parametrize(
    ("profile", "body", "losses"),
    [
        (
            "openai",
            {},
            {"top_k", "min_p", "repetition_penalty", "typical_p", "ignore_eos", "min_tokens",
             "include_stop", "arguments"},
        ),
        (
            "vllm",
            {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True,
             "min_tokens": 2, "include_stop_str_in_output": True,
             "chat_template_kwargs": {"a": 1}},
            {"typical_p"},
        ),
        (
            "sglang",
            {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True,
             "min_tokens": 2, "no_stop_trim": True, "chat_template_kwargs": {"a": 1}},
            {"typical_p"},
        ),
        (
            "llamacpp",
            {"top_k": 5, "min_p": 0.1, "repeat_penalty": 1.1, "typical_p": 0.5,
             "ignore_eos": True, "chat_template_kwargs": {"a": 1}},
            {"min_tokens", "include_stop"},
        ),
    ],
)  # fmt: skip
def test_extension_parameters_are_encoded_per_profile(
    profile: str, body: dict[str, Any], losses: set[str]
) -> None:
    assert encode_path_and_body(EXTENDED, profile)[1] == body
    assert list_unsupported_parameters(EXTENDED, profile) == {(name, "dropped") for name in losses}


@pytest.mark.parametrize(
    ("output", "vllm", "sglang", "llamacpp"),
    [
        (RegexFormat("a+"), {"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}, None),
        (
            GrammarFormat("g"),
            {"structured_outputs": {"grammar": "g"}},
            {"ebnf": "g"},
            {"grammar": "g"},
        ),
        (ChoiceFormat(("a",)), {"structured_outputs": {"choice": ["a"]}}, None, None),
    ],
)
def test_output_formats_are_encoded_per_profile(
    output: Any, vllm: Any, sglang: Any, llamacpp: Any
) -> None:
    request = make_chat(output=output)
    for profile, body in (("openai", None), ("vllm", vllm), ("sglang", sglang)):
        assert encode_path_and_body(request, profile)[1] == (body or {})
        assert list_unsupported_parameters(request, profile) == (
            set() if body else {("output", "dropped")}
        )
    assert encode_path_and_body(request, "llamacpp")[1] == (llamacpp or {})


def test_json_schema_is_sent_as_raw_bytes() -> None:
    request = make_chat(output=JsonSchemaFormat(Raw(b'{ "b":1, "a":2 }'), "n", strict=True))
    body = OpenAI().encode_request(request).body

    assert b'"schema":{ "b":1, "a":2 }' in body
    assert b'"name":"n"' in body
    assert list_unsupported_parameters(request) == set()
    assert list_unsupported_parameters(make_completion(output=request.output)) == {
        ("output", "dropped")
    }
    assert (
        "response_format" in encode_path_and_body(make_completion(output=request.output), "vllm")[1]
    )


@pytest.mark.parametrize(
    ("request_", "losses"),
    [
        (make_chat(stopping=StopConditions(stop=("a", "b", "c", "d", "e"))), {("stop", "clamped")}),
        (make_chat(sampling=SamplingParams(temperature=3.0)), {("temperature", "clamped")}),
        (make_completion(logprobs=LogprobsOptions(9)), {("top", "clamped")}),
        (make_chat(echo=True), {("echo", "dropped")}),
        (make_chat(best_of=2), {("best_of", "dropped")}),
        (make_chat(suffix="x"), {("suffix", "dropped")}),
        (
            make_chat(response_options=ResponseOptions(token_ids=True)),
            {("token_ids", "dropped")},
        ),
        (make_chat(stopping=StopConditions(overflow="error")), set()),
        (make_chat(stopping=StopConditions(overflow="truncate")), {("overflow", "dropped")}),
        (make_chat(priority=1), {("priority", "dropped")}),
        (make_chat(tools=(Tool("f", kind="custom"),)), set()),
        (make_chat(logprobs=LogprobsOptions(-1)), {("top", "clamped")}),
        (make_completion(tools=TOOLS), {("tools", "dropped")}),
        (EmbeddingRequest(model="m", inputs=("a",), instruction="q"), {("instruction", "dropped")}),
        (EmbeddingRequest(model="m", inputs=("a",), normalize=True), {("normalize", "dropped")}),
    ],
)
def test_unsupported_parameters_are_reported(
    request_: Request, losses: set[tuple[str, str]]
) -> None:
    assert list_unsupported_parameters(request_) == losses


def test_clamped_values_are_sent() -> None:
    request = make_chat(
        stopping=StopConditions(stop=("a", "b", "c", "d", "e")),
        sampling=SamplingParams(temperature=3.0),
    )

    assert encode_path_and_body(request)[1] == {"temperature": 2.0, "stop": ["a", "b", "c", "d"]}
    assert encode_path_and_body(make_chat(sampling=SamplingParams(top_p=0.0)), "vllm")[1] == {
        "top_p": 1e-6
    }


def test_greedy_sampling_is_sent_as_temperature_zero() -> None:
    assert encode_path_and_body(make_chat(sampling=SamplingParams(do_sample=False)))[1] == {
        "temperature": 0.0
    }
    assert list_unsupported_parameters(make_chat(sampling=SamplingParams(do_sample=False))) == set()


def test_overflow_truncate_is_sent_as_truncate_prompt_tokens() -> None:
    request = make_chat(stopping=StopConditions(overflow="truncate"))
    assert encode_path_and_body(request, "vllm")[1] == {"truncate_prompt_tokens": -1}
    assert list_unsupported_parameters(request, "vllm") == set()


def test_beam_search_is_encoded_for_vllm() -> None:
    request = make_chat(sampling=SamplingParams(beam_width=2), n=2)
    assert encode_path_and_body(request, "vllm")[1] == {"n": 2, "use_beam_search": True}
    assert list_unsupported_parameters(request, "vllm") == set()

    wider = make_chat(sampling=SamplingParams(beam_width=4))
    assert list_unsupported_parameters(wider, "vllm") == {("beam_width", "approximated")}


def test_unknown_fields_never_override_gateway_fields() -> None:
    raws = {"foo": Raw(b"[1, 2]"), "model": Raw(b'"evil"'), "cache_salt": Raw(b'"s"')}
    request = make_chat(extra=raws)

    wire = OpenAI().encode_request(request)

    assert b'"foo":[1, 2]' in wire.body
    assert json.loads(wire.body)["model"] == "m"
    assert list_unsupported_parameters(request) == {("model", "dropped"), ("cache_salt", "dropped")}


def test_powers_parameters_are_sent_only_if_enabled() -> None:
    request = make_chat(
        priority=1, templating=PromptOptions(template="T"), extra={"cache_salt": Raw(b'"s"')}
    )
    assert encode_path_and_body(request, "vllm")[1] == {}
    assert {name for name, _ in list_unsupported_parameters(request, "vllm")} == {
        "priority",
        "template",
        "cache_salt",
    }
    assert encode_path_and_body(request, "vllm", powers=True)[1] == {
        "priority": 1,
        "chat_template": "T",
        "cache_salt": "s",
    }
    assert list_unsupported_parameters(request, "vllm", powers=True) == set()


def test_server_template_mode_accepts_one_text_prompt() -> None:
    server = PromptOptions(mode="server")
    for prompts in (("a", "b"), ((1, 2),)):
        with pytest.raises(UnsupportedFeature) as excinfo:
            OpenAI().encode_request(make_completion(prompts=prompts, templating=server))
        assert excinfo.value.param == "prompt"

    several = make_completion(prompts=("a", "b"), templating=server)
    assert OpenAI().unsupported_parameters(several, {}) == (
        UnsupportedParameter("prompt", "dropped", path="prompts"),
    )


def test_losses_use_the_client_field_names(make_call: MakeCall) -> None:
    names = OpenAI().field_names(make_call("chat"))
    request = make_chat(
        logprobs=LogprobsOptions(21),
        output=RegexFormat("a"),
        stopping=StopConditions(truncate_prompt=3),
    )

    assert set(OpenAI().unsupported_parameters(request, names)) == {
        UnsupportedParameter("top_logprobs", "clamped", "21 to 20", "logprobs.top"),
        UnsupportedParameter("response_format", "dropped", path="output"),
        UnsupportedParameter("truncate_prompt_tokens", "dropped", path="stopping.truncate_prompt"),
    }


def test_unknown_profile_is_rejected() -> None:
    assert OpenAI.profiles[0] == "openai"
    with pytest.raises(ValueError, match="known: openai, vllm, sglang, llamacpp"):
        OpenAI("tgi")


def test_decoded_request_is_encoded_to_the_same_body(make_call: MakeCall) -> None:
    body = {
        "model": "m",
        "messages": HI,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "seed": -7,
        "stop": ["x"],
        "logit_bias": {"3": 1.0},
        "reasoning_effort": "low",
        "parallel_tool_calls": True,
        "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_object"},
        "user": "u",
        "metadata": {"a": "b"},
        "verbosity": "low",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    adapter = OpenAI()

    request = adapter.decode_request(make_call("chat", body))

    assert json.loads(adapter.encode_request(request).body) == body
    assert adapter.unsupported_parameters(request, {}) == ()


def test_stop_strings_are_lost_if_the_client_needs_the_matched_one() -> None:
    request = make_chat(
        stopping=StopConditions(stop=("a",)), response_options=ResponseOptions(matched_stop=True)
    )

    assert list_unsupported_parameters(request, "openai") == {("stop", "dropped")}
    assert list_unsupported_parameters(request, "vllm") == set()


# --- the rest of the context as the limit of other protocols' clients -----------------------------


@pytest.mark.parametrize(
    ("profile", "context_length", "written"),
    [
        ("vllm", None, {"max_tokens": None}),
        ("llamacpp", 100, {}),
        ("openai", None, {}),
        ("openai", 100, {"max_tokens": 94}),
        ("sglang", 100, {"max_tokens": 94}),
        ("interlingua", 3, {"max_tokens": 1}),
    ],
)
def test_completion_without_a_limit_gets_the_rest_of_the_context(
    profile: str, context_length: int | None, written: dict[str, Any]
) -> None:
    request = GenerationRequest(
        model="w",
        kind="completion",
        prompts=("ten bytes!",),
        templating=PromptOptions(mode="raw"),
        fills_context=True,
        context_length=context_length,
    )
    adapter = OpenAI(profile)

    body = json.loads(adapter.encode_request(request).body)
    assert {name: body[name] for name in ("max_tokens",) if name in body} == written
    assert adapter.unsupported_parameters(request, {}) == ()

    by_tokens = replace(request, prompts=((1, 2, 3),), context_length=10)
    limited = replace(request, stopping=StopConditions(max_tokens=5))
    assert json.loads(adapter.encode_request(limited).body)["max_tokens"] == 5
    if profile == "openai":
        assert json.loads(adapter.encode_request(by_tokens).body)["max_tokens"] == 7


def test_completion_of_other_clients_keeps_the_default_of_the_worker() -> None:
    request = GenerationRequest(
        model="w",
        kind="completion",
        prompts=("a",),
        templating=PromptOptions(mode="raw"),
        context_length=10,
    )

    assert "max_tokens" not in json.loads(OpenAI("vllm").encode_request(request).body)


@pytest.mark.parametrize(
    ("profile", "source", "sent", "name"),
    [
        ("openai", "anthropic", "max_tokens", "max_completion_tokens"),
        ("azure", "ollama", "num_predict", "max_completion_tokens"),
        ("openai", "openai responses", "max_output_tokens", "max_completion_tokens"),
        ("openai", "openai", "max_tokens", "max_tokens"),
        ("openai", "openai", "max_completion_tokens", "max_completion_tokens"),
        ("vllm", "anthropic", "max_tokens", "max_tokens"),
        ("vllm", "openai", "max_completion_tokens", "max_completion_tokens"),
        ("llamacpp", "ollama", "num_predict", "max_tokens"),
    ],
)
def test_the_limit_of_tokens_has_the_client_s_name_or_the_worker_s(
    profile: str, source: str, sent: str, name: str
) -> None:
    request = make_chat(
        stopping=StopConditions(max_tokens=9), source=source, provided_fields=frozenset({sent})
    )
    body = encode_path_and_body(request, profile)[1]

    assert {one: body[one] for one in body if one.startswith("max_")} == {name: 9}


@pytest.mark.parametrize(
    ("profile", "expected"),
    [("openai", {"name": "f"}), ("vllm", {"name": "f"})]
    + [(name, {"name": "f", "description": ""}) for name in ("sglang", "llamacpp")],
)
def test_function_without_description_gets_an_empty_one_where_one_is_required(
    profile: str, expected: dict[str, Any]
) -> None:
    _, body = encode_path_and_body(make_chat(tools=(Tool("f"),)), profile)
    assert body["tools"] == [{"type": "function", "function": expected}]
