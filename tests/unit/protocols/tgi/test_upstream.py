"""Requests for workers, and their losses."""

import json
from typing import Any

import pytest
from msgspec import Raw

from protocols.core.errors import UnsupportedFeature
from protocols.core.interfaces import ModelMetadataReader
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AudioPart,
    ChoiceFormat,
    EmbeddingRequest,
    ExtraFields,
    FilePart,
    GenerationRequest,
    GrammarFormat,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    NamedTool,
    PromptOptions,
    ReasoningPart,
    RefusalPart,
    RegexFormat,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
    ToolCall,
    VideoPart,
)
from protocols.tgi import TGI

MESSAGES = (Message("user", (TextPart("hi"),)),)
HI = [{"role": "user", "content": "hi"}]
SCHEMA = Raw(b'{"properties": {"a": {}}}')
NO_USAGE = ResponseOptions(usage="none")
F = Tool("f", parameters=Raw(b'{"type": "object"}'))
FUNCTION_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = ToolCall("1", "f", "{}")


def make_chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "m", "kind": "chat", "messages": MESSAGES, **fields})


def make_completion(**fields: Any) -> GenerationRequest:
    fields = {"prompts": ("a b",), "templating": PromptOptions(mode="raw"), **fields}
    return GenerationRequest(model="m", kind="completion", **fields)


def build_sampling_request(**fields: Any) -> GenerationRequest:
    return make_completion(sampling=SamplingParams(**fields))


def build_stopping_request(**fields: Any) -> GenerationRequest:
    return make_completion(stopping=StopConditions(**fields))


def list_unsupported_parameters(
    adapter: TGI, request: GenerationRequest | EmbeddingRequest
) -> set[tuple[str, str]]:
    return {
        (loss.path or loss.field, loss.reason)
        for loss in adapter.unsupported_parameters(request, {})
    }


# --- prompts --------------------------------------------------------------------------------------

PROMPTS: list[tuple[GenerationRequest, dict[str, Any], set[tuple[str, str]]]] = [
    (make_completion(), {}, set()),
    (make_completion(n=1, best_of=1), {}, set()),
    (build_sampling_request(temperature=0.7), {"temperature": 0.7}, set()),
    (
        build_sampling_request(temperature=1e-9),
        {"temperature": 1e-6},
        {("sampling.temperature", "clamped")},
    ),
    (
        build_sampling_request(temperature=0.0, top_p=0.5, top_k=3, typical_p=0.2),
        {"do_sample": False},
        set(),
    ),
    (build_sampling_request(do_sample=False, temperature=0.7), {"do_sample": False}, set()),
    (build_sampling_request(do_sample=True), {}, set()),
    (build_sampling_request(top_p=1.0, typical_p=1.0), {}, set()),
    (
        build_sampling_request(top_p=0.5, typical_p=0.4, top_k=7),
        {"top_p": 0.5, "typical_p": 0.4, "top_k": 7},
        set(),
    ),
    (build_sampling_request(top_p=0.0), {"top_p": 1e-6}, {("sampling.top_p", "clamped")}),
    (build_sampling_request(seed=2**64 - 1), {"seed": 2**64 - 1}, set()),
    (build_sampling_request(repetition_penalty=1.5), {"repetition_penalty": 1.5}, set()),
    (build_sampling_request(frequency_penalty=-2.0), {"frequency_penalty": -2.0}, set()),
    (build_sampling_request(presence_penalty=1.0), {}, {("sampling.presence_penalty", "dropped")}),
    (build_sampling_request(watermark=True), {"watermark": True}, set()),
    (build_sampling_request(logit_bias={1: 2.0}), {}, {("sampling.logit_bias", "dropped")}),
    (build_stopping_request(max_tokens=5), {"max_new_tokens": 5}, set()),
    (
        build_stopping_request(max_tokens=0),
        {"max_new_tokens": 1},
        {("stopping.max_tokens", "clamped")},
    ),
    (
        build_stopping_request(stop=("x", "y")),
        {"stop": ["x", "y"]},
        {("stopping.stop", "approximated")},
    ),
    (
        build_stopping_request(stop=tuple("abcde")),
        {"stop": [*"abcd"]},
        {("stopping.stop", "approximated")},
    ),
    (
        build_stopping_request(stop=("x",), include_stop=True),
        {"stop": ["x"]},
        {("stopping.stop", "approximated"), ("stopping.include_stop", "dropped")},
    ),
    (build_stopping_request(truncate_prompt=9), {"truncate": 9}, set()),
    (build_stopping_request(truncate_prompt=-1), {}, {("stopping.truncate_prompt", "dropped")}),
    (build_stopping_request(overflow="truncate"), {}, {("stopping.overflow", "dropped")}),
    (build_stopping_request(overflow="truncate", truncate_prompt=9), {"truncate": 9}, set()),
    (build_stopping_request(overflow="error"), {}, set()),
    (build_stopping_request(skip_special_tokens=False), {}, set()),
    (build_stopping_request(ignore_eos=True), {}, {("stopping.ignore_eos", "dropped")}),
    (make_completion(adapter="fine"), {"adapter_id": "fine"}, set()),
    (
        make_completion(output=RegexFormat("a+")),
        {"grammar": {"type": "regex", "value": "a+"}},
        set(),
    ),
    (
        make_completion(output=ChoiceFormat(("a.b", "c"))),
        {"grammar": {"type": "regex", "value": r"(a\.b|c)"}},
        set(),
    ),
    (
        make_completion(output=JsonSchemaFormat(SCHEMA)),
        {"grammar": {"type": "json", "value": {"properties": {"a": {}}}}},
        set(),
    ),
    (make_completion(output=JsonObjectFormat()), {}, {("output", "dropped")}),
    (make_completion(output=GrammarFormat("x")), {}, {("output", "dropped")}),
    (make_completion(logprobs=LogprobsOptions()), {}, set()),
    (make_completion(logprobs=LogprobsOptions(3)), {"top_n_tokens": 3}, set()),
    (
        make_completion(logprobs=LogprobsOptions(6)),
        {"top_n_tokens": 5},
        {("logprobs.top", "clamped")},
    ),
    (
        make_completion(logprobs=LogprobsOptions(-1)),
        {"top_n_tokens": 5},
        {("logprobs.top", "clamped")},
    ),
    (
        make_completion(logprobs=LogprobsOptions(0, prompt=0), echo=True, stream=True),
        {},
        {("logprobs.prompt", "dropped")},
    ),
    (make_completion(n=3), {}, {("n", "dropped")}),
    (make_completion(prompts=("a b", "c")), {}, {("prompts", "dropped")}),
    (make_completion(best_of=2, stream=True), {}, {("best_of", "dropped")}),
    (
        make_completion(templating=PromptOptions(mode="raw", add_special_tokens=True)),
        {},
        set(),
    ),
    (
        make_completion(templating=PromptOptions(mode="raw", add_special_tokens=False)),
        {},
        {("templating.add_special_tokens", "dropped")},
    ),
    (make_completion(extra={"foo": Raw(b"1")}), {}, {("foo", "dropped")}),
]


@pytest.mark.parametrize(("request_", "parameters", "losses"), PROMPTS)
def test_prompt_is_sent_to_generate_stream_with_its_parameters(
    request_: GenerationRequest, parameters: dict[str, Any], losses: set[tuple[str, str]]
) -> None:
    wire = TGI().encode_request(request_)

    assert (wire.method, wire.path) == ("POST", "/generate_stream")
    assert wire.headers == (("Content-Type", "application/json"),)

    always = {"details": True, "return_full_text": False, "do_sample": True}
    assert json.loads(wire.body) == {"inputs": "a b", "parameters": {**always, **parameters}}
    assert list_unsupported_parameters(TGI(), request_) == losses


UNARY_REQUESTS: list[tuple[GenerationRequest, dict[str, Any], set[tuple[str, str]]]] = [
    (make_completion(response_options=NO_USAGE), {}, set()),
    (make_completion(best_of=2), {"best_of": 2}, set()),
    (make_completion(best_of=5), {"best_of": 2}, {("best_of", "clamped")}),
    (
        make_completion(best_of=2, n=2),
        {"best_of": 2},
        {("best_of", "approximated"), ("n", "dropped")},
    ),
    (
        make_completion(best_of=2, sampling=SamplingParams(seed=1), response_options=NO_USAGE),
        {"seed": 1},
        {("best_of", "dropped")},
    ),
    (
        make_completion(
            best_of=2, sampling=SamplingParams(temperature=0), response_options=NO_USAGE
        ),
        {"do_sample": False},
        {("best_of", "dropped")},
    ),
    (
        make_completion(logprobs=LogprobsOptions(2, prompt=2), echo=True),
        {"top_n_tokens": 2, "decoder_input_details": True},
        set(),
    ),
]


@pytest.mark.parametrize(("request_", "parameters", "losses"), UNARY_REQUESTS)
def test_parameters_that_need_a_unary_response_use_generate(
    request_: GenerationRequest, parameters: dict[str, Any], losses: set[tuple[str, str]]
) -> None:
    wire = TGI().encode_request(request_)

    assert wire.path == "/generate"

    always = {"details": True, "return_full_text": False, "do_sample": True}
    assert json.loads(wire.body)["parameters"] == {**always, **parameters}
    assert list_unsupported_parameters(TGI(), request_) == losses


def test_streaming_request_without_usage_uses_generate_stream() -> None:
    assert (
        TGI().encode_request(make_completion(stream=True, response_options=NO_USAGE)).path
        == "/generate_stream"
    )


def test_token_id_prompt_raises_unsupported_feature() -> None:
    with pytest.raises(UnsupportedFeature, match="not token ids") as excinfo:
        TGI().encode_request(make_completion(prompts=((1, 2),)))
    assert excinfo.value.param == "prompt"


def test_embeddings_are_rejected_and_their_parameters_reported() -> None:
    request = EmbeddingRequest(model="m", inputs=("a",), dimensions=3, extra={"x": Raw(b"1")})
    with pytest.raises(UnsupportedFeature, match="do not support embeddings"):
        TGI().encode_request(request)
    with pytest.raises(UnsupportedFeature, match="do not support embeddings"):
        TGI().create_decoder(request)
    assert list_unsupported_parameters(TGI(), request) == {
        ("dimensions", "dropped"),
        ("x", "dropped"),
    }


def test_losses_use_the_client_field_names() -> None:
    names = {"prompts": "text_input", "n": "choices", "stopping.stop": "stop_words"}
    request = make_completion(prompts=("a", "b"), n=2, stopping=StopConditions(stop=("x",)))

    assert set(TGI().unsupported_parameters(request, names)) == {
        UnsupportedParameter("text_input", "dropped", path="prompts"),
        UnsupportedParameter("choices", "dropped", path="n"),
        UnsupportedParameter("stop_words", "approximated", path="stopping.stop"),
    }


# --- conversations --------------------------------------------------------------------------------

CHATS: list[tuple[GenerationRequest, dict[str, Any], set[tuple[str, str]]]] = [
    (make_chat(), {}, set()),
    (make_chat(n=1), {}, set()),
    (make_chat(n=2), {}, {("n", "dropped")}),
    (
        make_chat(stream=True),
        {"stream": True, "stream_options": {"include_usage": True}},
        set(),
    ),
    (
        make_chat(
            stopping=StopConditions(max_tokens=3),
            provided_fields=frozenset({"max_completion_tokens"}),
        ),
        {"max_tokens": 3},
        set(),
    ),
    (make_chat(sampling=SamplingParams(temperature=3.0, top_p=1.0)), {"temperature": 3.0}, set()),
    (make_chat(sampling=SamplingParams(temperature=0.0, top_p=0.5)), {"temperature": 0.0}, set()),
    (make_chat(sampling=SamplingParams(do_sample=False, top_p=0.5)), {"temperature": 0.0}, set()),
    (make_chat(sampling=SamplingParams(top_p=0.5)), {"top_p": 0.5}, set()),
    (
        make_chat(sampling=SamplingParams(seed=2**64 - 1)),
        {"seed": 2**63 - 1},
        {("sampling.seed", "clamped")},
    ),
    (make_chat(sampling=SamplingParams(top_k=4)), {}, {("sampling.top_k", "dropped")}),
    (
        make_chat(sampling=SamplingParams(presence_penalty=0.5, frequency_penalty=0.5)),
        {"frequency_penalty": 0.5},
        {("sampling.presence_penalty", "dropped")},
    ),
    (
        make_chat(sampling=SamplingParams(logit_bias={1: 1.0})),
        {},
        {("sampling.logit_bias", "dropped")},
    ),
    (
        make_chat(stopping=StopConditions(stop=tuple("abcde"))),
        {"stop": [*"abcd"]},
        {("stopping.stop", "approximated")},
    ),
    (
        make_chat(logprobs=LogprobsOptions(9)),
        {"logprobs": True, "top_logprobs": 5},
        {("logprobs.top", "clamped")},
    ),
    (make_chat(adapter="fine"), {"model": "fine"}, set()),
    (
        make_chat(output=JsonSchemaFormat(SCHEMA)),
        {"response_format": {"type": "json", "value": {"properties": {"a": {}}}}},
        set(),
    ),
    (make_chat(output=JsonObjectFormat()), {}, {("output", "dropped")}),
    (make_chat(tools=(F,)), {"tools": [FUNCTION_TOOL]}, set()),
    (
        make_chat(tools=(F,), tool_choice=NamedTool("f"), output=RegexFormat("x")),
        {
            "tools": [FUNCTION_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
        {("output", "dropped")},
    ),
    (
        make_chat(tools=(F,), tool_choice="none", output=RegexFormat("x")),
        {"response_format": {"type": "regex", "value": "x"}},
        set(),
    ),
    (
        make_chat(tools=(Tool("g"),)),
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "g", "parameters": {"type": "object", "properties": {}}},
                }
            ]
        },
        set(),
    ),
    (
        make_chat(tools=(F,), parallel_tools=False),
        {"tools": [FUNCTION_TOOL]},
        {("parallel_tools", "dropped")},
    ),
    (
        make_chat(extra={"top_a": Raw(b"1")}, labels={"user": "u"}),
        {},
        {("top_a", "dropped"), ("labels.user", "dropped")},
    ),
    (
        make_chat(response_options=ResponseOptions(token_ids=True)),
        {},
        {("response_options.token_ids", "dropped")},
    ),
    (
        GenerationRequest(
            model="m", kind="completion", prompts=("hi",), templating=PromptOptions(mode="server")
        ),
        {},
        set(),
    ),
]


@pytest.mark.parametrize(("request_", "body", "losses"), CHATS)
def test_chat_is_sent_to_chat_completions_with_its_parameters(
    request_: GenerationRequest, body: dict[str, Any], losses: set[tuple[str, str]]
) -> None:
    wire = TGI().encode_request(request_)

    assert (wire.method, wire.path) == ("POST", "/v1/chat/completions")
    assert json.loads(wire.body) == {"model": "m", "messages": HI, **body}
    assert list_unsupported_parameters(TGI(), request_) == losses


TURNS: list[tuple[Message, dict[str, Any], dict[str, str]]] = [
    (Message("developer", (TextPart("x"),)), {"role": "system", "content": "x"}, {}),
    (Message("assistant"), {"role": "assistant", "content": ""}, {}),
    (
        Message("assistant", tool_calls=(CALL,)),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {},
    ),
    (
        Message("assistant", (TextPart("so"), ReasoningPart("hm")), tool_calls=(CALL,)),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"reasoning_content": "earlier reasoning", "content": "text beside tool calls"},
    ),
    (
        Message("user", (TextPart("see"), ImagePart("data:,"), FilePart("f"))),
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:,"}},
            ],
        },
        {"content[2]": "files"},
    ),
    (
        Message("user", (AudioPart("x"), VideoPart("y"))),
        {"role": "user", "content": ""},
        {"content[0]": "audio", "content[1]": "videos"},
    ),
]


def test_refusal_is_sent_as_text_and_reported() -> None:
    request = make_chat(messages=(Message("assistant", (RefusalPart("no"),)),))

    [message] = json.loads(TGI().encode_request(request).body)["messages"]

    assert message == {"role": "assistant", "content": "no"}
    assert TGI().unsupported_parameters(request, {}) == (
        UnsupportedParameter("messages[0].refusal", "approximated", "refusals", "messages"),
    )


@pytest.mark.parametrize(("message", "written", "lost"), TURNS)
def test_chat_message_is_encoded_and_dropped_parts_reported(
    message: Message, written: dict[str, Any], lost: dict[str, str]
) -> None:
    request = make_chat(messages=(message,))

    assert json.loads(TGI().encode_request(request).body)["messages"] == [written]

    losses = TGI().unsupported_parameters(request, {})
    assert losses == tuple(
        UnsupportedParameter(f"messages[0].{place}", "dropped", what, "messages")
        for place, what in lost.items()
    )


# --- metadata -------------------------------------------------------------------------------------

INFO = (
    b'{"model_id":"org/m1","model_sha":null,"model_pipeline_tag":"text-generation",'
    b'"max_concurrent_requests":128,"max_best_of":3,"max_stop_sequences":1,"max_input_tokens":1024,'
    b'"max_total_tokens":2048,"validation_workers":2,"max_client_batch_size":4,'
    b'"router":"text-generation-router","version":"3.3.5","sha":"abc","docker_label":null}'
)


def test_metadata_request_reads_info_and_health_check_reads_health() -> None:
    adapter = TGI()
    assert isinstance(adapter, ModelMetadataReader)

    [question] = adapter.metadata_requests("m")
    assert (question.method, question.path, question.body) == ("GET", "/info", b"")
    assert (adapter.health_request.method, adapter.health_request.path) == ("GET", "/health")


def test_metadata_limits_apply_only_to_their_model() -> None:
    adapter = TGI()
    request = make_completion(
        best_of=4,
        stopping=StopConditions(stop=("a", "b"), truncate_prompt=-1),
    )
    longer = build_stopping_request(truncate_prompt=2000)

    assert adapter.load_metadata("m", [INFO]) == 128

    parameters = json.loads(adapter.encode_request(request).body)["parameters"]
    assert (parameters["best_of"], parameters["stop"], parameters["truncate"]) == (3, ["a"], 1024)
    assert list_unsupported_parameters(adapter, request) == {
        ("best_of", "clamped"),
        ("stopping.stop", "approximated"),
    }
    assert json.loads(adapter.encode_request(longer).body)["parameters"]["truncate"] == 1024
    assert list_unsupported_parameters(adapter, longer) == {("stopping.truncate_prompt", "clamped")}
    assert (
        list_unsupported_parameters(adapter, build_stopping_request(overflow="truncate")) == set()
    )

    other = GenerationRequest(model="other", kind="completion", prompts=("x",), best_of=4)
    assert json.loads(adapter.encode_request(other).body)["parameters"]["best_of"] == 2


@pytest.mark.parametrize(
    ("answers", "capacity", "best_of"),
    [
        ([], None, 2),
        ([None], None, 2),
        ([b"no JSON"], None, 2),
        ([b"[1]"], None, 2),
        ([b"\xff"], None, 2),
        ([b"[" * 10_000], None, 2),
        ([b'{"max_best_of":-1}'], None, 2),
        ([b"{}"], None, 2),
        ([b'{"max_concurrent_requests":0,"max_best_of":4}'], None, 4),
        ([b'{"max_concurrent_requests":7}'], 7, 2),
    ],
)
def test_unreadable_metadata_leaves_the_defaults(
    answers: list[bytes | None], capacity: int | None, best_of: int
) -> None:
    adapter = TGI()
    assert adapter.load_metadata("m", answers) == capacity

    parameters = json.loads(adapter.encode_request(make_completion(best_of=9)).body)["parameters"]
    assert parameters["best_of"] == best_of


def test_max_input_length_of_earlier_releases_is_read() -> None:
    adapter = TGI()
    adapter.load_metadata("m", [b'{"max_input_length":9,"max_best_of":1}'])

    wire = adapter.encode_request(build_stopping_request(truncate_prompt=-1))

    assert json.loads(wire.body)["parameters"]["truncate"] == 9
    assert list_unsupported_parameters(adapter, make_completion(best_of=2)) == {
        ("best_of", "dropped")
    }


def test_unknown_profile_is_rejected() -> None:
    assert TGI("3").name == "tgi"
    with pytest.raises(ValueError, match="no profile '2' of tgi; known: 3"):
        TGI("2")


UNKNOWN_KEYS: dict[str, Any] = {
    "extra": {"later": Raw(b"1"), "decoder_input_details": Raw(b"true")},
    "field_extra": (ExtraFields("parameters", {("x",): 2}, ("parameters",)),),
}


def test_unknown_keys_of_own_clients_reach_the_place_that_they_had() -> None:
    request = make_completion(**UNKNOWN_KEYS, source="tgi")

    body = json.loads(TGI().encode_request(request).body)

    assert (body["later"], body["parameters"]["x"]) == (1, 2)
    assert [one.field for one in TGI().unsupported_parameters(request, {})] == [
        "decoder_input_details"
    ]


def test_unknown_keys_of_other_clients_are_reported() -> None:
    request = make_completion(extra={"later": Raw(b"1")}, source="openai")

    assert "later" not in json.loads(TGI().encode_request(request).body)
    assert [one.field for one in TGI().unsupported_parameters(request, {})] == ["later"]


def test_unknown_keys_alone_lose_nothing_at_own_workers() -> None:
    request = make_completion(extra={"later": Raw(b"1")}, source="tgi")

    assert TGI().unsupported_parameters(request, {}) == ()
