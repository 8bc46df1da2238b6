"""Workers that answer as Ollama documents its OpenAI API, behind the configuration of the page.

The scripted worker answers in Ollama's own shape: ``fp_ollama``, the role in every chunk, a tool
call in one piece, usage in a chunk without choices, ``reasoning`` instead of ``reasoning_content``.
"""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import RunningGateway, Serve
from tests.support.fakes import ScriptedWorker, chunked, make_reply

PAGE: Final = Path(__file__).parents[2] / "docs/howto/ollama.md"
HEAD: Final = {"id": "chatcmpl-730", "created": 1788158498, "model": "llama3.2"}
USAGE: Final = {"prompt_tokens": 26, "completion_tokens": 8, "total_tokens": 34}
HI: Final = {"role": "user", "content": "hi"}
TOOL: Final = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL: Final = {
    "id": "call_y9wzw3f8",
    "index": 0,
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Paris"}'},
}


def make_unary(message: dict[str, Any], reason: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    answer = {"object": "chat.completion", "system_fingerprint": "fp_ollama", **HEAD}
    return make_reply(json.dumps({**answer, "choices": [choice], "usage": USAGE}).encode())


def make_stream(*deltas: dict[str, Any], reason: str) -> bytes:
    answer = {"object": "chat.completion.chunk", "system_fingerprint": "fp_ollama", **HEAD}
    choices = [
        [{"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": None}]
        for delta in deltas
    ]
    last = [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": reason}]
    chunks = [{**answer, "choices": choice} for choice in [*choices, last]]
    events = [*map(json.dumps, [*chunks, {**answer, "choices": [], "usage": USAGE}]), "[DONE]"]
    return chunked(*(f"data: {event}\n\n".encode() for event in events))


@pytest.fixture
def reply(request: pytest.FixtureRequest) -> bytes:
    return bytes(request.param)


@pytest.fixture
async def worker(reply: bytes) -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker([reply]) as worker:
        yield worker


@pytest.fixture
async def gateway(serve: Serve, worker: ScriptedWorker) -> RunningGateway:
    match = re.search(
        r"^```yaml title[^\n]*\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert match is not None
    text = match[1].replace("http://127.0.0.1:11434", worker.url)
    return await serve(text.replace("127.0.0.1:8000", "127.0.0.1:0"))


REASONING_MESSAGE: Final = {"content": "Sunny", "reasoning": "Hm"}
CALL_MESSAGE: Final = {"content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize("reply", [make_unary(REASONING_MESSAGE, "stop")], indirect=True)
async def test_answer_and_its_reasoning_reach_clients_of_each_protocol(
    gateway: RunningGateway,
) -> None:
    body = {"model": "chat", "messages": [HI]}
    openai = (await gateway.http.post("/v1/chat/completions", json=body)).json()
    own = (await gateway.http.post("/api/chat", json={**body, "stream": False})).json()
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}
    anthropic = await gateway.http.post("/v1/messages", json=body | thinking)

    assert openai["choices"][0]["message"]["content"] == "Sunny"
    assert openai["choices"][0]["message"]["reasoning_content"] == "Hm"
    assert openai["usage"] == USAGE
    assert (own["message"]["content"], own["message"]["thinking"]) == ("Sunny", "Hm")
    assert (own["prompt_eval_count"], own["eval_count"]) == (26, 8)
    assert [part["type"] for part in anthropic.json()["content"]] == ["thinking", "text"]


@pytest.mark.parametrize(
    "reply",
    [make_stream({"content": "", "reasoning": "Hm"}, {"content": "Sunny"}, reason="length")],
    indirect=True,
)
async def test_stream_ends_with_the_reason_and_the_usage(gateway: RunningGateway) -> None:
    body = {"model": "chat", "messages": [HI], "stream": True}
    text = (await gateway.http.post("/api/chat", json=body)).text
    lines = [json.loads(line) for line in text.splitlines()]

    assert "".join(line["message"].get("thinking", "") for line in lines) == "Hm"
    assert "".join(line["message"]["content"] for line in lines) == "Sunny"
    assert (lines[-1]["done_reason"], lines[-1]["eval_count"]) == ("length", 8)


@pytest.mark.parametrize(
    "reply",
    [make_unary(CALL_MESSAGE, "tool_calls"), make_stream(CALL_MESSAGE, reason="tool_calls")],
    indirect=True,
    ids=["unary", "streamed"],
)
async def test_tool_call_in_one_piece_reaches_an_anthropic_client(
    gateway: RunningGateway, worker: ScriptedWorker, request: pytest.FixtureRequest
) -> None:
    stream = request.node.callspec.id == "streamed"
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    body = {"model": "chat", "max_tokens": 9, "messages": [HI], "tools": [tool], "stream": stream}
    text = (await gateway.http.post("/v1/messages", json=body)).text

    assert '"name":"weather"' in text
    assert '"tool_use"' in text
    assert "Paris" in text
    sent = json.loads(worker.requests[0].body)
    assert (sent["model"], sent["max_tokens"]) == ("llama3.2", 9)


@pytest.mark.parametrize("reply", [make_unary({"content": "Sunny"}, "stop")], indirect=True)
async def test_what_ollama_would_ignore_is_not_sent_and_reported(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    ignored = {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "logit_bias": {"1": 2},
        "user": "u",
        "top_k": 5,
    }
    body = {"model": "chat", "messages": [{"role": "developer", "content": "brief"}, HI]}
    response = await gateway.http.post(
        "/v1/chat/completions", json={**body, **ignored, "max_completion_tokens": 9}
    )
    loss = response.headers["x-interlingua-loss"]
    sent = json.loads(worker.requests[0].body)

    names = ("tool_choice", "parallel_tool_calls", "logit_bias", "user", "top_k")
    assert [name for name in names if f"{name}=dropped" not in loss] == []
    assert ignored.keys() & sent.keys() == {"tools"}
    assert sent["max_tokens"] == 9
    assert sent["messages"][0]["role"] == "system"


ERROR: Final = {
    "message": "model 'llama3.2' not found",
    "type": "not_found_error",
    "param": None,
    "code": None,
}


@pytest.mark.parametrize(
    "reply", [make_reply(json.dumps({"error": ERROR}).encode(), "404 Not Found")], indirect=True
)
async def test_model_that_was_not_pulled_is_a_failure_of_the_worker(
    gateway: RunningGateway,
) -> None:
    body = {"model": "chat", "messages": [HI]}
    response = await gateway.http.post("/v1/chat/completions", json=body)

    assert response.status_code == 502
    assert response.json()["error"]["message"] == "The worker does not know the model."


EMBEDDED: Final = {
    "object": "list",
    "model": "all-minilm",
    "data": [{"object": "embedding", "embedding": [0.5, -0.25], "index": 0}],
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
}


@pytest.mark.parametrize("reply", [make_reply(json.dumps(EMBEDDED).encode())], indirect=True)
async def test_texts_are_embedded(gateway: RunningGateway, worker: ScriptedWorker) -> None:
    body = {"model": "embed", "input": ["a"]}
    response = await gateway.http.post("/v1/embeddings", json=body)

    assert response.json()["data"][0]["embedding"] == [0.5, -0.25]
    assert worker.requests[0].path == "/v1/embeddings"
