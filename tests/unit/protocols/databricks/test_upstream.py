"""Requests for serving endpoints, and what they can't be asked."""

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

SAID = (Message("user", (TextPart("hi"),)),)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "ep", "kind": "chat", "messages": SAID, **fields})


def text(**fields: Any) -> GenerationRequest:
    fields = {"prompts": ("a b",), "templating": PromptOptions(mode="server"), **fields}
    return GenerationRequest(model="ep", kind="completion", **fields)


def sent(request: Request, **options: Any) -> Any:
    """The body, less the messages or the prompt where they are the plain ones."""
    wire = Databricks(**options).encode_request(request)
    assert (wire.method, wire.path) == ("POST", "/serving-endpoints/ep/invocations")
    assert wire.headers == (("Content-Type", "application/json"),)
    body = json.loads(wire.body)
    for name, plain in (("messages", HI), ("prompt", "a b"), ("stream", False)):
        if body.get(name) == plain:
            del body[name]
    return body


def lost(request: Request, **options: Any) -> set[tuple[str, str]]:
    """Where and how."""
    found = Databricks(**options).unsupported_parameters(request, {})
    return {(loss.path or loss.field, loss.reason) for loss in found}


def test_silence_is_never_left_to_the_endpoint() -> None:
    """It streams, or does not, as it likes."""
    body = json.loads(Databricks().encode_request(chat()).body)
    assert body == {"messages": HI, "stream": False}
    body = json.loads(Databricks().encode_request(chat(stream=True)).body)
    assert body == {"messages": HI, "stream": True}
    assert "stream" not in sent(EmbeddingRequest(model="ep", inputs=("a",)))


Lost = set[tuple[str, str]]
TABLE: list[tuple[GenerationRequest, dict[str, Any], Lost]] = [
    (chat(), {}, set()),
    (chat(stream=True, response_options=ResponseOptions(usage="each")), {"stream": True}, set()),
    (
        chat(
            sampling=SamplingParams(temperature=2.0, top_p=1.0, top_k=5),
            stopping=StopConditions(max_tokens=5, stop=("a", "b", "c", "d", "e")),
            n=2,
            logprobs=LogprobsOptions(2),
            output=JsonObjectFormat(),
        ),
        {
            "temperature": 2.0, "top_p": 1.0, "top_k": 5, "max_tokens": 5,
            "stop": ["a", "b", "c", "d", "e"], "n": 2, "logprobs": True, "top_logprobs": 2,
            "response_format": {"type": "json_object"},
        },
        set(),
    ),
    (
        chat(stopping=StopConditions(max_tokens=5),
             provided_fields=frozenset({"max_completion_tokens"})),
        {"max_tokens": 5},
        set(),
    ),
    (
        chat(sampling=SamplingParams(temperature=3.0, top_p=0.0),
             stopping=StopConditions(max_tokens=0)),
        {"temperature": 2.0, "top_p": 1e-6, "max_tokens": 1},
        {("sampling.temperature", "clamped"), ("sampling.top_p", "clamped"),
         ("stopping.max_tokens", "clamped")},
    ),
    (chat(sampling=SamplingParams(do_sample=False)), {"temperature": 0.0}, set()),
    (chat(logprobs=LogprobsOptions(30)), {"logprobs": True, "top_logprobs": 20},
     {("logprobs.top", "clamped")}),
    (chat(output=RegexFormat("a")), {}, {("output", "dropped")}),
    (
        chat(
            sampling=SamplingParams(
                seed=1, presence_penalty=1.0, min_p=0.1, logit_bias={1: 1.0}, beam_width=2
            ),
            stopping=StopConditions(ignore_eos=True, overflow="truncate"),
            templating=PromptOptions(arguments={"a": Raw(b"1")}),
            best_of=2,
            parallel_tools=True,
            tools=(Tool("f"),),
        ),
        {"tools": [TOOL]},
        {(path, "dropped") for path in (
            "sampling.seed", "sampling.presence_penalty", "sampling.min_p", "sampling.logit_bias",
            "sampling.beam_width", "stopping.ignore_eos", "stopping.overflow",
            "templating.arguments", "best_of", "parallel_tools")},
    ),
    (chat(stopping=StopConditions(overflow="error")), {}, set()),
    (chat(labels={"user": "u", "metadata.a": "b"}), {}, set()),
    (chat(labels={"usage_context.team": "a"}), {"usage_context": {"team": "a"}}, set()),
    (chat(client_id="c"), {}, set()),
    (chat(client_id="c", source="databricks"), {"client_request_id": "c"}, set()),
    # tools
    (chat(tools=(Tool("f"),), tool_choice=NamedTool("f")), {"tools": [TOOL], "tool_choice": TOOL},
     set()),
    (
        chat(tools=(Tool("f"), Tool("g")), tool_choice=AllowedTools("required", ("f",))),
        {"tools": [TOOL], "tool_choice": "required"},
        set(),
    ),
    # reasoning
    (chat(reasoning=ReasoningOptions(effort="low")), {"reasoning_effort": "low"}, set()),
    (chat(reasoning=ReasoningOptions(effort="minimal")), {"reasoning_effort": "low"},
     {("reasoning.effort", "clamped")}),
    (chat(reasoning=ReasoningOptions(effort="xhigh")), {"reasoning_effort": "high"},
     {("reasoning.effort", "clamped")}),
    (chat(reasoning=ReasoningOptions(effort="none", summary="auto")), {},
     {("reasoning.effort", "dropped"), ("reasoning.summary", "dropped")}),
    (chat(reasoning=ReasoningOptions(budget=9, include=True)),
     {"thinking": {"type": "enabled", "budget_tokens": 9}}, set()),
    (chat(reasoning=ReasoningOptions(budget=0)), {"thinking": {"type": "disabled"}}, set()),
    (chat(reasoning=ReasoningOptions(include=True)), {}, set()),
    (chat(reasoning=ReasoningOptions(include=False)), {"thinking": {"type": "disabled"}},
     {("reasoning.include", "approximated")}),
    (chat(reasoning=ReasoningOptions(include=False), source="databricks"),
     {"thinking": {"type": "disabled"}}, set()),
    # completions
    (text(), {}, set()),
    (text(templating=PromptOptions(mode="raw")), {"use_raw_prompt": True}, set()),
    (text(prompts=("a", "b")), {"prompt": ["a", "b"]}, set()),
    (text(n=1), {}, set()),
    (text(n=2), {}, {("n", "dropped")}),
    (text(echo=True, suffix="."), {"echo": True, "suffix": "."}, set()),
    (text(logprobs=LogprobsOptions()), {}, {("logprobs.top", "dropped")}),
    (text(insert_before="z"), {}, {("insert_before", "dropped")}),
    (text(stopping=StopConditions(overflow="truncate")), {}, {("stopping.overflow", "dropped")}),
    (text(reasoning=ReasoningOptions(effort="low")), {}, {("reasoning.effort", "dropped")}),
    (text(output=JsonObjectFormat()), {}, {("output", "dropped")}),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "body", "losses"), TABLE)
def test_what_an_endpoint_is_asked(
    request_: GenerationRequest, body: dict[str, Any], losses: Lost
) -> None:
    assert sent(request_) == body
    assert lost(request_) == losses


def test_pay_per_token_gives_one_answer_at_a_time_and_can_truncate() -> None:
    several = chat(n=2)
    assert sent(several, pay_per_token=True) == {}
    assert lost(several, pay_per_token=True) == {("n", "dropped")}
    assert sent(chat(n=1), pay_per_token=True) == {"n": 1}
    cut = text(stopping=StopConditions(overflow="truncate"))
    assert sent(cut, pay_per_token=True) == {"error_behavior": "truncate"}
    assert lost(cut, pay_per_token=True) == set()
    assert lost(chat(stopping=cut.stopping), pay_per_token=True) == {
        ("stopping.overflow", "dropped")
    }


BESIDE = chat(
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


def test_what_the_reference_does_not_name_is_sent_aside() -> None:
    assert sent(BESIDE, extra_params=True) == {"tools": [TOOL], "extra_params": EXTRA}
    assert lost(BESIDE, extra_params=True) == set()


def test_what_this_dialects_own_clients_send_beside_goes_along() -> None:
    raws = {"safe_mode": Raw(b"true"), "note": Raw(b'"n"'), "cache_salt": Raw(b'"s"')}
    own = chat(
        sampling=SamplingParams(min_p=0.5),
        stopping=StopConditions(),
        extra=raws,
        source="databricks",
    )
    assert sent(own) == {"extra_params": {"min_p": "0.5", "note": "n", "safe_mode": "true"}}
    assert lost(own) == {("cache_salt", "dropped")}
    other = chat(extra=raws, source="other")
    assert sent(other, extra_params=True) == {}
    assert lost(other, extra_params=True) == {(name, "dropped") for name in raws}


def test_what_was_read_is_written_again(make: Any) -> None:
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
    dialect = Databricks()
    read = dialect.decode_request(make("/serving-endpoints/ep/invocations", body))
    request = GenerationRequest(
        **{name: getattr(read, name) for name in read.__struct_fields__} | {"source": "databricks"}
    )
    assert json.loads(dialect.encode_request(request).body) == body
    assert dialect.unsupported_parameters(request, {}) == ()


def test_conversations_are_written() -> None:
    call = ToolCall("c1", "f", "{}")
    messages = (
        Message("developer", (TextPart("a"), TextPart("b")), name="d"),
        Message("user", (TextPart("see"), ImagePart("data:x"), AudioPart("AA")), name="u"),
        Message("assistant", (TextPart(" "), ReasoningPart("hm")), tool_calls=(call,)),
        Message("tool", (TextPart("42"),), tool_call_id="c1"),
        Message("assistant", (RefusalPart("no"), TextPart("well"))),
    )
    request = chat(messages=messages)
    function = {"name": "f", "arguments": "{}"}
    assert sent(request)["messages"] == [
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
        "audio, refusals",
        "names",
        "earlier reasoning",
    ]
    said = chat(messages=(Message("assistant", (TextPart("so"),), tool_calls=(call,)),))
    assert sent(said)["messages"][0]["content"] == "so"


def test_there_are_no_more_tools_than_may_be_and_the_chosen_one_is_among_them() -> None:
    tools = tuple(Tool(f"t{i}") for i in range(33))
    for choice, first in ((NamedTool("t32"), "t32"), ("auto", "t0"), (None, "t0")):
        request = chat(tools=tools, tool_choice=choice)
        names = [tool["function"]["name"] for tool in sent(request)["tools"]]
        assert (len(names), names[0]) == (32, first)
        assert Databricks().unsupported_parameters(request, {}) == (
            UnsupportedParameter("tools", "clamped", "33 to 32", "tools"),
        )
    few = chat(tools=tools, tool_choice=AllowedTools("auto", ("t32",)))
    assert [tool["function"]["name"] for tool in sent(few)["tools"]] == ["t32"]
    assert lost(few) == set()
    assert lost(chat(tools=tools[:32])) == set()


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
def test_embeddings(request_: EmbeddingRequest, body: dict[str, Any], losses: Lost) -> None:
    assert sent(request_) == body
    assert lost(request_) == losses


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (text(prompts=("a", (1, 2))), "prompt"),
        (EmbeddingRequest(model="ep", inputs=((1, 2),)), "input"),
    ],
)
def test_token_ids_are_no_text(request_: Request, param: str) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        Databricks().encode_request(request_)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("model", "segment"),
    [("gte-large", "gte-large"), ("a/b c?", "a%2Fb%20c%3F"), ("é", "%C3%A9"), ("..a", "..a")],
)
def test_a_name_is_one_segment(model: str, segment: str) -> None:
    wire = Databricks().encode_request(chat(model=model))
    assert wire.path == f"/serving-endpoints/{segment}/invocations"
    assert b"model" not in wire.body


@pytest.mark.parametrize("model", ["", ".", ".."])
def test_a_name_that_would_lead_elsewhere(model: str) -> None:
    with pytest.raises(ModelNotFound):
        Databricks().encode_request(chat(model=model))


def test_losses_bear_the_clients_names() -> None:
    names = {"n": "choices", "sampling.seed": "random_seed"}
    assert set(
        Databricks().unsupported_parameters(text(n=2, sampling=SamplingParams(seed=1)), names)
    ) == {
        UnsupportedParameter("choices", "dropped", "those of one prompt have one index", "n"),
        UnsupportedParameter("random_seed", "dropped", path="sampling.seed"),
    }


def test_the_probe() -> None:
    probe = Databricks().health_request
    assert (probe.method, probe.path, probe.body) == ("GET", "/api/2.0/serving-endpoints", b"")
