"""The gateway meets the Ollama cases, also those about what a worker receives."""

from typing import Any

import msgspec
import pytest

from tests.conformance.cases import Case
from tests.conformance.conftest import RunCase
from tests.conformance.ollama import CASES
from tests.conftest import Serve
from tests.support.fakes import ScriptedWorker, make_reply

WITH_WORKER = {14, 15, 16, 17}
"""The numbers of the cases below."""

BEFORE_A_WORKER = """
listeners: [{{address: "127.0.0.1:0", protocols: [ollama]}}]
limits: {{drain_timeout: 1s}}
backends: {{pool: {{protocol: openai, profile: vllm, workers: ["{url}"]}}}}
models: {{mock: {{backend: pool, ollama: {{thinking: true, insert: true}}}}}}
"""
ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "mock",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    ],
}
HI = {"role": "user", "content": "say hi"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_conformance_case(run_case: RunCase, case: Case) -> None:
    await run_case("ollama", case)


def test_every_case_number_is_covered_and_ids_are_unique() -> None:
    numbers = set(range(1, 41)) - WITH_WORKER
    assert {case.number for case in CASES} == {f"OL-{n:02}" for n in numbers}
    assert len({case.id for case in CASES}) == len(CASES)


async def send(serve: Serve, body: Any, path: str = "/api/chat") -> tuple[dict[str, Any], str]:
    """Send a request; return the worker's request and the loss header's entries."""
    async with ScriptedWorker([make_reply(msgspec.json.encode(ANSWER))]) as worker:
        gateway = await serve(BEFORE_A_WORKER.format(url=worker.url))

        response = await gateway.http.post(path, json={"model": "mock", "stream": False, **body})

        assert response.status_code == 200, response.text
        [sent] = [one for one in worker.requests if one.method == "POST"]
        fields: dict[str, Any] = msgspec.json.decode(sent.body)
        return fields, response.headers.get("x-interlingua-loss", "")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


async def test_ol14_tool_result_without_ids_is_paired_with_its_call(serve: Serve) -> None:
    turn = {"role": "assistant", "tool_calls": [call("f", x=1)]}
    result = {"role": "tool", "tool_name": "f", "content": "42"}

    sent, losses = await send(serve, {"messages": [HI, turn, result]})

    _, assistant, tool = sent["messages"]
    [tool_call] = assistant["tool_calls"]

    assert tool_call["function"]["arguments"] == '{"x":1}'
    assert tool_call["id"]
    assert tool == {"role": "tool", "content": "42", "tool_call_id": tool_call["id"]}
    assert losses == ""


async def test_ol15_tool_results_are_paired_by_name(serve: Serve) -> None:
    turn = {"role": "assistant", "tool_calls": [call("f"), call("g")]}
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("g", "f")]

    sent, _ = await send(serve, {"messages": [HI, turn, *results]})

    ids = {one["function"]["name"]: one["id"] for one in sent["messages"][1]["tool_calls"]}
    assert [one["tool_call_id"] for one in sent["messages"][2:]] == [ids["g"], ids["f"]]


async def test_ol16_schema_becomes_a_response_format(serve: Serve) -> None:
    schema = {"type": "object", "properties": {}}

    sent, _ = await send(serve, {"messages": [HI], "format": schema})

    assert sent["response_format"]["type"] == "json_schema"
    assert sent["response_format"]["json_schema"]["schema"] == schema


async def test_ol17_json_becomes_json_object(serve: Serve) -> None:
    sent, _ = await send(serve, {"messages": [HI], "format": "json"})

    assert sent["response_format"] == {"type": "json_object"}


async def test_options_reach_the_worker_under_its_names(serve: Serve) -> None:
    options = {"temperature": 0, "top_k": 5.7, "num_predict": 9, "repeat_penalty": 1.1, "seed": 3}

    sent, losses = await send(serve, {"messages": [HI], "options": options})

    expected = {"temperature": 0.0, "top_k": 5, "max_tokens": 9, "repetition_penalty": 1.1}
    assert {name: sent[name] for name in expected} == expected
    assert sent["seed"] == 3
    assert losses == ""


async def test_what_no_worker_can_honour_is_reported(serve: Serve) -> None:
    body = {"messages": [HI], "keep_alive": "5m", "options": {"num_ctx": 9, "mirostat": 2}}

    _, losses = await send(serve, body)

    reported = {"keep_alive=dropped", "options.num_ctx=dropped", "options.mirostat=dropped"}
    assert set(losses.split(",")) == reported


@pytest.mark.parametrize(
    ("think", "effort"), [(True, "medium"), ("low", "low"), ("max", "xhigh"), (False, "none")]
)
async def test_think_becomes_a_reasoning_effort(
    serve: Serve, think: bool | str, effort: str
) -> None:
    sent, _ = await send(serve, {"messages": [HI], "think": think})

    assert sent["reasoning_effort"] == effort


async def test_images_become_data_urls(serve: Serve) -> None:
    message = {"role": "user", "content": "look", "images": ["iVBORw0KGgo="]}

    sent, _ = await send(serve, {"messages": [message]})

    text, image = sent["messages"][0]["content"]
    assert text == {"type": "text", "text": "look"}
    assert image["image_url"]["url"] == "data:image/png;base64,iVBORw0KGgo="
