"""Requests for serving endpoints, and their losses."""

import json
from typing import Any

import pytest
from msgspec import Raw

from protocols.core.errors import ModelNotFound, UnsupportedFeature
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AllowedTools,
    AudioPart,
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    LogprobsOptions,
    Message,
    NamedTool,
    PromptOptions,
    ReasoningOptions,
    ReasoningPart,
    RefusalPart,
    RegexFormat,
    Request,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
    ToolCall,
)
from protocols.databricks.endpoints import Databricks

MESSAGES = (Message("user", (TextPart("hi"),)),)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def make_chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "ep", "kind": "chat", "messages": MESSAGES, **fields})


def make_completion(**fields: Any) -> GenerationRequest:
    fields = {"prompts": ("a b",), "templating": PromptOptions(mode="server"), **fields}
    return GenerationRequest(model="ep", kind="completion", **fields)


def encode_body(request: Request, **options: Any) -> Any:
    """Return the body without plain messages or a plain prompt."""
    wire = Databricks(**options).encode_request(request)
    assert (wire.method, wire.path) == ("POST", "/serving-endpoints/ep/invocations")
    assert wire.headers == (("Content-Type", "application/json"),)
    body = json.loads(wire.body)
    for name, plain in (("messages", HI), ("prompt", "a b"), ("stream", False)):
        if body.get(name) == plain:
            del body[name]
    return body


def list_unsupported_parameters(request: Request, **options: Any) -> set[tuple[str, str]]:
    """Return the paths and kinds of the losses."""
    unsupported = Databricks(**options).unsupported_parameters(request, {})
    return {(loss.path or loss.field, loss.reason) for loss in unsupported}


def test_stream_field_is_always_sent() -> None:
    """Without it, the endpoint decides."""
    body = json.loads(Databricks().encode_request(make_chat()).body)
    assert body == {"messages": HI, "stream": False}

    body = json.loads(Databricks().encode_request(make_chat(stream=True)).body)
    assert body == {"messages": HI, "stream": True}
    assert "stream" not in encode_body(EmbeddingRequest(model="ep", inputs=("a",)))


Lost = set[tuple[str, str]]
TABLE: list[tuple[GenerationRequest, dict[str, Any], Lost]] = [
    (make_chat(), {}, set()),
    (
        make_chat(stream=True, response_options=ResponseOptions(usage="each")),
        {"stream": True},
        set(),
    ),
    (
        make_chat(
            sampling=SamplingParams(temperature=2.0, top_p=1.0, top_k=5),
            stopping=StopConditions(max_tokens=5, stop=("a", "b", "c", "d", "e")),
            n=2,
            logprobs=LogprobsOptions(2),
            output=JsonObjectFormat(),
        ),
        {
            "temperature": 2.0,
            "top_p": 1.0,
            "top_k": 5,
            "max_tokens": 5,
            "stop": ["a", "b", "c", "d", "e"],
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "response_format": {"type": "json_object"},
        },
        set(),
    ),
    (
        make_chat(
            stopping=StopConditions(max_tokens=5),
            provided_fields=frozenset({"max_completion_tokens"}),
        ),
        {"max_tokens": 5},
        set(),
    ),
    (
        make_chat(
            sampling=SamplingParams(temperature=3.0, top_p=0.0),
            stopping=StopConditions(max_tokens=0),
        ),
        {"temperature": 2.0, "top_p": 1e-6, "max_tokens": 1},
        {
            ("sampling.temperature", "clamped"),
            ("sampling.top_p", "clamped"),
            ("stopping.max_tokens", "clamped"),
        },
    ),
    (make_chat(sampling=SamplingParams(do_sample=False)), {"temperature": 0.0}, set()),
    (
        make_chat(logprobs=LogprobsOptions(30)),
        {"logprobs": True, "top_logprobs": 20},
        {("logprobs.top", "clamped")},
    ),
    (make_chat(output=RegexFormat("a")), {}, {("output", "dropped")}),
    (
        make_chat(
            sampling=SamplingParams(
                seed=1, presence_penalty=1.0, min_p=0.1, logit_bias={1: 1.0}, beam_width=2
            ),
            stopping=StopConditions(ignore_eos=True, overflow="truncate"),
            templating=PromptOptions(arguments={"a": Raw(b"1")}),
            best_of=2,
            parallel_tools=False,
            tools=(Tool("f"),),
        ),
        {"tools": [TOOL]},
        {
            (path, "dropped")
            for path in (
                "sampling.seed",
                "sampling.presence_penalty",
                "sampling.min_p",
                "sampling.logit_bias",
                "sampling.beam_width",
                "stopping.ignore_eos",
                "stopping.overflow",
                "templating.arguments",
                "best_of",
                "parallel_tools",
            )
        },
    ),
    (make_chat(stopping=StopConditions(overflow="error")), {}, set()),
    (
        make_chat(labels={"user": "u", "metadata.a": "b"}),
        {},
        {("labels.user", "dropped"), ("labels.metadata", "dropped")},
    ),
    (make_chat(labels={"usage_context.team": "a"}), {"usage_context": {"team": "a"}}, set()),
    (make_chat(client_id="c"), {}, set()),
    (make_chat(client_id="c", source="databricks"), {"client_request_id": "c"}, set()),
    # tools
    (
        make_chat(tools=(Tool("f"),), tool_choice=NamedTool("f")),
        {"tools": [TOOL], "tool_choice": TOOL},
        set(),
    ),
    (
        make_chat(tools=(Tool("f"), Tool("g")), tool_choice=AllowedTools("required", ("f",))),
        {"tools": [TOOL], "tool_choice": "required"},
        set(),
    ),
    # reasoning
    (make_chat(reasoning=ReasoningOptions(effort="low")), {"reasoning_effort": "low"}, set()),
    (
        make_chat(reasoning=ReasoningOptions(effort="minimal")),
        {"reasoning_effort": "low"},
        {("reasoning.effort", "clamped")},
    ),
    (
        make_chat(reasoning=ReasoningOptions(effort="xhigh")),
        {"reasoning_effort": "high"},
        {("reasoning.effort", "clamped")},
    ),
    (
        make_chat(reasoning=ReasoningOptions(effort="none", summary="auto")),
        {},
        {("reasoning.effort", "dropped"), ("reasoning.summary", "dropped")},
    ),
    (
        make_chat(reasoning=ReasoningOptions(budget=9, include=True)),
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        set(),
    ),
    (
        make_chat(
            reasoning=ReasoningOptions(budget=2000, effort="low"),
            stopping=StopConditions(max_tokens=1500),
        ),
        {"thinking": {"type": "enabled", "budget_tokens": 1499}, "max_tokens": 1500},
        {("reasoning.budget", "clamped")},
    ),
    (
        make_chat(
            reasoning=ReasoningOptions(budget=2000),
            stopping=StopConditions(max_tokens=1500),
            source="databricks",
        ),
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 1500},
        set(),
    ),
    (
        make_chat(
            reasoning=ReasoningOptions(budget=2000, effort="low"),
            provided_fields=frozenset({"output_config"}),
        ),
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "reasoning_effort": "low"},
        set(),
    ),
    (make_chat(reasoning=ReasoningOptions(budget=0)), {"thinking": {"type": "disabled"}}, set()),
    (make_chat(reasoning=ReasoningOptions(include=True)), {}, set()),
    (
        make_chat(reasoning=ReasoningOptions(include=False)),
        {"thinking": {"type": "disabled"}},
        {("reasoning.include", "approximated")},
    ),
    (
        make_chat(reasoning=ReasoningOptions(include=False), source="databricks"),
        {"thinking": {"type": "disabled"}},
        set(),
    ),
    # completions
    (make_completion(), {}, set()),
    (make_completion(templating=PromptOptions(mode="raw")), {"use_raw_prompt": True}, set()),
    (make_completion(prompts=("a", "b")), {"prompt": ["a", "b"]}, set()),
    (make_completion(n=1), {}, set()),
    (make_completion(n=2), {}, {("n", "dropped")}),
    (make_completion(echo=True, suffix="."), {"echo": True, "suffix": "."}, set()),
    (make_completion(logprobs=LogprobsOptions()), {}, {("logprobs.top", "dropped")}),
    (make_completion(insert_before="z"), {}, {("insert_before", "dropped")}),
    (
        make_completion(stopping=StopConditions(overflow="truncate")),
        {},
        {("stopping.overflow", "dropped")},
    ),
    (
        make_completion(reasoning=ReasoningOptions(effort="low")),
        {},
        {("reasoning.effort", "dropped")},
    ),
    (make_completion(output=JsonObjectFormat()), {}, {("output", "dropped")}),
]


def test_limit_that_leaves_no_room_for_thinking_is_an_error() -> None:
    request = make_chat(
        reasoning=ReasoningOptions(budget=2000), stopping=StopConditions(max_tokens=500)
    )

    with pytest.raises(UnsupportedFeature, match="at least 1024 and less than 500"):
        encode_body(request)


@pytest.mark.parametrize(("request_", "body", "losses"), TABLE)
def test_parameters_are_encoded_and_losses_reported(
    request_: GenerationRequest, body: dict[str, Any], losses: Lost
) -> None:
    assert encode_body(request_) == body
    assert list_unsupported_parameters(request_) == losses


def test_pay_per_token_drops_n_and_supports_truncation() -> None:
    several = make_chat(n=2)
    assert encode_body(several, pay_per_token=True) == {}
    assert list_unsupported_parameters(several, pay_per_token=True) == {("n", "dropped")}
    assert encode_body(make_chat(n=1), pay_per_token=True) == {"n": 1}

    cut = make_completion(stopping=StopConditions(overflow="truncate"))
    assert encode_body(cut, pay_per_token=True) == {"error_behavior": "truncate"}
    assert list_unsupported_parameters(cut, pay_per_token=True) == set()
    assert list_unsupported_parameters(make_chat(stopping=cut.stopping), pay_per_token=True) == {
        ("stopping.overflow", "dropped")
    }


CHAT_WITH_MEDIA = make_chat(
    sampling=SamplingParams(seed=-1, presence_penalty=1.0, bad_words=("x", "y")),
    stopping=StopConditions(ignore_eos=True),
    tools=(Tool("f"),),
    parallel_tools=False,
)
EXTRA = {
    "bad_words": '["x","y"]',
    "ignore_eos": "true",
    "parallel_tool_calls": "false",
    "presence_penalty": "1.0",
    "seed": "-1",
}


def test_undocumented_parameters_are_sent_in_extra_params() -> None:
    assert encode_body(CHAT_WITH_MEDIA, extra_params=True) == {
        "tools": [TOOL],
        "extra_params": EXTRA,
    }
    assert list_unsupported_parameters(CHAT_WITH_MEDIA, extra_params=True) == set()


def test_extra_fields_of_databricks_clients_are_forwarded() -> None:
    raws = {"safe_mode": Raw(b"true"), "note": Raw(b'"n"'), "cache_salt": Raw(b'"s"')}
    own = make_chat(
        sampling=SamplingParams(min_p=0.5),
        stopping=StopConditions(),
        extra=raws,
        source="databricks",
    )
    assert encode_body(own) == {"extra_params": {"min_p": "0.5", "note": "n", "safe_mode": "true"}}
    assert list_unsupported_parameters(own) == {("cache_salt", "dropped")}

    other = make_chat(extra=raws, source="other")
    assert encode_body(other, extra_params=True) == {}
    assert list_unsupported_parameters(other, extra_params=True) == {
        (name, "dropped") for name in raws
    }


def test_decoded_request_is_encoded_to_the_same_body(make: Any) -> None:
    body = {
        "messages": HI,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 5,
        "stop": ["x"],
        "stream": True,
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "extra_params": {"min_p": "0.5", "safe_mode": "true"},
        "usage_context": {"team": "a"},
        "client_request_id": "c",
    }
    adapter = Databricks()
    read = adapter.decode_request(make("/serving-endpoints/ep/invocations", body))
    request = GenerationRequest(
        **{name: getattr(read, name) for name in read.__struct_fields__} | {"source": "databricks"}
    )

    assert json.loads(adapter.encode_request(request).body) == body
    assert adapter.unsupported_parameters(request, {}) == ()


def test_chat_messages_are_encoded() -> None:
    call = ToolCall("c1", "f", "{}")
    messages = (
        Message("developer", (TextPart("a"), TextPart("b")), name="d"),
        Message("user", (TextPart("see"), ImagePart("data:x"), AudioPart("AA")), name="u"),
        Message("assistant", (TextPart(" "), ReasoningPart("hm")), tool_calls=(call,)),
        Message("tool", (TextPart("42"),), tool_call_id="c1"),
        Message("assistant", (RefusalPart("no"), TextPart("well"))),
    )
    request = make_chat(messages=messages)
    function = {"name": "f", "arguments": "{}"}

    assert encode_body(request)["messages"] == [
        {"role": "system", "content": "ab"},
        {"role": "user", "name": "u", "content": [
            {"type": "text", "text": "see"},
            {"type": "image_url", "image_url": {"url": "data:x"}}]},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "well"},
    ]  # fmt: skip
    assert [loss.detail for loss in Databricks().unsupported_parameters(request, {})] == [
        "audio",
        "refusals",
        "names",
        "earlier reasoning",
    ]

    chat = make_chat(messages=(Message("assistant", (TextPart("so"),), tool_calls=(call,)),))
    assert encode_body(chat)["messages"][0]["content"] == "so"


def test_all_tools_are_sent_since_the_endpoint_itself_says_how_many_it_takes() -> None:
    tools = tuple(Tool(f"t{i}") for i in range(200))
    request = make_chat(tools=tools, tool_choice=NamedTool("t199"))

    assert len(encode_body(request)["tools"]) == 200
    assert list_unsupported_parameters(request) == set()


def test_only_the_allowed_tools_are_sent() -> None:
    allowed = AllowedTools("auto", ("t2",))
    request = make_chat(tools=(Tool("t1"), Tool("t2")), tool_choice=allowed)

    assert [tool["function"]["name"] for tool in encode_body(request)["tools"]] == ["t2"]
    assert list_unsupported_parameters(request) == set()


@pytest.mark.parametrize(
    ("request_", "body", "losses"),
    [
        (EmbeddingRequest(model="ep", inputs=("a",)), {"input": "a"}, set()),
        (
            EmbeddingRequest(model="ep", inputs=("a", "b"), instruction="q", encoding="base64"),
            {"input": ["a", "b"], "instruction": "q"},
            set(),
        ),
        (
            EmbeddingRequest(model="ep", inputs=("a",), dimensions=2, extra={"x": Raw(b"1")}),
            {"input": "a"},
            {("dimensions", "dropped"), ("x", "dropped")},
        ),
        (
            EmbeddingRequest(model="ep", inputs=("a",), dimensions=2, source="databricks"),
            {"input": "a", "dimensions": 2},
            set(),
        ),
        (
            EmbeddingRequest(
                model="ep", inputs=("a",), extra={"x": Raw(b"1")}, client_id="c",
                source="databricks", labels={"usage_context.a": "b"},
            ),
            {"input": "a", "extra_params": {"x": "1"}, "client_request_id": "c",
             "usage_context": {"a": "b"}},
            set(),
        ),
    ],
)  # fmt: skip
def test_embedding_request_is_encoded(
    request_: EmbeddingRequest, body: dict[str, Any], losses: Lost
) -> None:
    assert encode_body(request_) == body
    assert list_unsupported_parameters(request_) == losses


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_completion(prompts=("a", (1, 2))), "prompt"),
        (EmbeddingRequest(model="ep", inputs=((1, 2),)), "input"),
    ],
)
def test_token_ids_raise_unsupported_feature(request_: Request, param: str) -> None:
    with pytest.raises(UnsupportedFeature) as excinfo:
        Databricks().encode_request(request_)
    assert excinfo.value.param == param


@pytest.mark.parametrize(
    ("model", "segment"),
    [("gte-large", "gte-large"), ("a/b c?", "a%2Fb%20c%3F"), ("é", "%C3%A9"), ("..a", "..a")],
)
def test_model_name_is_one_escaped_path_segment(model: str, segment: str) -> None:
    wire = Databricks().encode_request(make_chat(model=model))
    assert wire.path == f"/serving-endpoints/{segment}/invocations"
    assert b"model" not in wire.body


@pytest.mark.parametrize("model", ["", ".", ".."])
def test_model_name_that_is_no_path_segment_is_rejected(model: str) -> None:
    with pytest.raises(ModelNotFound):
        Databricks().encode_request(make_chat(model=model))


def test_losses_use_the_client_field_names() -> None:
    names = {"n": "choices", "sampling.seed": "random_seed"}
    assert set(
        Databricks().unsupported_parameters(
            make_completion(n=2, sampling=SamplingParams(seed=1)), names
        )
    ) == {
        UnsupportedParameter("choices", "dropped", "those of one prompt have one index", "n"),
        UnsupportedParameter("random_seed", "dropped", path="sampling.seed"),
    }


def test_health_check_requests_the_serving_endpoint_list() -> None:
    probe = Databricks().health_request
    assert (probe.method, probe.path, probe.body) == ("GET", "/api/2.0/serving-endpoints", b"")
