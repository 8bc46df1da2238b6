"""Workers that report implausible usage: their responses are complete, the gateway counts."""

import json
from typing import Any

import pytest

from tests.conftest import Serve
from tests.fakes import ScriptedWorker
from tests.integration.test_passthrough import build_stream_reply, whole

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
        return [whole(json.dumps(head | {"choices": [choice], "usage": usage}).encode())]
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
    async with ScriptedWorker(*replies, probed=whole(b"{}")) as worker:
        front = await serve(CONFIG.format(worker=worker.url))
        answers = [
            await front.http.post("/v1/chat/completions", json=body, headers=headers)
            for _ in CLAIMS
        ]

    assert [answer.status_code for answer in answers] == [200] * len(CLAIMS)
    for answer, record in zip(answers, front.records, strict=True):
        assert "Hello" in answer.text
        assert record.outcome == "ok"
        assert record.usage is not None
        assert record.usage.source in ("counted", "estimated")
        assert 0 < record.usage.completion_tokens < 100
        if is_stream:
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.json()["usage"]["completion_tokens"] == record.usage.completion_tokens
    logged = [line for line in caplog.messages if "implausible usage" in line]
    assert len(logged) == 1
    assert "'llama'" in logged[0]
    assert worker.url in logged[0]
