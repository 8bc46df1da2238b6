"""A client and workers of one protocol: the client's own bytes go on, the worker's come back."""

import json
from typing import Any

import pytest

from tests.conftest import Serve
from tests.support.fakes import CLOSE, ScriptedWorker

FRONT = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, databricks]}}]
limits: {{drain_timeout: 1s}}
backends:
  pool: {{protocol: openai, profile: vllm, workers: [{workers}], health: {{interval: 1h}}}}
models:
  chat: {{backend: pool, model: llama}}
  llama: {{backend: pool}}
  warm: {{backend: pool, model: llama, defaults: {{temperature: 0.5}}}}
  short: {{backend: pool, model: llama, limits: {{max_tokens: 5}}}}
"""
REQUEST = b'{"messages":[{"role":"user","content":"hi"}],"model":"chat","odd":{"x":1.50},"top_k":3}'
ANSWER = (
    b'{"id":"c1","model":"llama","odd":1.50,"choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"Hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}'
)
EVENTS = [
    b'data: {"id":"c1","model":"llama","choices":[{"index":0,"delta":{"content":"H"}}]}\n\n',
    (
        b'data: {"id":"c1","model":"llama","choices":[{"index":0,"delta":{"content":"i"},'
        b'"finish_reason":"stop"}]}\n\n'
    ),
    b"data: [DONE]\n\n",
]
ERROR = b'data: {"error":{"message":"cuda","type":"server_error","code":500}}\n\n'
MODELS = b'{"object":"list","data":[]}'


def whole(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def build_stream_reply(*events: bytes, end: bytes = b"0\r\n\r\n") -> list[Any]:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return [head, *(b"%x\r\n%b\r\n" % (len(one), one) for one in events), end]


def format_worker_urls(*workers: ScriptedWorker) -> str:
    return ", ".join(f'"{worker.url}"' for worker in workers)


def get_post_bodies(worker: ScriptedWorker) -> list[bytes]:
    return [request.body for request in worker.requests if request.method == "POST"]


PROBED = [whole(MODELS)]
"""The first request to every worker is its probe."""


async def test_unary_passthrough_changes_only_the_model_name(serve: Serve) -> None:
    async with ScriptedWorker(PROBED, [whole(ANSWER)]) as worker:
        front = await serve(FRONT.format(workers=format_worker_urls(worker)))
        answer = await front.http.post("/v1/chat/completions", content=REQUEST)

    assert answer.content == ANSWER.replace(b'"llama"', b'"chat"')
    assert get_post_bodies(worker) == [REQUEST.replace(b'"chat"', b'"llama"')]
    assert answer.headers["x-served-model"] == "1"
    record = front.records[0]
    assert record.usage is not None
    assert (record.usage.completion_tokens, record.usage.source) == (1, "worker")


async def test_streamed_text_passthrough_changes_only_the_model_name(serve: Serve) -> None:
    text = EVENTS[0].replace(b'"H"', b'"e"').replace(b'"choices"', b'"odd":1.50,"choices"')
    async with ScriptedWorker(PROBED, build_stream_reply(EVENTS[0], text, *EVENTS[1:])) as worker:
        front = await serve(FRONT.format(workers=format_worker_urls(worker)))
        body = REQUEST[:-1] + b',"stream":true}'
        answer = await front.http.post("/v1/chat/completions", content=body)

    begin, forwarded, end = answer.content.partition(text.replace(b'"llama"', b'"chat"'))
    assert forwarded
    assert b'"content":"H"' in begin
    assert b'"content":"i"' in end
    assert end.endswith(EVENTS[-1])
    chunks = [json.loads(one[6:]) for one in answer.content.split(b"\n\n")[:-2]]
    assert {(one["id"], one["model"]) for one in chunks} == {("c1", "chat")}
    reasons = [one["choices"][0].get("finish_reason") for one in chunks]
    assert reasons == [None, None, None, None, "stop"]
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert get_post_bodies(worker) == [body.replace(b'"chat"', b'"llama"')]
    record = front.records[0]
    assert record.usage is not None
    assert (record.usage.completion_tokens, record.usage.source) == (3, "estimated")


@pytest.mark.parametrize("model", ["warm", "short"])
async def test_model_defaults_and_limits_disable_passthrough(serve: Serve, model: str) -> None:
    async with ScriptedWorker(PROBED, [whole(ANSWER)]) as worker:
        front = await serve(FRONT.format(workers=format_worker_urls(worker)))
        answer = await front.http.post(
            "/v1/chat/completions", content=REQUEST.replace(b"chat", model.encode())
        )

    assert answer.json()["model"] == model
    filled = {"warm": ("temperature", 0.5), "short": ("max_tokens", 5)}[model]
    assert filled in json.loads(get_post_bodies(worker)[0]).items()


async def test_request_of_another_protocol_is_translated(serve: Serve) -> None:
    async with ScriptedWorker(PROBED, [whole(ANSWER)]) as worker:
        front = await serve(FRONT.format(workers=format_worker_urls(worker)))
        answer = await front.http.post(
            "/serving-endpoints/chat/invocations",
            json={"messages": json.loads(REQUEST)["messages"]},
        )
    assert answer.json()["choices"][0]["message"]["content"] == "Hi"
    assert "odd" not in answer.json()


async def test_worker_error_is_rewritten_by_the_gateway(serve: Serve) -> None:
    error_body = b'{"error":{"message":"bad\\u0000 top_k","type":"BadRequestError","code":400}}'
    async with ScriptedWorker(PROBED, [whole(error_body, "400 Bad Request")]) as worker:
        front = await serve(FRONT.format(workers=format_worker_urls(worker)))
        answer = await front.http.post("/v1/chat/completions", content=REQUEST)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "\0" not in answer.text


@pytest.mark.parametrize("how", ["error", "cut"])
async def test_broken_stream_ends_with_an_error_and_no_done_marker(serve: Serve, how: str) -> None:
    broken = [*EVENTS[:1], ERROR, *EVENTS[1:]] if how == "error" else EVENTS[:1]
    reply = (
        build_stream_reply(*broken)
        if how == "error"
        else [*build_stream_reply(*broken, end=b""), CLOSE]
    )
    async with ScriptedWorker(PROBED, reply) as worker:
        front = await serve(FRONT.format(workers=format_worker_urls(worker)))
        answer = await front.http.post(
            "/v1/chat/completions", content=REQUEST[:-1] + b',"stream":true}'
        )
    begun, text, end = answer.content.partition(b'"content":"H"')
    assert text
    assert b'"model":"chat"' in begun
    assert b'"error"' in end
    assert b"cuda" not in end
    assert b"[DONE]" not in end
    assert front.records[0].outcome == "truncated"
    assert front.records[0].tokens == 1


async def test_passthrough_request_is_retried_on_another_worker(serve: Serve) -> None:
    lost: list[Any] = [CLOSE]
    async with (
        ScriptedWorker(PROBED, lost) as one,
        ScriptedWorker(PROBED, [whole(ANSWER)]) as other,
    ):
        front = await serve(FRONT.format(workers=format_worker_urls(one, other)))
        for _ in range(4):
            answer = await front.http.post("/v1/chat/completions", content=REQUEST)
            assert answer.status_code == 200
    assert len(get_post_bodies(other)) == 4


async def test_unary_worker_response_is_converted_to_a_stream(serve: Serve) -> None:
    async with ScriptedWorker(PROBED, [whole(ANSWER)]) as worker:
        front = await serve(FRONT.format(workers=format_worker_urls(worker)))
        answer = await front.http.post(
            "/v1/chat/completions", content=REQUEST[:-1] + b',"stream":true}'
        )
    assert answer.content.startswith(b"data: ")
    assert answer.content.endswith(b"data: [DONE]\n\n")
    assert b'"content":"Hi"' in answer.content


async def test_streamed_worker_response_is_converted_to_a_unary_response(serve: Serve) -> None:
    async with ScriptedWorker(PROBED, build_stream_reply(*EVENTS)) as worker:
        front = await serve(FRONT.format(workers=format_worker_urls(worker)))
        answer = await front.http.post("/v1/chat/completions", content=REQUEST)
    assert answer.json()["choices"][0]["message"]["content"] == "Hi"
    assert answer.json()["model"] == "chat"
