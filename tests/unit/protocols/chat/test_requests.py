"""Requests of clients become internal requests."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from protocols.core.errors import UnknownParameter
from protocols.core.interfaces import ClientRequest
from protocols.core.request import (
    AllowedTools,
    AnyRequest,
    AudioPart,
    ChoiceFormat,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    NamedTool,
    ReasoningOptions,
    ReasoningPart,
    RefusalPart,
    RegexFormat,
    TextPart,
    ToolCall,
    VideoPart,
)
from protocols.openai.endpoints import OpenAI

MakeCall = Callable[..., ClientRequest]
ADAPTER = OpenAI()
MESSAGES = [{"role": "user", "content": "say hi"}]
C: dict[str, Any] = {"model": "mock", "messages": MESSAGES}
P = {"model": "mock", "prompt": "a b"}
E = {"model": "mock", "input": "a b"}
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {"chat": C, "completion": P, "embedding": E}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": "42"}


def decode_request(make_call: MakeCall, variant: str, **fields: Any) -> AnyRequest:
    return ADAPTER.decode_request(make_call(variant, {**BODIES[variant], **fields}))


def decode_chat(make_call: MakeCall, **fields: Any) -> GenerationRequest:
    request = decode_request(make_call, "chat", **fields)
    assert isinstance(request, GenerationRequest)
    return request


def decode_completion(make_call: MakeCall, **fields: Any) -> GenerationRequest:
    request = decode_request(make_call, "completion", **fields)
    assert isinstance(request, GenerationRequest)
    return request


def decode_embedding(make_call: MakeCall, **fields: Any) -> EmbeddingRequest:
    request = decode_request(make_call, "embedding", **fields)
    assert isinstance(request, EmbeddingRequest)
    return request


def test_null_means_that_the_parameter_is_absent(make_call: MakeCall) -> None:
    names = (
        "max_tokens temperature stop n seed tools stream logprobs top_logprobs logit_bias "
        "tool_choice functions function_call response_format stream_options metadata user "
        "reasoning_effort parallel_tool_calls modalities store"
    )
    nulls = dict.fromkeys(names.split())

    assert decode_chat(make_call, **nulls) == decode_chat(make_call)
    assert decode_completion(
        make_call, logprobs=None, seed=None, prompt=["a b"]
    ) == decode_completion(make_call, prompt=["a b"])
    assert decode_embedding(make_call, encoding_format=None) == decode_embedding(make_call)


def test_minimal_chat_request_is_decoded(make_call: MakeCall) -> None:
    request = decode_chat(make_call)
    assert request == GenerationRequest(
        model="mock",
        kind="chat",
        messages=(Message("user", (TextPart("say hi"),)),),
        response_options=request.response_options,
        provided_fields=frozenset({"model", "messages"}),
    )
    assert request.response_options.usage == "final"


def test_text_modality_is_accepted_and_not_forwarded(make_call: MakeCall) -> None:
    request = decode_chat(make_call, modalities=["text"])

    assert replace(
        request, provided_fields=request.provided_fields - {"modalities"}, extra={}
    ) == decode_chat(make_call)


def test_other_modalities_are_kept_for_the_worker(make_call: MakeCall) -> None:
    request = decode_chat(make_call, modalities=["text", "image"])

    assert request.extra == {"modalities": Raw(b'["text", "image"]')}


def test_scalar_chat_parameters_are_decoded(make_call: MakeCall) -> None:
    request = decode_chat(
        make_call,
        max_tokens=3.0,
        max_completion_tokens=1,
        temperature=0,
        top_p=0,
        n=2,
        stop=" world",
        presence_penalty=-2,
        frequency_penalty=2,
        seed=-1,
        logit_bias={"5": -100},
        user="u",
        metadata={"team": "a"},
        reasoning_effort="low",
    )
    assert request.stopping.max_tokens == 1
    assert request.stopping.stop == (" world",)

    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, request.n) == (0.0, 0.0, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2.0, 2.0)
    assert sampling.seed == -1
    assert sampling.logit_bias == {5: -100.0}
    assert request.labels == {"user": "u", "metadata.team": "a"}
    assert request.reasoning == ReasoningOptions("low")
    assert "seed" in request.provided_fields


def test_vllm_sampling_and_stopping_parameters_are_decoded(make_call: MakeCall) -> None:
    request = decode_chat(
        make_call,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        length_penalty=2,
        use_beam_search=True,
        n=3,
        stop_token_ids=[7],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
        truncate_prompt_tokens=-1,
        allowed_token_ids=[1, 2],
        bad_words=["x"],
    )
    sampling, stopping = request.sampling, request.stopping

    assert (sampling.top_k, sampling.min_p, sampling.beam_width) == (None, 0.1, 3)
    assert (sampling.allowed_token_ids, sampling.bad_words) == ((1, 2), ("x",))
    assert (stopping.stop_token_ids, stopping.include_stop, stopping.min_tokens) == ((7,), True, 2)
    assert (stopping.ignore_eos, stopping.truncate_prompt) == (True, -1)
    assert request.extra == {}


def test_vllm_template_and_response_parameters_are_decoded(make_call: MakeCall) -> None:
    request = decode_chat(
        make_call,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        add_special_tokens=True,
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template="T",
        chat_template_kwargs={"enable_thinking": False},
        include_reasoning=False,
        thinking_token_budget=9,
        priority=3,
        request_id="mine",
        return_token_ids=True,
        structured_outputs={"choice": ["a", "b"]},
    )
    templating, options = request.templating, request.response_options

    assert (templating.template, templating.continue_final) == ("T", True)
    assert {k: bytes(v) for k, v in (templating.arguments or {}).items()} == {
        "enable_thinking": b"false"
    }
    assert request.reasoning == ReasoningOptions(budget=9, include=False)
    assert (request.priority, request.client_id, options.token_ids) == (3, "mine", True)
    assert request.output == ChoiceFormat(("a", "b"))
    assert request.extra == {}


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObjectFormat()),
        ({"structured_outputs": {"regex": "a+"}}, RegexFormat("a+")),
        ({"guided_regex": "a+"}, RegexFormat("a+")),
        ({"guided_choice": ["x"]}, ChoiceFormat(("x",))),
    ],
)
def test_output_formats_are_decoded(
    make_call: MakeCall, fields: dict[str, Any], output: object
) -> None:
    assert decode_chat(make_call, **fields).output == output


def test_json_schema_keeps_its_raw_bytes(make_call: MakeCall) -> None:
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"response_format":{"type":'
        b'"json_schema","json_schema":{"name":"n","strict":true,"schema":{ "b":1, "a":2 }}}}'
    )
    request = ADAPTER.decode_request(make_call("chat", body))

    assert isinstance(request, GenerationRequest)
    assert isinstance(request.output, JsonSchemaFormat)
    assert bytes(request.output.schema) == b'{ "b":1, "a":2 }'
    assert (request.output.name, request.output.strict) == ("n", True)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {"role": "developer", "content": [{"type": "text", "text": "a"}], "name": "n"},
            Message("developer", (TextPart("a"),), "n"),
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
                    {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
                    {"type": "file", "file": {"file_id": "f"}},
                    {"type": "video_url", "video_url": {"url": "v"}},
                ],
            },
            Message(
                "user",
                (
                    TextPart("a"),
                    ImagePart("data:x", "low"),
                    AudioPart("AA", "wav"),
                    FilePart("f"),
                    VideoPart("v"),
                ),
            ),
        ),
        (
            {"role": "assistant", "content": "a", "refusal": "no", "reasoning_content": "hm"},
            Message("assistant", (ReasoningPart("hm"), TextPart("a"), RefusalPart("no"))),
        ),
        ({"role": "assistant", "refusal": "no"}, Message("assistant", (RefusalPart("no"),))),
        ({"role": "user", "content": ""}, Message("user", (TextPart(""),))),
    ],
)
def test_messages_of_each_role_are_decoded(
    make_call: MakeCall, message: dict[str, Any], expected: Message
) -> None:
    assert decode_chat(make_call, messages=[message]).messages == (expected,)


def test_tool_calls_and_tool_choice_are_decoded(make_call: MakeCall) -> None:
    request = decode_chat(
        make_call,
        messages=[*MESSAGES, CALLED, ANSWERED],
        tools=[F, {"type": "custom", "custom": {"name": "g"}}],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
        },
    )

    assert request.messages[1].tool_calls == (ToolCall("c1", "f", "{}"),)
    assert request.messages[1].parts == ()
    assert request.messages[2] == Message("tool", (TextPart("42"),), tool_call_id="c1")
    assert [(tool.name, tool.kind) for tool in request.tools] == [
        ("f", "function"),
        ("g", "custom"),
    ]
    assert request.tool_choice == AllowedTools("required", ("f",))


def test_legacy_functions_are_decoded_as_tools(make_call: MakeCall) -> None:
    request = decode_chat(
        make_call,
        functions=[F["function"]],
        function_call={"name": "f"},
        messages=[
            *MESSAGES,
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "42"},
        ],
    )
    assert request.legacy_functions
    assert request.tool_choice == NamedTool("f")

    call = request.messages[1].tool_calls[0]
    assert (request.messages[2].role, request.messages[2].tool_call_id) == ("tool", call.id)


def test_stream_options_are_decoded(make_call: MakeCall) -> None:
    assert decode_chat(make_call, stream=True).response_options.usage == "none"
    assert decode_chat(make_call, stream=True, stream_options={}).response_options.usage == "none"

    options = {"include_usage": True}
    assert (
        decode_chat(make_call, stream=True, stream_options=options).response_options.usage
        == "final"
    )

    options["continuous_usage_stats"] = True
    assert (
        decode_chat(make_call, stream=True, stream_options=options).response_options.usage == "each"
    )


def test_unknown_fields_are_kept_ignored_or_rejected(make_call: MakeCall) -> None:
    call = make_call("chat", {**C, "foo": {"a": 1}, "verbosity": "low"})
    request = ADAPTER.decode_request(call)

    assert {k: bytes(v) for k, v in request.extra.items()} == {
        "foo": b'{"a": 1}',
        "verbosity": b'"low"',
    }
    assert OpenAI(unknown="ignore").decode_request(call).extra == {}
    with pytest.raises(UnknownParameter) as excinfo:
        OpenAI(unknown="reject").decode_request(call)
    assert excinfo.value.param == "foo"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", ("",)),
        ("a b", ("a b",)),
        (["a", "b c"], ("a", "b c")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_completion_prompts_are_decoded(make_call: MakeCall, prompt: Any, prompts: object) -> None:
    assert decode_completion(make_call, prompt=prompt).prompts == prompts


def test_completion_parameters_are_decoded(make_call: MakeCall) -> None:
    plain = decode_completion(make_call)
    assert (plain.stopping.max_tokens, plain.templating.mode) == (16, "raw")
    assert "max_tokens" not in plain.provided_fields

    scored = decode_completion(
        make_call, max_tokens=0, echo=True, logprobs=1, suffix="z", best_of=1
    )
    assert scored.stopping.max_tokens == 0
    assert (scored.echo, scored.insert_before, scored.best_of) == (True, "z", 1)
    assert scored.logprobs == LogprobsOptions(1, 1)
    assert decode_completion(make_call, logprobs=0).logprobs == LogprobsOptions(0)


def test_embedding_request_is_decoded(make_call: MakeCall) -> None:
    request = decode_embedding(
        make_call, input=["a", "b"], encoding_format="base64", dimensions=8, user="u"
    )
    assert request.inputs == ("a", "b")
    assert (request.encoding, request.dimensions, request.labels) == ("base64", 8, {"user": "u"})
    assert decode_embedding(make_call, input=[[1, 2], [3]]).inputs == ((1, 2), (3,))
    assert decode_embedding(make_call).encoding == "float"


def test_routing_info_has_model_stream_and_client_id(make_call: MakeCall) -> None:
    call = make_call("chat", {**C, "stream": True}, {"x-client-request-id": "mine"})
    envelope = ADAPTER.read_routing_info(call)

    assert (envelope.model, envelope.stream, envelope.client_id) == ("mock", True, "mine")
    assert ADAPTER.decode_request(call).client_id == "mine"


@pytest.mark.parametrize(
    ("header", "seconds"), [("600", 600.0), ("0", None), ("x", None), ("inf", None), ("nan", None)]
)
def test_stainless_read_timeout_header_sets_the_timeout(
    make_call: MakeCall, header: str, seconds: float | None
) -> None:
    call = make_call("chat", C, {"x-stainless-read-timeout": header})
    assert ADAPTER.decode_request(call).timeout == seconds


def test_legacy_function_call_needs_no_function_result(make_call: MakeCall) -> None:
    called = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    request = decode_chat(make_call, messages=[*MESSAGES, called, *MESSAGES])

    assert [call.name for call in request.messages[1].tool_calls] == ["f"]


def test_tool_call_may_have_two_results(make_call: MakeCall) -> None:
    request = decode_chat(make_call, messages=[*MESSAGES, CALLED, ANSWERED, ANSWERED])

    assert [message.role for message in request.messages[2:]] == ["tool", "tool"]
