"""The internal request becomes a request to Cohere's workers."""

import json
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from protocols.core.errors import UnsupportedFeature
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AllowedTools,
    AudioPart,
    EmbeddingRequest,
    ExtraFields,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    NamedTool,
    PromptOptions,
    ReasoningOptions,
    ReasoningPart,
    RefusalPart,
    RegexFormat,
    RerankRequest,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
    ToolCall,
)
from tests.unit.protocols.cohere.conftest import COHERE, MakeCall, decode_request

HI = Message("user", (TextPart("hi"),))
CHAT = GenerationRequest(model="w", kind="chat", messages=(HI,), source="another")
CALL = ToolCall("a", "f", "{}")
TOOLS = (Tool("f", parameters=Raw(b'{"type":"object"}')), Tool("g"))


def write(request: Any) -> dict[str, Any]:
    wire = COHERE.encode_request(request)
    assert (wire.method, wire.headers) == ("POST", (("Content-Type", "application/json"),))
    body: dict[str, Any] = json.loads(wire.body)
    return body


def find_losses(request: Any) -> set[tuple[str, str, str]]:
    losses = COHERE.unsupported_parameters(request, {})
    return {(one.field, one.reason, one.detail) for one in losses}


def test_parameters() -> None:
    request = replace(
        CHAT,
        sampling=SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=1),
        stopping=StopConditions(max_tokens=5, stop=("x",), overflow="error"),
        logprobs=LogprobsOptions(0),
        output=JsonObjectFormat(),
        stream=True,
        priority=3,
    )

    assert write(request) == {
        "model": "w",
        "messages": [{"role": "user", "content": "hi"}],
        "stop_sequences": ["x"],
        "max_tokens": 5,
        "temperature": 0.5,
        "p": 0.9,
        "k": 7,
        "seed": 1,
        "priority": 3,
        "response_format": {"type": "json_object"},
        "logprobs": True,
        "stream": True,
    }
    assert find_losses(request) == set()


def test_values_out_of_range_are_clamped_and_reported() -> None:
    request = replace(
        CHAT,
        sampling=SamplingParams(temperature=1.5, top_p=1.0, frequency_penalty=-1.0),
        logprobs=LogprobsOptions(5),
    )

    body = write(request)

    assert (body["temperature"], body["p"], body["frequency_penalty"]) == (1, 0.99, 0)
    assert find_losses(request) == {
        ("temperature", "clamped", "1.5 to 1"),
        ("top_p", "clamped", "1.0 to 0.99"),
        ("frequency_penalty", "clamped", "-1.0 to 0"),
        ("top", "clamped", "5 to 0"),
    }


def test_greedy_decoding_is_temperature_0() -> None:
    assert write(replace(CHAT, sampling=SamplingParams(do_sample=False)))["temperature"] == 0


def test_more_stop_sequences_than_the_api_takes_are_left_to_the_gateway() -> None:
    request = replace(CHAT, stopping=StopConditions(stop=tuple("abcdef")))

    assert "stop_sequences" not in write(request)
    assert ("stop", "dropped", "") in find_losses(request)


def test_truncated_prompts_are_reported() -> None:
    request = replace(CHAT, stopping=StopConditions(overflow="truncate"))

    assert find_losses(request) == {("overflow", "dropped", "")}


def test_json_schema_and_other_formats() -> None:
    schema = replace(CHAT, output=JsonSchemaFormat(Raw(b'{"a":1}')))

    assert write(schema)["response_format"] == {"type": "json_object", "json_schema": {"a": 1}}
    assert find_losses(schema) == set()
    assert find_losses(replace(CHAT, output=RegexFormat("a"))) == {("output", "dropped", "")}


def test_messages() -> None:
    messages = (
        Message("developer", (TextPart("s"),)),
        Message("assistant", (TextPart("I "), TextPart("ask.")), tool_calls=(CALL,)),
        Message("tool", (TextPart("5"),), tool_call_id="a"),
        Message("function", (TextPart("6"),), name="g"),
        Message("assistant", (ReasoningPart("hm"), TextPart("x")), tool_calls=(CALL,)),
        Message("assistant", (RefusalPart("no"),)),
        Message("assistant", tool_calls=(CALL,)),
        Message("assistant"),
    )

    written = write(replace(CHAT, messages=messages))["messages"]

    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]
    assert written == [
        {"role": "system", "content": "s"},
        {"role": "assistant", "tool_plan": "I ask.", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "a"},
        {"role": "tool", "content": "6", "tool_call_id": "g"},
        {"role": "assistant", "content": blocks, "tool_calls": [call]},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": ""},
    ]


def test_prompt_is_a_message_of_the_user() -> None:
    prompt = GenerationRequest(model="w", kind="completion", prompts=("hi", "ho"))

    assert write(prompt)["messages"] == [{"role": "user", "content": "hi"}]
    assert find_losses(prompt) == {
        ("prompt", "dropped", ""),
        ("prompt", "approximated", "as a user's message"),
    }

    wrapped = replace(prompt, prompts=("hi",), templating=PromptOptions(mode="server"))
    assert find_losses(wrapped) == set()
    with pytest.raises(UnsupportedFeature):
        write(replace(prompt, prompts=((1, 2),)))
    assert write(replace(prompt, prompts=()))["messages"] == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("choice", "names", "word"),
    [
        (None, ["f", "g"], None),
        ("auto", ["f", "g"], None),
        ("none", ["f", "g"], "NONE"),
        ("required", ["f", "g"], "REQUIRED"),
        (NamedTool("g"), ["g"], "REQUIRED"),
        (AllowedTools("auto", ("g",)), ["g"], None),
        (AllowedTools("required", ("f",)), ["f"], "REQUIRED"),
    ],
)
def test_tool_choice(choice: Any, names: list[str], word: str | None) -> None:
    body = write(replace(CHAT, tools=TOOLS, tool_choice=choice))

    assert [one["function"]["name"] for one in body["tools"]] == names
    assert all(one["function"]["parameters"]["type"] == "object" for one in body["tools"])
    assert body.get("tool_choice") == word
    assert "strict_tools" not in body


def test_strict_tools() -> None:
    strict = tuple(replace(tool, strict=True) for tool in TOOLS)
    mixed = replace(CHAT, tools=(strict[0], TOOLS[1]))

    body = write(replace(CHAT, tools=strict))

    assert body["strict_tools"] is True
    assert "strict" not in body["tools"][0]["function"]
    assert find_losses(replace(CHAT, tools=strict)) == set()
    assert "strict_tools" not in write(mixed)
    assert find_losses(mixed) == {("tools", "approximated", "strict")}


@pytest.mark.parametrize(
    ("wanted", "thinking", "losses"),
    [
        (ReasoningOptions(include=True), {"type": "enabled"}, set()),
        (ReasoningOptions(budget=9), {"type": "enabled", "token_budget": 9}, set()),
        (ReasoningOptions(effort="none"), {"type": "disabled"}, set()),
        (ReasoningOptions(include=False), {"type": "disabled"}, set()),
        (ReasoningOptions(budget=0), {"type": "disabled"}, set()),
        (ReasoningOptions(effort="low"), {"type": "enabled"}, {("reasoning", "approximated", "")}),
    ],
)
def test_thinking(wanted: ReasoningOptions, thinking: Any, losses: Any) -> None:
    request = replace(CHAT, reasoning=wanted)

    assert write(request)["thinking"] == thinking
    assert find_losses(request) == losses


def test_content_without_a_place_is_reported() -> None:
    messages = (
        Message("user", (TextPart("hi"), AudioPart("aGk=", "wav")), name="Ann"),
        Message("assistant", (ReasoningPart("", redacted="x"),)),
    )

    assert find_losses(replace(CHAT, messages=messages)) == {
        ("messages[0].content[1]", "dropped", "audio"),
        ("messages[0].name", "dropped", "names"),
        ("messages[1].reasoning_content", "dropped", "earlier reasoning"),
    }


def test_translated_request_of_an_own_client_keeps_what_only_cohere_knows(make: MakeCall) -> None:
    turn = {"role": "assistant", "content": "so", "citations": [{"start": 0}]}
    sent = {
        "messages": [{"role": "user", "content": "hi"}, turn],
        "documents": ["a", {"id": "d", "data": {"t": "b"}}],
        "safety_mode": "OFF",
        "thinking": {"type": "enabled", "depth": 3},
    }
    request = decode_request(make(sent)).bind_target("w", "cohere")

    body = write(request)

    assert body == {
        "model": "w",
        "messages": sent["messages"],
        "documents": sent["documents"],
        "safety_mode": "OFF",
        "thinking": {"type": "enabled"},
    }
    assert COHERE.get_kept_keys(request) is None
    assert find_losses(request) == {("thinking.depth", "dropped", "")}


def test_citations_stay_off(make: MakeCall) -> None:
    call = make({"citation_options": {"mode": "DISABLED"}})

    request = decode_request(call)

    assert write(request.bind_target("w", "cohere"))["citation_options"] == {"mode": "OFF"}
    assert COHERE.get_kept_keys(request.bind_target("w", "another")) == {}
    assert "citation_options" not in write(request.bind_target("w", "another"))


def test_rerank() -> None:
    request = RerankRequest(
        model="w",
        queries=("q",),
        documents=("a", "b"),
        truncate=5,
        priority=3,
        extra={"max_tokens_per_doc": Raw(b"9")},
        source="cohere",
    )

    assert write(request) == {
        "model": "w",
        "query": "q",
        "documents": ["a", "b"],
        "priority": 3,
        "max_tokens_per_doc": 9,
    }
    assert COHERE.encode_request(request).path == "/v2/rerank"
    assert find_losses(request) == {("truncate", "dropped", "")}

    foreign = replace(request, source="openai", priority=None, truncate=None)
    assert write(foreign).keys() == {"model", "query", "documents"}
    assert find_losses(foreign) == {("max_tokens_per_doc", "dropped", "")}
    with pytest.raises(UnsupportedFeature):
        write(replace(request, queries=("q", "r")))


def test_embeddings_are_refused() -> None:
    with pytest.raises(UnsupportedFeature):
        COHERE.encode_request(EmbeddingRequest(model="w", inputs=("a",)))


def test_extra_keys_of_parts_keep_their_place() -> None:
    part = TextPart("x", ExtraFields("messages[0].content", {("mood",): "m"}))
    messages = (Message("assistant", (part,), tool_calls=(CALL,)),)

    [written] = write(replace(CHAT, messages=messages))["messages"]

    assert written["content"] == [{"type": "text", "text": "x", "mood": "m"}]


def test_losses_have_the_names_of_the_client() -> None:
    request = replace(CHAT, n=2)

    assert COHERE.unsupported_parameters(request, {"n": "choices"}) == (
        UnsupportedParameter("choices", "dropped", path="n"),
    )
