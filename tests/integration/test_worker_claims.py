"""When a worker reports implausible usage, the response is complete and the gateway counts."""

import json
from typing import Any

import pytest

from tests.conftest import Serve
from tests.integration.test_passthrough import build_response, build_stream_reply
from tests.support.fakes import ScriptedWorker

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
limits: {{drain_timeout: 1s}}
backends:
  pool:
    protocol: openai
    workers: ["{worker}"]
    health: {{interval: 1h}}
    breaker: {{consecutive_failures: 1}}
models:
  chat: {{backend: pool, model: llama, limits: {{context: 1000}}}}
"""
MESSAGES = [{"role": "user", "content": "hi"}]
CLAIMS = [-5, 1001, 10**18, 2**62, 1.5, "2", [2], True]


def write(count: Any, *, is_stream: bool) -> list[Any]:
    usage = {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": 2}
    head = {"id": "c1", "object": "x", "created": 1, "model": "llama"}
    if not is_stream:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "finish_reason": "stop",
        }
        return [build_response(json.dumps(head | {"choices": [choice], "usage": usage}).encode())]
    chunks = [
        head | {"choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": None}]},
        head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        head | {"choices": [], "usage": usage},
    ]
    events = [b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks]
    return build_stream_reply(*events, b"data: [DONE]\n\n")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_passed_through", [True, False])
async def test_implausible_usage_is_counted_by_the_gateway_and_fails_no_response(
    serve: Serve,
    caplog: pytest.LogCaptureFixture,
    *,
    is_stream: bool,
    is_passed_through: bool,
) -> None:
    replies = [write(count, is_stream=is_stream) for count in CLAIMS]
    body: dict[str, Any] = {"model": "chat", "messages": MESSAGES, "stream": is_stream}
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    headers = {} if is_passed_through else {"x-interlingua-strict": "1"}
    async with ScriptedWorker(*replies) as worker:
        gateway = await serve(CONFIG.format(worker=worker.url))
        answers = [
            await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
            for _ in CLAIMS
        ]

    assert [answer.status_code for answer in answers] == [200] * len(CLAIMS)
    for response, record in zip(answers, gateway.records, strict=True):
        assert "Hello" in response.text
        assert record.outcome == "ok"
        assert record.usage is not None
        assert record.usage.source in ("counted", "estimated")
        assert 0 < record.usage.completion_tokens < 100
        if is_stream:
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.json()["usage"]["completion_tokens"] == record.usage.completion_tokens

    logged = [line for line in caplog.messages if "implausible usage" in line]
    assert len(logged) == 1
    assert "'llama'" in logged[0]
    assert worker.url in logged[0]


EMBEDDING = ("/v1/embeddings", {"model": "chat", "input": "hi"}, {
    "object": "list", "model": "llama", "data": [
        {"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}],
    "usage": {"prompt_tokens": -5, "total_tokens": 2**62},
})  # fmt: skip
GENERATE = ("/v2/models/chat/generate", {"text_input": "hi", "parameters": {"details": True}}, {
    "id": "7", "model_name": "llama", "model_version": None, "text_output": "Hello",
    "details": {"finish_reason": "length", "generated_tokens": 2**62,
                "first_token_cost": None, "decode_cost": None},
})  # fmt: skip


@pytest.mark.parametrize(
    ("protocol", "case"), [("openai", EMBEDDING), ("mindie", GENERATE)], ids=["openai", "mindie"]
)
async def test_implausible_usage_of_a_passed_through_response_is_not_forwarded(
    serve: Serve, protocol: str, case: tuple[str, dict[str, Any], dict[str, Any]]
) -> None:
    path, body, response = case
    reply = [build_response(json.dumps(response).encode())]
    async with ScriptedWorker(reply) as worker:
        config = CONFIG.format(worker=worker.url).replace("[openai]", f"[{protocol}]")
        gateway = await serve(config.replace("protocol: openai", f"protocol: {protocol}"))
        answer = await gateway.http.post(path, json=body)
        sent = json.loads(worker.requests[0].body)

    assert answer.status_code == 200, answer.text
    assert sent["model" if protocol == "openai" else "text_input"] in ("llama", "hi")
    assert str(2**62) not in answer.text
    assert "-5" not in answer.text

    shown = answer.json()
    if protocol == "openai":
        assert shown["data"][0]["embedding"] == [0.5, -1.0]
        assert 0 < shown["usage"]["prompt_tokens"] < 100
    else:
        assert shown["text_output"] == "Hello"
        assert 0 < shown["details"]["generated_tokens"] < 100
