"""A client's custom tool stays one, also where the worker knows functions only."""

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


RESPONSES_BODY: dict[str, Any] = {
    "model": "m",
    "tools": [
        {
            "type": "custom",
            "name": "f",
            "description": "d",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"},
        },
        {"type": "function", "name": "g", "parameters": {"type": "object"}},
    ],
    "tool_choice": {"type": "custom", "name": "f"},
    "input": [
        {"role": "user", "content": "hi"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "f", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "1"},
    ],
}
CUSTOM_CALL = {"id": "c9", "type": "custom", "custom": {"name": "f", "input": "go\n"}}


def build_answer(call: dict[str, Any], *, stream: bool) -> bytes:
    """A worker's answer with one call; the text of a streamed one comes in two pieces."""
    kind = call["type"]
    key = "input" if kind == "custom" else "arguments"
    if not stream:
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return make_reply(json.dumps({"id": "x", "model": "w", "choices": [choice]}).encode())
    text = call[kind][key]
    begun = {**call, "index": 0, kind: {**call[kind], key: text[:1]}}
    rest = {"index": 0, kind: {key: text[1:]}}
    return chunked(
        build_event({"tool_calls": [begun]}),
        build_event({"tool_calls": [rest]}),
        build_event({}, "tool_calls"),
        b"data: [DONE]\n\n",
    )


def read_response(text: str, *, stream: bool) -> tuple[dict[str, Any], str]:
    """The response, and the input of its calls as their events say."""
    if not stream:
        response = json.loads(text)
        return response, response["output"][0]["input"]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [one for one in events if one["type"] == "response.custom_tool_call_input.delta"]
    return events[-1]["response"], "".join(one["delta"] for one in deltas)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "call", "lost"),
    [
        ({"profile": "openai"}, CUSTOM_CALL, None),
        ({"profile": "azure", "options": {"api_version": "v1"}}, CUSTOM_CALL, None),
        ({"profile": "azure"}, CALL, "tools[0]=emulated,tools[0].format=approximated"),
        ({"profile": "sglang"}, CALL, "tools[0]=emulated,tools[0].format=approximated"),
    ],
)
async def test_custom_tools_of_the_responses_api(
    serve: Serve, options: dict[str, Any], call: dict[str, Any], lost: str | None, stream: bool
) -> None:
    async with ScriptedWorker([build_answer(call, stream=stream)]) as worker:
        config = {
            "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
            "backends": {"w": {"protocol": "openai", **options, "workers": [worker.url]}},
            "models": {"m": {"backend": "w", "on_loss": "report"}},
            "limits": {"shutdown_delay": "0s", "drain_timeout": "1s"},
        }
        gateway = await serve(json.dumps(config))
        body = {**RESPONSES_BODY, "stream": stream}
        response = await gateway.http.post("/v1/responses", json=body)

        sent = json.loads(worker.requests[0].body)

    assert response.status_code == 200
    kind = call["type"]
    [called] = sent["messages"][1]["tool_calls"]
    assert (sent["tools"][0]["type"], called["type"]) == (kind, kind)
    assert sent["tool_choice"] == {"type": kind, kind: {"name": "f"}}
    assert sent["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "1"}
    if kind == "custom":
        grammar = {"syntax": "lark", "definition": "start: A"}
        assert sent["tools"][0]["custom"]["format"] == {"type": "grammar", "grammar": grammar}
        assert called["custom"] == {"name": "f", "input": "a"}
    else:
        assert called["function"] == {"name": "f", "arguments": '{"input":"a"}'}
    reported = response.headers.get("x-interlingua-loss")
    assert reported == (lost and f"{lost},input[1]=emulated")
    answer, text = read_response(response.text, stream=stream)
    [item] = answer["output"]
    assert (item["type"], item["call_id"], item["name"]) == ("custom_tool_call", "c9", "f")
    assert (item["input"], text) == ("go\n", "go\n")
