"""Limits of the gateway's configuration, told as OVMS tells those of its graph."""

import json
from typing import Any

import pytest

from tests.conftest import Serve
from tests.support.fakes import ScriptedWorker, make_reply

ANSWER = make_reply(
    json.dumps(
        {
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "hi"},
                    "finish_reason": "stop",
                }
            ]
        }
    ).encode()
)
HI = [{"role": "user", "content": "hi"}]


def build_config(url: str, protocol: str) -> str:
    return json.dumps(
        {
            "listeners": [{"address": "127.0.0.1:0", "protocols": ["ovms"]}],
            "backends": {"w": {"protocol": protocol, "workers": [url]}},
            "models": {"m": {"backend": "w", "limits": {"max_tokens": 100}}},
        }
    )


@pytest.mark.parametrize("protocol", ["ovms", "openai"])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_must_be_below_the_limit_of_the_graph(
    serve: Serve, protocol: str, field: str
) -> None:
    async with ScriptedWorker([ANSWER]) as worker:
        front = await serve(build_config(worker.url, protocol))
        answers = [
            await front.http.post(
                "/v3/chat/completions", json={"model": "m", "messages": HI, field: count}
            )
            for count in (99, 100, 101)
        ]

    assert [one.status_code for one in answers] == [200, 400, 400]
    for one in answers[1:]:
        text = f"{field} exceeds limit provided in graph config: 100"
        assert one.json()["error"].endswith(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            (
                "This model's maximum context length is 8 tokens. However, you requested 14 "
                "tokens (5 in the messages, 9 in the completion)."
            ),
            "Number of prompt tokens: 5 + max tokens value: 9 exceeds model max length: 8",
        ),
        (
            (
                "'max_tokens' or 'max_completion_tokens' is too large: 9. This model's maximum "
                "context length is 8 tokens and your request has 5 input tokens (9 > 8 - 5)."
            ),
            "Number of prompt tokens: 5 + max tokens value: 9 exceeds model max length: 8",
        ),
        (
            (
                "This model's maximum context length is 8 tokens. However, your messages resulted "
                "in 20 tokens."
            ),
            "Number of prompt tokens: 20 exceeds model max length: 8",
        ),
    ],
)
async def test_prompt_and_response_tokens_are_named_apart(
    serve: Serve, text: str, expected: str
) -> None:
    error: dict[str, Any] = {"error": {"message": text, "code": "context_length_exceeded"}}
    refusal = make_reply(json.dumps(error).encode(), "400 Bad Request")
    async with ScriptedWorker([refusal]) as worker:
        front = await serve(build_config(worker.url, "openai"))
        answer = await front.http.post("/v3/chat/completions", json={"model": "m", "messages": HI})

    assert answer.status_code == 400
    assert answer.json()["error"].endswith(expected)
