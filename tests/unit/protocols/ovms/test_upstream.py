"""Requests for servers of either release, and their losses."""

import json
from typing import Any

import pytest
from msgspec import Raw

from protocols.core.errors import UnsupportedFeature
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AllowedTools,
    AudioPart,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
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
    VideoPart,
)
from protocols.ovms.endpoints import OVMS

MESSAGES = (Message("user", (TextPart("hi"),)),)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def make_chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "m", "kind": "chat", "messages": MESSAGES, **fields})


def make_completion(**fields: Any) -> GenerationRequest:
    fields = {"prompts": ("a b",), "templating": PromptOptions(mode="raw"), **fields}
    return GenerationRequest(model="m", kind="completion", **fields)


def encode_body(request: Request, profile: str = "2026") -> Any:
    """Return the body without the model and plain messages."""
    body = json.loads(OVMS(profile).encode_request(request).body)
    assert body.pop("model") == "m"
    if body.get("messages") == HI:
        del body["messages"]
    return body


def list_unsupported_parameters(request: Request, profile: str = "2026") -> set[tuple[str, str]]:
    """Return the paths and kinds of the losses."""
    unsupported = OVMS(profile).unsupported_parameters(request, {})
    return {(loss.path or loss.field, loss.reason) for loss in unsupported}


Lost = set[tuple[str, str]]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BEAMS = SamplingParams(beam_width=4)

TODAY: list[tuple[GenerationRequest, dict[str, Any], Lost]] = [
    (make_chat(), {}, set()),
    (make_chat(stream=True), STREAM, set()),
    (make_chat(stream=True, response_options=ResponseOptions(usage="each")), STREAM, set()),
    (
        make_chat(
            sampling=SamplingParams(
                temperature=2.0,
                top_p=0.5,
                top_k=5,
                min_p=0.1,
                seed=7,
                repetition_penalty=1.1,
                presence_penalty=1.0,
                frequency_penalty=-1.0,
                length_penalty=0.5,
            ),
            stopping=StopConditions(
                max_tokens=5,
                stop=("x",),
                include_stop=True,
                ignore_eos=True,
                skip_special_tokens=False,
            ),
        ),
        {
            "temperature": 2.0,
            "top_p": 0.5,
            "top_k": 5,
            "min_p": 0.1,
            "seed": 7,
            "repetition_penalty": 1.1,
            "presence_penalty": 1.0,
            "frequency_penalty": -1.0,
            "length_penalty": 0.5,
            "max_tokens": 5,
            "stop": ["x"],
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "skip_special_tokens": False,
        },
        set(),
    ),
    (
        make_chat(
            stopping=StopConditions(max_tokens=5),
            provided_fields=frozenset({"max_completion_tokens"}),
        ),
        {"max_completion_tokens": 5},
        set(),
    ),
    (
        make_chat(stopping=StopConditions(max_tokens=2**32)),
        {"max_tokens": 2**32 - 1},
        {("stopping.max_tokens", "clamped")},
    ),
    (
        make_completion(stopping=StopConditions(max_tokens=0)),
        {"max_tokens": 1},
        {("stopping.max_tokens", "clamped")},
    ),
    (
        make_chat(sampling=SamplingParams(top_p=0.0, min_p=1.0)),
        {"top_p": 1e-6, "min_p": 0.999999},
        {("sampling.top_p", "clamped"), ("sampling.min_p", "clamped")},
    ),
    (make_chat(sampling=SamplingParams(seed=2**32 - 1)), {"seed": 2**32 - 1}, set()),
    (
        make_chat(sampling=SamplingParams(seed=2**32 + 5)),
        {"seed": 5},
        {("sampling.seed", "approximated")},
    ),
    (
        make_chat(sampling=SamplingParams(seed=2**64 - 1)),
        {"seed": 2**32 - 1},
        {("sampling.seed", "approximated")},
    ),
    (
        make_chat(sampling=SamplingParams(logit_bias={1: 1.0})),
        {},
        {("sampling.logit_bias", "dropped")},
    ),
    (make_chat(sampling=SamplingParams(do_sample=False)), {"temperature": 0.0}, set()),
    # stop strings
    (make_chat(stopping=StopConditions(stop=("x",))), {"stop": ["x"]}, set()),
    (
        make_chat(stopping=StopConditions(stop=tuple("abcdefghijklmnopq"))),
        {"stop": list("abcdefghijklmnop")},
        {("stopping.stop", "clamped")},
    ),
    (
        make_chat(stream=True, stopping=StopConditions(stop=("x",), include_stop=False)),
        STREAM | {"stop": ["x"]},
        {("stopping.stop", "approximated")},
    ),
    (
        make_chat(stream=True, stopping=StopConditions(stop=("x",), include_stop=True)),
        STREAM | {"stop": ["x"]},
        set(),
    ),
    (make_chat(stream=True, stopping=StopConditions(include_stop=True)), STREAM, set()),
    # beams
    (make_chat(sampling=BEAMS), {"best_of": 4}, set()),
    (make_chat(sampling=BEAMS, n=4), {"best_of": 4, "n": 4}, set()),
    (make_chat(sampling=BEAMS, n=5), {"best_of": 4}, {("n", "dropped")}),
    (make_chat(n=2), {}, {("n", "dropped")}),
    (make_chat(n=1), {"n": 1}, set()),
    (
        make_chat(sampling=SamplingParams(beam_width=30), n=20),
        {"best_of": 19},
        {("sampling.beam_width", "clamped"), ("n", "dropped")},
    ),
    (
        make_chat(sampling=BEAMS, n=2, stream=True),
        STREAM,
        {("sampling.beam_width", "dropped"), ("n", "dropped")},
    ),
    (
        make_chat(
            sampling=SamplingParams(
                beam_width=2,
                repetition_penalty=1.1,
                presence_penalty=1.0,
                frequency_penalty=1.0,
                length_penalty=2.0,
            )
        ),
        {"best_of": 2, "length_penalty": 2.0},
        {
            ("sampling.repetition_penalty", "dropped"),
            ("sampling.presence_penalty", "dropped"),
            ("sampling.frequency_penalty", "dropped"),
        },
    ),
    (make_chat(best_of=3), {}, {("best_of", "dropped")}),
    (
        make_chat(sampling=SamplingParams(diversity_penalty=1.0)),
        {},
        {("sampling.diversity_penalty", "dropped")},
    ),
    # log probabilities
    (make_chat(logprobs=LogprobsOptions()), {"logprobs": True}, set()),
    (make_chat(logprobs=LogprobsOptions(2)), {"logprobs": True}, {("logprobs.top", "clamped")}),
    (make_chat(logprobs=LogprobsOptions(), stream=True), STREAM, {("logprobs.top", "dropped")}),
    (make_completion(logprobs=LogprobsOptions()), {"logprobs": 1, "prompt": "a b"}, set()),
    (make_completion(logprobs=LogprobsOptions(5)), {"logprobs": 1}, {("logprobs.top", "clamped")}),
    (
        make_completion(logprobs=LogprobsOptions(1, 1), echo=True),
        {"logprobs": 1, "echo": True},
        set(),
    ),
    # structures
    (
        make_chat(tools=(Tool("f"),), tool_choice="required"),
        {"tools": [TOOL], "tool_choice": "required"},
        set(),
    ),
    (
        make_chat(tools=(Tool("f"),), tool_choice=NamedTool("f")),
        {"tools": [TOOL], "tool_choice": TOOL},
        set(),
    ),
    (
        make_chat(tools=(Tool("f"), Tool("g")), tool_choice=AllowedTools("auto", ("f",))),
        {"tools": [TOOL], "tool_choice": "auto"},
        set(),
    ),
    (make_chat(output=JsonObjectFormat()), {"response_format": {"type": "json_object"}}, set()),
    (make_chat(output=RegexFormat("a")), {}, {("output", "dropped")}),
    (make_completion(output=JsonObjectFormat()), {}, {("output", "dropped")}),
    (
        make_chat(templating=PromptOptions(arguments={"a": Raw(b"1")})),
        {"chat_template_kwargs": {"a": 1}},
        set(),
    ),
    (make_chat(labels={"user": "u"}), {}, {("labels.user", "dropped")}),
    # prompts
    (make_completion(), {"prompt": "a b"}, set()),
    (make_completion(prompts=("a", "b")), {"prompt": "a"}, {("prompts", "dropped")}),
    (make_completion(prompts=("hi",), templating=PromptOptions(mode="server")), {}, set()),
]


@pytest.mark.parametrize(("request_", "body", "losses"), TODAY)
def test_profile_2026_encodes_parameters_and_reports_losses(
    request_: GenerationRequest, body: dict[str, Any], losses: Lost
) -> None:
    encoded = encode_body(request_)
    if "prompt" not in body:
        encoded.pop("prompt", None)

    assert encoded == body
    assert list_unsupported_parameters(request_) == losses


EARLY: list[tuple[GenerationRequest, dict[str, Any], Lost]] = [
    (make_chat(), {"temperature": 1.0}, set()),
    (make_chat(stream=True), {"stream": True, "temperature": 1.0}, set()),
    (make_chat(sampling=SamplingParams(temperature=0.0)), {"temperature": 0.0}, set()),
    (make_chat(sampling=SamplingParams(do_sample=False)), {"temperature": 0.0}, set()),
    (make_chat(sampling=SamplingParams(do_sample=True)), {}, set()),
    (
        make_chat(
            sampling=SamplingParams(beam_width=2, diversity_penalty=0.5, length_penalty=2.0), n=2
        ),
        {"best_of": 2, "n": 2, "diversity_penalty": 0.5, "length_penalty": 2.0},
        set(),
    ),
    (
        make_chat(
            sampling=SamplingParams(temperature=1.0, min_p=0.1, presence_penalty=1.0),
            stopping=StopConditions(stop=("x",), include_stop=True),
            logprobs=LogprobsOptions(1),
            tools=(Tool("f"),),
            tool_choice="auto",
            output=JsonObjectFormat(),
            templating=PromptOptions(arguments={"a": Raw(b"1")}),
        ),
        {"temperature": 1.0},
        {
            (path, "dropped")
            for path in (
                "sampling.min_p",
                "sampling.presence_penalty",
                "stopping.stop",
                "stopping.include_stop",
                "logprobs.top",
                "tools",
                "output",
                "templating.arguments",
            )
        },
    ),
    (
        make_chat(
            sampling=SamplingParams(temperature=0.0),
            stopping=StopConditions(max_tokens=9000, ignore_eos=True),
            provided_fields=frozenset({"max_completion_tokens"}),
        ),
        {"temperature": 0.0, "max_tokens": 4000, "ignore_eos": True},
        {("stopping.max_tokens", "clamped")},
    ),
    (
        make_chat(
            sampling=SamplingParams(temperature=0.0), stopping=StopConditions(max_tokens=9000)
        ),
        {"temperature": 0.0, "max_tokens": 9000},
        set(),
    ),
    (
        make_chat(
            sampling=SamplingParams(temperature=0.0), stopping=StopConditions(ignore_eos=True)
        ),
        {"temperature": 0.0, "ignore_eos": True},
        set(),
    ),
]


@pytest.mark.parametrize(("request_", "body", "losses"), EARLY)
def test_profile_2024_encodes_parameters_and_reports_losses(
    request_: GenerationRequest, body: dict[str, Any], losses: Lost
) -> None:
    assert encode_body(request_, "2024") == body
    assert list_unsupported_parameters(request_, "2024") == losses


CALL = ToolCall("c1", "f", "{}")
CONVERSATION = (
    Message("developer", (TextPart("a"), TextPart("b"))),
    Message("user", (TextPart("see"), ImagePart("data:x"), AudioPart("AA", "wav"), VideoPart("v"))),
    Message("assistant", (ReasoningPart("hm"),), tool_calls=(CALL,)),
    Message("tool", (TextPart("42"),), tool_call_id="c1"),
    Message("user", (FilePart(file_id="f"),)),
)


def test_chat_messages_are_encoded() -> None:
    request = make_chat(messages=CONVERSATION)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    assert encode_body(request)["messages"] == [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:x"}},
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": None},
    ]
    assert OVMS().unsupported_parameters(request, {}) == (
        UnsupportedParameter("messages[1].content[3]", "dropped", "videos", "messages"),
        UnsupportedParameter("messages[4].content[0]", "dropped", "files", "messages"),
    )


def test_profile_2024_messages_keep_only_text() -> None:
    request = make_chat(messages=CONVERSATION)
    assert [(m["role"], m["content"]) for m in encode_body(request, "2024")["messages"]] == [
        ("system", "ab"),
        ("user", "see"),
        ("assistant", ""),
        ("tool", "42"),
        ("user", ""),
    ]
    assert {loss.detail for loss in OVMS("2024").unsupported_parameters(request, {})} == {
        *("audio", "files", "images", "videos", "tool calls", "earlier reasoning"),
    }


@pytest.mark.parametrize("profile", OVMS.profiles)
@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (make_chat(), "/v3/chat/completions"),
        (make_completion(), "/v3/completions"),
        (EmbeddingRequest(model="m", inputs=("a",)), "/v3/embeddings"),
    ],
)
def test_requests_are_sent_as_json_under_v3(profile: str, request_: Request, path: str) -> None:
    wire = OVMS(profile).encode_request(request_)
    assert (wire.method, wire.path) == ("POST", path)
    assert wire.headers == (("Content-Type", "application/json"),)


@pytest.mark.parametrize(
    ("request_", "body", "losses"),
    [
        (EmbeddingRequest(model="m", inputs=("a",)), {"input": "a"}, set()),
        (EmbeddingRequest(model="m", inputs=("a", "b")), {"input": ["a", "b"]}, set()),
        (EmbeddingRequest(model="m", inputs=((1, 2), (3,))), {"input": [[1, 2], [3]]}, set()),
        (
            EmbeddingRequest(model="m", inputs=("a",), encoding="base64", dimensions=3),
            {"input": "a", "encoding_format": "base64"},
            {("dimensions", "dropped")},
        ),
        (
            EmbeddingRequest(model="m", inputs=("a",), extra={"x": Raw(b"1")}, source="other"),
            {"input": "a"},
            {("x", "dropped")},
        ),
        (
            EmbeddingRequest(model="m", inputs=("a",), extra={"x": Raw(b"1")}, source="ovms"),
            {"input": "a", "x": 1},
            set(),
        ),
    ],
)
def test_embedding_request_is_encoded(
    request_: EmbeddingRequest, body: dict[str, Any], losses: Lost
) -> None:
    assert encode_body(request_) == body
    assert list_unsupported_parameters(request_) == losses


def test_unknown_fields_of_ovms_clients_are_forwarded() -> None:
    extra = {"num_assistant_tokens": Raw(b"3"), "top_logprobs": Raw(b"2")}
    own = make_chat(extra=extra, source="ovms")
    assert encode_body(own) == {"num_assistant_tokens": 3, "top_logprobs": 2}
    assert list_unsupported_parameters(own) == set()

    other = make_chat(extra=extra, source="other")
    assert encode_body(other) == {}
    assert list_unsupported_parameters(other) == {
        ("num_assistant_tokens", "dropped"),
        ("top_logprobs", "dropped"),
    }


def test_token_id_prompt_raises_unsupported_feature() -> None:
    with pytest.raises(UnsupportedFeature) as excinfo:
        OVMS().encode_request(make_completion(prompts=((1, 2),)))
    assert excinfo.value.param == "prompt"


def test_losses_use_the_client_field_names() -> None:
    names = {
        "sampling.seed": "random_seed", "n": "choices", "logprobs.top": "details", "prompts": "text"
    }  # fmt: skip
    request = make_completion(
        sampling=SamplingParams(seed=2**32),
        n=2,
        logprobs=LogprobsOptions(),
        stream=True,
        prompts=("a", "b"),
    )

    assert set(OVMS().unsupported_parameters(request, names)) == {
        UnsupportedParameter("random_seed", "approximated", "4294967296 to 0", "sampling.seed"),
        UnsupportedParameter("choices", "dropped", "without beam search", "n"),
        UnsupportedParameter("details", "dropped", "not with a stream", "logprobs.top"),
        UnsupportedParameter("text", "dropped", "one at a time", "prompts"),
    }
    assert UnsupportedParameter(
        "prompt", "dropped", "one at a time", "prompts"
    ) in OVMS().unsupported_parameters(request, {})


@pytest.mark.parametrize(
    ("profile", "path"), [("2026", "/v3/models"), ("2024", "/v2/health/ready")]
)
def test_health_check_path_per_profile(profile: str, path: str) -> None:
    probe = OVMS(profile).health_request
    assert (probe.method, probe.path, probe.body) == ("GET", path, b"")
