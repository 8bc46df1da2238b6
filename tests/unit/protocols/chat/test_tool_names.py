"""Tool names that OpenAI workers reject are replaced, and restored in calls."""

import json
from typing import Any

import pytest

from protocols.core.events import ToolCallStart
from protocols.core.request import (
    AllowedTools,
    GenerationRequest,
    Message,
    NamedTool,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from protocols.openai.endpoints import OpenAI

LONG = "mcp__a_server_with_a_long_name__" + "x" * 60
OTHER = LONG + "y"
CALL = Message("assistant", tool_calls=(ToolCall("c", LONG, "{}"),))
HISTORY = (
    Message("user", (TextPart("a"),)),
    CALL,
    Message("tool", (TextPart("b"),), tool_call_id="c"),
)


def make_request(choice: ToolChoice | None = None, *names: str) -> GenerationRequest:
    return GenerationRequest(
        model="w",
        kind="chat",
        messages=HISTORY,
        tools=tuple(map(Tool, names or (LONG, OTHER, "f"))),
        tool_choice=choice,
    )


def encode(adapter: OpenAI, request: GenerationRequest) -> Any:
    return json.loads(adapter.encode_request(request).body)


@pytest.mark.parametrize("profile", ["openai", "azure"])
def test_long_names_are_shortened_wherever_they_stand(profile: str) -> None:
    body = encode(OpenAI(profile), make_request(NamedTool(LONG)))

    first, second, third = (tool["function"]["name"] for tool in body["tools"])
    assert (len(first), len(second), third) == (64, 64, "f")
    assert first != second
    assert body["tool_choice"]["function"]["name"] == first
    assert body["messages"][1]["tool_calls"][0]["function"]["name"] == first


def test_allowed_tools_are_shortened() -> None:
    body = encode(OpenAI(), make_request(AllowedTools("auto", (LONG,))))

    [allowed] = body["tool_choice"]["allowed_tools"]["tools"]
    assert allowed["function"]["name"] == body["tools"][0]["function"]["name"]


def test_long_names_of_earlier_calls_are_shortened_without_their_tools() -> None:
    body = encode(OpenAI(), make_request(None, "f"))

    assert len(body["messages"][1]["tool_calls"][0]["function"]["name"]) == 64


def test_responses_api_of_the_worker_gets_short_names() -> None:
    adapter = OpenAI(worker_api="responses")

    assert len(encode(adapter, make_request())["tools"][0]["name"]) == 64


@pytest.mark.parametrize("profile", ["vllm", "sglang", "llamacpp", "interlingua"])
def test_open_workers_get_the_names_as_they_are(profile: str) -> None:
    body = encode(OpenAI(profile), make_request())

    assert body["tools"][0]["function"]["name"] == LONG


@pytest.mark.parametrize("is_known", [True, False])
def test_names_are_restored_in_the_response(is_known: bool) -> None:
    adapter, request = OpenAI(), make_request()
    short = encode(adapter, request)["tools"][0]["function"]["name"]
    call = {"id": "c", "type": "function", "function": {"name": short, "arguments": "{}"}}
    if not is_known:
        call["function"] = {"name": "unknown", "arguments": "{}"}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    decoder = adapter.create_decoder(request)
    events = [*decoder.feed(json.dumps({"choices": [choice]}).encode()), *decoder.close()]

    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    assert names == [LONG if is_known else "unknown"]
