"""A chat client's custom tool stays one, although the worker knows functions only."""

import json
from typing import Any

import pytest

from tests.conftest import Serve
from tests.property.test_unknown_keys import CUSTOM_TOOLS
from tests.support.fakes import ScriptedWorker, chunked, make_reply

CALL = {"id": "c9", "type": "function", "function": {"name": "f", "arguments": '{"input":"go\\n"}'}}
PIECES = ("", '{"inp', 'ut":"go\\', 'n"}')


def build_event(delta: dict[str, Any], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return b"data: " + json.dumps({"id": "x", "model": "w", "choices": [choice]}).encode() + b"\n\n"


def build_stream() -> bytes:
    events = []
    for i, piece in enumerate(PIECES):
        call = {"index": 0, "function": {"arguments": piece}}
        first = {"id": "c9", "type": "function", "function": {"name": "f", "arguments": ""}}
        events.append(build_event({"tool_calls": [call | (first if i == 0 else {})]}))
    return chunked(*events, build_event({}, "tool_calls"), b"data: [DONE]\n\n")


def read_stream(body: str) -> list[dict[str, Any]]:
    data = [line[6:] for line in body.splitlines() if line.startswith("data: {")]
    choices = [choice for one in data for choice in json.loads(one)["choices"]]
    return [call for choice in choices for call in choice["delta"].get("tool_calls", ())]


@pytest.mark.parametrize("on_loss", ["report", "reject"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_comes_back_as_one_of_the_custom_tool(
    serve: Serve, stream: bool, on_loss: str
) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    unary = make_reply(json.dumps({"id": "x", "model": "w", "choices": [choice]}).encode())
    async with ScriptedWorker([build_stream() if stream else unary]) as worker:
        config = {
            "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
            "backends": {"w": {"protocol": "openai", "profile": "vllm", "workers": [worker.url]}},
            "models": {"m": {"backend": "w", "on_loss": on_loss}},
            "limits": {"shutdown_delay": "0s", "drain_timeout": "1s"},
        }
        gateway = await serve(json.dumps(config))
        body = {**CUSTOM_TOOLS, "stream": stream}
        response = await gateway.http.post("/v1/chat/completions", json=body)

        sent = json.loads(worker.requests[0].body)

    assert response.status_code == 200
    assert sent["tools"][0]["function"]["parameters"]["required"] == ["input"]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    function = sent["messages"][1]["tool_calls"][0]["function"]
    assert function == {"name": "f", "arguments": '{"input":"a"}'}
    if stream:
        calls = read_stream(response.text)
        assert "".join(one["custom"].get("input", "") for one in calls) == "go\n"
    else:
        calls = response.json()["choices"][0]["message"]["tool_calls"]
        assert calls[0]["custom"] == {"name": "f", "input": "go\n"}
    assert (calls[0]["id"], calls[0]["type"]) == ("c9", "custom")
    lost = "tools[0].custom=emulated,messages[1].tool_calls[0].custom=emulated"
    assert response.headers["x-interlingua-loss"] == lost


async def test_an_argument_that_the_custom_tool_has_not_is_reported(serve: Serve) -> None:
    function = {"name": "f", "arguments": '{"input":"go","x":1}'}
    message = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    reply = make_reply(json.dumps({"id": "x", "model": "w", "choices": [choice]}).encode())
    async with ScriptedWorker([reply]) as worker:
        config = {
            "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
            "backends": {"w": {"protocol": "openai", "profile": "vllm", "workers": [worker.url]}},
            "models": {"m": {"backend": "w"}},
            "limits": {"shutdown_delay": "0s", "drain_timeout": "1s"},
        }
        gateway = await serve(json.dumps(config))
        response = await gateway.http.post("/v1/chat/completions", json=CUSTOM_TOOLS)

    calls = response.json()["choices"][0]["message"]["tool_calls"]
    assert calls[0]["custom"] == {"name": "f", "input": "go"}
    lost = "response.choices[0].message.tool_calls[0].function.arguments.x=dropped"
    assert lost in response.headers["x-interlingua-loss"]
