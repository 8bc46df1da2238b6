"""Requests for workers, by profile, and what they can't carry."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw

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
SAID = (Message("user", (TextPart("hi"),)),)
HI = [{"role": "user", "content": "hi"}]
TOOLS = (Tool("f", parameters=Raw(b'{"type": "object"}')), Tool("g"))


def chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "m", "kind": "chat", "messages": SAID, **fields})


def text(**fields: Any) -> GenerationRequest:
    fields = {"prompts": ("a b",), "templating": PromptOptions(mode="raw"), **fields}
    return GenerationRequest(model="m", kind="completion", **fields)


def sent(request: Request, profile: str = "openai", **options: Any) -> tuple[str, Any]:
    """The path, and the body less model and messages or prompt where they are the plain ones."""
    wire = OpenAI(profile, **options).encode_request(request)
    assert wire.method == "POST"
    body = json.loads(wire.body)
    assert body.pop("model") == "m"
    if body.get("messages") == HI:
        del body["messages"]
    return wire.path, body


def lost(request: Request, profile: str = "openai", **options: Any) -> set[tuple[str, str]]:
    found = OpenAI(profile, **options).unsupported_parameters(request, {})
    return {(loss.field, loss.reason) for loss in found}


@pytest.mark.parametrize(
    ("request_", "path", "body"),
    [
        (chat(), "/v1/chat/completions", {}),
        (chat(stopping=StopConditions(max_tokens=3)), "/v1/chat/completions", {"max_tokens": 3}),
        (
            chat(
                stopping=StopConditions(max_tokens=3, stop=("x",)),
                provided_fields=frozenset({"max_completion_tokens"}),
            ),
            "/v1/chat/completions",
            {"max_completion_tokens": 3, "stop": ["x"]},
        ),
        (
            chat(sampling=SamplingParams(temperature=0.0, seed=-1, logit_bias={5: -1.0})),
            "/v1/chat/completions",
            {"temperature": 0.0, "seed": -1, "logit_bias": {"5": -1.0}},
        ),
        (
            chat(stream=True, response_options=ResponseOptions(usage="none")),
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"include_usage": True}},
        ),
        (
            chat(logprobs=LogprobsOptions(2), n=2),
            "/v1/chat/completions",
            {"logprobs": True, "top_logprobs": 2, "n": 2},
        ),
        (chat(logprobs=LogprobsOptions()), "/v1/chat/completions", {"logprobs": True}),
        (
            chat(labels={"user": "u", "metadata.team": "a", "else": "x"}),
            "/v1/chat/completions",
            {"user": "u", "metadata": {"team": "a"}},
        ),
        (text(), "/v1/completions", {"prompt": "a b"}),
        (
            text(
                prompts=("a", (1, 2)), echo=True, insert_before="z", logprobs=LogprobsOptions(3, 3)
            ),
            "/v1/completions",
            {"prompt": ["a", [1, 2]], "echo": True, "suffix": "z", "logprobs": 3},
        ),
        (
            text(prompts=("hi",), templating=PromptOptions(mode="server")),
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
def test_a_plain_worker_is_sent_what_was_asked(
    request_: Request, path: str, body: dict[str, Any]
) -> None:
    assert sent(request_) == (path, body)
    assert lost(request_) == set()


def test_conversations_are_written() -> None:
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
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]  # fmt: skip
    request = chat(messages=messages)
    assert sent(request)[1]["messages"] == expected
    assert lost(request) == {("messages", "dropped")}
    expected[2]["reasoning_content"] = "hm"
    assert sent(request, "vllm")[1]["messages"] == expected
    assert lost(request, "vllm") == set()


def test_tools_are_written() -> None:
    request = chat(tools=TOOLS, tool_choice=NamedTool("f"), parallel_tools=False)
    assert sent(request)[1] == {
        "parallel_tool_calls": False,
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
            {"type": "function", "function": {"name": "g"}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }


def test_allowed_tools_are_narrowed_for_workers_that_do_not_know_them() -> None:
    request = chat(tools=TOOLS, tool_choice=AllowedTools("required", ("g",)))
    plain = sent(request)[1]["tool_choice"]
    assert plain["type"] == "allowed_tools"
    narrow = sent(request, "vllm")[1]
    assert [tool["function"]["name"] for tool in narrow["tools"]] == ["g"]
    assert narrow["tool_choice"] == "required"


EXTENDED = chat(
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
def test_each_profile_takes_its_own(profile: str, body: dict[str, Any], losses: set[str]) -> None:
    assert sent(EXTENDED, profile)[1] == body
    assert lost(EXTENDED, profile) == {(name, "dropped") for name in losses}


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
def test_outputs_that_only_some_can_say(output: Any, vllm: Any, sglang: Any, llamacpp: Any) -> None:
    request = chat(output=output)
    for profile, body in (("openai", None), ("vllm", vllm), ("sglang", sglang)):
        assert sent(request, profile)[1] == (body or {})
        assert lost(request, profile) == (set() if body else {("output", "dropped")})
    assert sent(request, "llamacpp")[1] == (llamacpp or {})


def test_a_schema_goes_along_as_it_was_written() -> None:
    request = chat(output=JsonSchemaFormat(Raw(b'{ "b":1, "a":2 }'), "n", strict=True))
    body = OpenAI().encode_request(request).body
    assert b'"schema":{ "b":1, "a":2 }' in body
    assert b'"name":"n"' in body
    assert lost(request) == set()
    assert lost(text(output=request.output)) == {("output", "dropped")}
    assert "response_format" in sent(text(output=request.output), "vllm")[1]


@pytest.mark.parametrize(
    ("request_", "losses"),
    [
        (chat(stopping=StopConditions(stop=("a", "b", "c", "d", "e"))), {("stop", "clamped")}),
        (chat(sampling=SamplingParams(temperature=3.0)), {("temperature", "clamped")}),
        (text(logprobs=LogprobsOptions(9)), {("top", "clamped")}),
        (chat(echo=True), {("echo", "dropped")}),
        (chat(best_of=2), {("best_of", "dropped")}),
        (chat(suffix="x"), {("suffix", "dropped")}),
        (chat(response_options=ResponseOptions(token_ids=True)), {("return_token_ids", "dropped")}),
        (chat(stopping=StopConditions(overflow="error")), set()),
        (chat(stopping=StopConditions(overflow="truncate")), {("overflow", "dropped")}),
        (chat(priority=1), {("priority", "dropped")}),
        (chat(tools=(Tool("f", kind="custom"),)), set()),
        (chat(logprobs=LogprobsOptions(-1)), {("top", "clamped")}),
        (text(tools=TOOLS), {("tools", "dropped")}),
        (EmbeddingRequest(model="m", inputs=("a",), instruction="q"), {("instruction", "dropped")}),
        (EmbeddingRequest(model="m", inputs=("a",), normalize=True), {("normalize", "dropped")}),
    ],
)
def test_losses(request_: Request, losses: set[tuple[str, str]]) -> None:
    assert lost(request_) == losses


def test_what_is_clamped_is_sent_clamped() -> None:
    request = chat(
        stopping=StopConditions(stop=("a", "b", "c", "d", "e")),
        sampling=SamplingParams(temperature=3.0),
    )
    assert sent(request)[1] == {"temperature": 2.0, "stop": ["a", "b", "c", "d"]}
    assert sent(chat(sampling=SamplingParams(top_p=0.0)), "vllm")[1] == {"top_p": 1e-6}


def test_greedy_is_temperature_nought() -> None:
    assert sent(chat(sampling=SamplingParams(do_sample=False)))[1] == {"temperature": 0.0}
    assert lost(chat(sampling=SamplingParams(do_sample=False))) == set()


def test_overflow_is_a_truncated_prompt_where_the_worker_can() -> None:
    request = chat(stopping=StopConditions(overflow="truncate"))
    assert sent(request, "vllm")[1] == {"truncate_prompt_tokens": -1}
    assert lost(request, "vllm") == set()


def test_beams() -> None:
    request = chat(sampling=SamplingParams(beam_width=2), n=2)
    assert sent(request, "vllm")[1] == {"n": 2, "use_beam_search": True}
    assert lost(request, "vllm") == set()
    wider = chat(sampling=SamplingParams(beam_width=4))
    assert lost(wider, "vllm") == {("beam_width", "approximated")}


def test_unknown_fields_are_forwarded_but_never_in_place_of_ours() -> None:
    raws = {"foo": Raw(b"[1, 2]"), "model": Raw(b'"evil"'), "cache_salt": Raw(b'"s"')}
    request = chat(extra=raws)
    wire = OpenAI().encode_request(request)
    assert b'"foo":[1, 2]' in wire.body
    assert json.loads(wire.body)["model"] == "m"
    assert lost(request) == {("model", "dropped"), ("cache_salt", "dropped")}


def test_powers_are_given_only_where_allowed() -> None:
    request = chat(
        priority=1, templating=PromptOptions(template="T"), extra={"cache_salt": Raw(b'"s"')}
    )
    assert sent(request, "vllm")[1] == {}
    assert {name for name, _ in lost(request, "vllm")} == {"priority", "template", "cache_salt"}
    assert sent(request, "vllm", powers=True)[1] == {
        "priority": 1,
        "chat_template": "T",
        "cache_salt": "s",
    }
    assert lost(request, "vllm", powers=True) == set()


def test_a_chat_worker_wraps_one_text_prompt() -> None:
    server = PromptOptions(mode="server")
    for prompts in (("a", "b"), ((1, 2),)):
        with pytest.raises(UnsupportedFeature) as caught:
            OpenAI().encode_request(text(prompts=prompts, templating=server))
        assert caught.value.param == "prompt"
    several = text(prompts=("a", "b"), templating=server)
    assert OpenAI().unsupported_parameters(several, {}) == (
        UnsupportedParameter("prompt", "dropped", path="prompts"),
    )


def test_losses_bear_the_clients_names(make_call: MakeCall) -> None:
    names = OpenAI().field_names(make_call("chat"))
    request = chat(
        logprobs=LogprobsOptions(21),
        output=RegexFormat("a"),
        stopping=StopConditions(truncate_prompt=3),
    )
    assert set(OpenAI().unsupported_parameters(request, names)) == {
        UnsupportedParameter("top_logprobs", "clamped", "21 to 20", "logprobs.top"),
        UnsupportedParameter("response_format", "dropped", path="output"),
        UnsupportedParameter("truncate_prompt_tokens", "dropped", path="stopping.truncate_prompt"),
    }


def test_profiles() -> None:
    assert OpenAI.profiles[0] == "openai"
    with pytest.raises(ValueError, match="known: openai, vllm, sglang, llamacpp"):
        OpenAI("tgi")


def test_a_prefix_moves_every_path() -> None:
    dialect = OpenAI(prefix="/x/v3")
    assert dialect.path_prefixes == ("/x/v3",)
    assert dialect.health_request.path == "/x/v3/models"
    assert dialect.encode_request(chat()).path == "/x/v3/chat/completions"
    assert {e.path for e in dialect.endpoints} == {
        "/x/v3/chat/completions",
        "/x/v3/completions",
        "/x/v3/embeddings",
        "/x/v3/models",
        "/x/v3/models/{model}",
    }


def test_what_was_read_is_written_again(make_call: MakeCall) -> None:
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
    dialect = OpenAI()
    request = dialect.decode_request(make_call("chat", body))
    assert json.loads(dialect.encode_request(request).body) == body
    assert dialect.unsupported_parameters(request, {}) == ()
