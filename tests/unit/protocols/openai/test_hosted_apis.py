"""What is written for the workers of a hosted API; tests/integration plays the whole table."""

import json
from typing import Any

import pytest

from protocols.chat.messages import shorten_call_id
from protocols.core.request import (
    AllowedTools,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    NamedTool,
    ReasoningOptions,
    ReasoningPart,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from protocols.openai.endpoints import OpenAI
from protocols.openai.hosted_apis import HOSTED_APIS

HI = Message("user", (TextPart("hi"),))


def make_chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "m", "kind": "chat", "messages": (HI,), **fields})


def encode(profile: str, **fields: Any) -> Any:
    return json.loads(OpenAI(profile).encode_request(make_chat(**fields)).body)


def list_losses(profile: str, **fields: Any) -> set[tuple[str, str]]:
    losses = OpenAI(profile).unsupported_parameters(make_chat(**fields), {})
    return {(one.field, one.reason) for one in losses}


def test_fields_that_an_api_lacks_are_not_written() -> None:
    fields: dict[str, Any] = {
        "logprobs": LogprobsOptions(top=2),
        "sampling": SamplingParams(logit_bias={1: 2.0}),
        "labels": {"user": "u", "metadata.a": "b"},
    }

    assert encode("vertex", **fields).keys() == {"model", "messages"}
    assert list_losses("vertex", **fields) == {
        ("top", "dropped"), ("logit_bias", "dropped"), ("user", "dropped"), ("metadata", "dropped"),
    }  # fmt: skip
    assert encode("openrouter", **fields).keys() > {"logprobs", "logit_bias", "user", "metadata"}


@pytest.mark.parametrize(("profile", "has_options"), [("mistral", False), ("groq", True)])
def test_stream_options_are_written_where_they_are_known(profile: str, has_options: bool) -> None:
    body = encode(profile, stream=True)

    assert body["stream"] is True
    assert ("stream_options" in body) == has_options


def test_limit_has_the_name_that_the_api_knows() -> None:
    request: dict[str, Any] = {
        "provided_fields": frozenset({"max_completion_tokens"}),
        "source": "openai",
    }
    for name, api in HOSTED_APIS.items():
        request_fields = {**request, "stopping": StopConditions(max_tokens=9)}
        old = "max_completion_tokens" in api.lacks
        assert encode(name, **request_fields)["max_tokens" if old else "max_completion_tokens"] == 9


def test_schema_is_reported_where_only_objects_are_known() -> None:
    schema = JsonSchemaFormat(b"{}")  # type: ignore[arg-type]

    assert "response_format" not in encode("deepseek", output=schema)
    assert list_losses("deepseek", output=schema) == {("output", "dropped")}
    assert encode("deepseek", output=JsonObjectFormat())["response_format"] == {
        "type": "json_object"
    }


def test_a_default_that_an_api_lacks_is_no_loss() -> None:
    """Many SDKs send them always."""
    defaults = SamplingParams(frequency_penalty=0.0, presence_penalty=0.0)
    others = SamplingParams(frequency_penalty=0.5, presence_penalty=-0.5)

    assert list_losses("groq", n=1, sampling=defaults) == set()
    assert list_losses("groq", n=2, sampling=others) == {
        ("n", "dropped"), ("frequency_penalty", "dropped"), ("presence_penalty", "dropped"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "sent", "losses"),
    [
        ("auto", True, set()),
        ("none", False, set()),
        ("required", True, {("tool_choice", "dropped")}),
        (NamedTool("f"), True, {("tool_choice", "dropped")}),
        (AllowedTools("auto", ("f",)), True, set()),
    ],
)
def test_choice_of_a_tool_is_kept_without_tool_choice_or_reported(
    choice: ToolChoice, sent: bool, losses: set[tuple[str, str]]
) -> None:
    """Ollama ignores ``tool_choice``; it can't call tools that it does not get."""
    fields: dict[str, Any] = {"tools": (Tool("f"),), "tool_choice": choice}
    body = encode("ollama", **fields)

    assert "tool_choice" not in body
    assert ("tools" in body) == sent
    assert list_losses("ollama", **fields) == losses


@pytest.mark.parametrize(
    ("effort", "sent", "losses"),
    [
        ("minimal", "low", {("effort", "approximated")}),
        ("max", "high", {("effort", "approximated")}),
        ("medium", "medium", set()),
    ],
)
def test_reasoning_effort_that_xai_refuses_is_the_nearest_one(
    effort: str, sent: str, losses: set[tuple[str, str]]
) -> None:
    reasoning = ReasoningOptions(effort=effort)

    assert encode("xai", reasoning=reasoning)["reasoning_effort"] == sent
    assert list_losses("xai", reasoning=reasoning) == losses


def test_sampling_that_deepseek_does_anyway_is_no_loss() -> None:
    assert list_losses("deepseek", sampling=SamplingParams(temperature=1.0)) == set()
    assert list_losses("deepseek", sampling=SamplingParams(temperature=0.5)) == {
        ("temperature", "approximated")
    }


def test_call_ids_have_nine_letters_and_digits_for_mistral() -> None:
    turn = Message("assistant", (ReasoningPart("hm"),), tool_calls=(ToolCall("call_1", "f", "{}"),))
    result = Message("tool", (TextPart("x"),), tool_call_id="call_1")
    messages = (HI, turn, result)

    _, sent, answer = encode("mistral", messages=messages)["messages"]

    assert sent["tool_calls"][0]["id"] == answer["tool_call_id"] == shorten_call_id("call_1")
    assert "reasoning_content" not in sent
    assert encode("groq", messages=messages)["messages"][1]["reasoning"] == "hm"
    assert shorten_call_id("a1b2c3d4e") == "a1b2c3d4e"
    assert shorten_call_id("x") != shorten_call_id("y")
