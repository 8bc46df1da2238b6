"""With a client and workers of the OpenAI protocol, bytes pass through in both directions."""

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
HI_RESPONSE = (
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


def build_response(body: bytes, status: str = "200 OK") -> bytes:
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


USAGE_OPTION = b',"stream_options":{"include_usage":true}}'


async def test_unary_passthrough_changes_only_the_model_name(serve: Serve) -> None:
    async with ScriptedWorker([build_response(HI_RESPONSE)]) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post("/v1/chat/completions", content=REQUEST)

    assert response.content == HI_RESPONSE.replace(b'"llama"', b'"chat"')
    assert get_post_bodies(worker) == [REQUEST.replace(b'"chat"', b'"llama"')]
    assert response.headers["x-served-model"] == "1"

    record = gateway.records[0]
    assert record.usage is not None
    assert (record.usage.completion_tokens, record.usage.source) == (1, "worker")


async def test_streamed_text_passthrough_changes_only_the_model_name(serve: Serve) -> None:
    text = EVENTS[0].replace(b'"H"', b'"e"').replace(b'"choices"', b'"odd":1.50,"choices"')
    async with ScriptedWorker(build_stream_reply(EVENTS[0], text, *EVENTS[1:])) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        body = REQUEST[:-1] + b',"stream":true}'
        response = await gateway.http.post("/v1/chat/completions", content=body)

    begin, forwarded, end = response.content.partition(text.replace(b'"llama"', b'"chat"'))
    assert forwarded
    assert b'"content":"H"' in begin
    assert b'"content":"i"' in end
    assert end.endswith(EVENTS[-1])

    chunks = [json.loads(one[6:]) for one in response.content.split(b"\n\n")[:-2]]
    assert {(one["id"], one["model"]) for one in chunks} == {("c1", "chat")}

    reasons = [one["choices"][0].get("finish_reason") for one in chunks]
    assert reasons == [None, None, None, None, "stop"]
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert get_post_bodies(worker) == [body.replace(b'"chat"', b'"llama"')[:-1] + USAGE_OPTION]

    record = gateway.records[0]
    assert record.usage is not None
    assert (record.usage.completion_tokens, record.usage.source) == (3, "estimated")


def add_usage(event: bytes) -> bytes:
    """An event as OpenAI writes it if the request asks for usage."""
    return event.replace(b'"choices"', b'"usage":null,"choices"')


@pytest.mark.parametrize(
    ("options", "is_shown"),
    [(b"", False), (b',"stream_options":{"include_usage":false}', False),
     (b',"stream_options":{"include_usage":true}', True)],
)  # fmt: skip
async def test_worker_reports_the_usage_of_every_stream_and_the_client_gets_it_on_request(
    serve: Serve, options: bytes, *, is_shown: bool
) -> None:
    """The worker says ``"usage":null`` in each event, and 10 and 3 tokens in the last one."""
    usage = (
        b'data: {"id":"c1","model":"llama","choices":[],'
        b'"usage":{"prompt_tokens":10,"completion_tokens":3,"total_tokens":13}}\n\n'
    )
    text = EVENTS[0].replace(b'"H"', b'"e"')
    events = [*map(add_usage, [EVENTS[0], text, text, *EVENTS[1:-1]]), usage, EVENTS[-1]]
    async with ScriptedWorker(build_stream_reply(*events)) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        body = REQUEST[:-1] + b',"stream":true' + options + b"}"
        response = await gateway.http.post("/v1/chat/completions", content=body)

    [sent] = get_post_bodies(worker)
    assert json.loads(sent)["stream_options"] == {"include_usage": True}
    assert (b'"usage"' in response.content) == is_shown
    assert (b'"prompt_tokens":10' in response.content) == is_shown
    record = gateway.records[0]
    assert record.usage is not None
    assert (record.usage.prompt_tokens, record.usage.source) == (10, "worker")


async def test_usage_is_not_requested_from_workers_if_that_is_disabled(serve: Serve) -> None:
    async with ScriptedWorker(build_stream_reply(*EVENTS)) as worker:
        config = FRONT.format(workers=format_worker_urls(worker))
        gateway = await serve(config + "defaults: {stream_usage: false}\n")
        body = REQUEST[:-1] + b',"stream":true}'
        await gateway.http.post("/v1/chat/completions", content=body)

    assert get_post_bodies(worker) == [body.replace(b'"chat"', b'"llama"')]
    record = gateway.records[0]
    assert record.usage is not None
    assert record.usage.source == "estimated"


@pytest.mark.parametrize("model", ["warm", "short"])
async def test_model_defaults_and_limits_disable_passthrough(serve: Serve, model: str) -> None:
    async with ScriptedWorker([build_response(HI_RESPONSE)]) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post(
            "/v1/chat/completions", content=REQUEST.replace(b"chat", model.encode())
        )

    assert response.json()["model"] == model

    filled = {"warm": ("temperature", 0.5), "short": ("max_tokens", 5)}[model]
    assert filled in json.loads(get_post_bodies(worker)[0]).items()


async def test_request_of_another_protocol_is_translated(serve: Serve) -> None:
    async with ScriptedWorker([build_response(HI_RESPONSE)]) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post(
            "/serving-endpoints/chat/invocations",
            json={"messages": json.loads(REQUEST)["messages"]},
        )

    assert response.json()["choices"][0]["message"]["content"] == "Hi"
    assert "odd" not in response.json()


async def test_worker_error_keeps_its_keys_and_no_controls(serve: Serve) -> None:
    error_body = b'{"error":{"message":"bad\\u0000 top_k","type":"BadRequestError","code":400}}'
    async with ScriptedWorker([build_response(error_body, "400 Bad Request")]) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post("/v1/chat/completions", content=REQUEST)

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"
    assert "\0" not in response.text


@pytest.mark.parametrize("how", ["error", "cut"])
async def test_broken_stream_ends_with_an_error_and_no_done_marker(serve: Serve, how: str) -> None:
    broken = [*EVENTS[:1], ERROR, *EVENTS[1:]] if how == "error" else EVENTS[:1]
    reply = (
        build_stream_reply(*broken)
        if how == "error"
        else [*build_stream_reply(*broken, end=b""), CLOSE]
    )
    async with ScriptedWorker(reply) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post(
            "/v1/chat/completions", content=REQUEST[:-1] + b',"stream":true}'
        )

    begun, text, end = response.content.partition(b'"content":"H"')

    assert text
    assert b'"model":"chat"' in begun
    assert b'"error"' in end
    assert b"cuda" not in end
    assert b"[DONE]" not in end
    assert gateway.records[0].outcome == "truncated"
    assert gateway.records[0].tokens == 1


async def test_passthrough_request_is_retried_on_another_worker(serve: Serve) -> None:
    lost: list[Any] = [CLOSE]
    async with (
        ScriptedWorker(lost) as one,
        ScriptedWorker([build_response(HI_RESPONSE)]) as other,
    ):
        gateway = await serve(FRONT.format(workers=format_worker_urls(one, other)))
        for _ in range(4):
            response = await gateway.http.post("/v1/chat/completions", content=REQUEST)
            assert response.status_code == 200

    assert len(get_post_bodies(other)) == 4


async def test_unary_worker_response_is_converted_to_a_stream(serve: Serve) -> None:
    async with ScriptedWorker([build_response(HI_RESPONSE)]) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post(
            "/v1/chat/completions", content=REQUEST[:-1] + b',"stream":true}'
        )

    assert response.content.startswith(b"data: ")
    assert response.content.endswith(b"data: [DONE]\n\n")
    assert b'"content":"Hi"' in response.content


async def test_streamed_worker_response_is_converted_to_a_unary_response(serve: Serve) -> None:
    async with ScriptedWorker(build_stream_reply(*EVENTS)) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post("/v1/chat/completions", content=REQUEST)
    assert response.json()["choices"][0]["message"]["content"] == "Hi"
    assert response.json()["model"] == "chat"
