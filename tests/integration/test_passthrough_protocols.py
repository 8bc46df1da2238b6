"""Clients and workers of one protocol, other than OpenAI's: bytes go on, and bytes come back."""

import asyncio
import json
from typing import Any

import pytest
from msgspec import Struct

from tests.conftest import RunningGateway, Serve
from tests.integration.test_passthrough import build_stream_reply, get_post_bodies, whole
from tests.support.fakes import CLOSE, HANG, ScriptedWorker

FRONT = """
listeners: [{{address: "127.0.0.1:0", protocols: [{protocol}]}}]
limits: {{drain_timeout: 1s}}
backends:
  pool: {{protocol: {protocol}, workers: ["{worker}"], health: {{interval: 1h}}}}
models:
  chat: {{backend: pool, model: llama}}
"""

PROBED = whole(b"{}")
MESSAGES = b'"messages":[{"role":"user","content":"hi"}],"temperature":0.50'
CHAT = b'{"model":"chat",%b}' % MESSAGES
ANSWER = (
    b'{"id":"c1", "odd":1.50,"choices":[{"index":0,"message":{"role":"assistant","content":"Hi"},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}'
)
CHUNKS = [
    b'data: {"id":"c1","model":"llama","choices":[{"index":0,"delta":{"content":"H"}}]}\n\n',
    (
        b'data: {"id":"c1","model":"llama","choices":[{"index":0,"delta":{"content":"e"},'
        b'"odd":1.50}]}\n\n'
    ),
    (
        b'data: {"id":"c1","model":"llama","choices":[{"index":0,"delta":{"content":"i"},'
        b'"finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":2}}\n\n'
    ),
    b"data: [DONE]\n\n",
]
TEXTS = [
    b'data:{"model_name":"llama","text_output":"H","details":{"generated_tokens":1},"odd":1.50}\n\n',
    (
        b'data:{"model_name":"llama","text_output":"i","details":{"finish_reason":"eos_token",'
        b'"generated_tokens":2}}\n\n'
    ),
]
DETAILED = b'{"text_input":"hi","parameters":{"details":true,"temperature":0.50}}'
VECTORS = b'{"data":[{"index":0,"embedding":[1.50]}], "usage":{"prompt_tokens":1,"total_tokens":1}}'


class PassthroughCase(Struct, frozen=True):
    """A call as a client makes it, and what a worker is asked and answers."""

    protocol: str
    path: str
    body: bytes
    answer: bytes | list[bytes]
    worker_path: str = ""
    """The worker's path, if another."""
    shown: bytes = b"chat"
    """What an answer calls the model."""
    sent: bytes | None = None
    """The worker's body, up to the gateway's name for the request, if not the model renamed."""


STREAMED = CHAT[:-1] + b',"stream":true}'
ENDPOINT = "/serving-endpoints/chat/invocations"
AT_ENDPOINT = b"{%b}" % MESSAGES
SERVED = "/serving-endpoints/llama/invocations"
GENERATE = "/v2/models/chat/generate"
WAYS = {
    "ovms": PassthroughCase("ovms", "/v3/chat/completions", CHAT, ANSWER),
    "ovms stream": PassthroughCase("ovms", "/v3/chat/completions", STREAMED, CHUNKS),
    "ovms embeddings": PassthroughCase(
        "ovms", "/v3/embeddings", b'{"model":"chat","input":"a"}', VECTORS
    ),
    "databricks": PassthroughCase(
        "databricks", ENDPOINT, AT_ENDPOINT, ANSWER, SERVED, sent=AT_ENDPOINT
    ),
    "databricks stream": PassthroughCase(
        "databricks",
        "/serving-endpoints/chat/completions",
        STREAMED,
        CHUNKS,
        shown=b"llama",
    ),
    "databricks embeddings": PassthroughCase(
        "databricks", ENDPOINT, b'{"input":"a"}', VECTORS, SERVED, sent=b'{"input":"a"}'
    ),
    "mindie chat": PassthroughCase(
        "mindie", "/v1/chat/completions", CHAT, ANSWER.replace(b'"id":"c1", ', b"")
    ),
    "mindie chat stream": PassthroughCase("mindie", "/v1/chat/completions", STREAMED, CHUNKS),
    "mindie generate": PassthroughCase(
        "mindie",
        GENERATE,
        DETAILED,
        b'{"text_output": "Hi","odd":1.50,"details":{"finish_reason":"length"}}',
        "/v2/models/llama/generate",
        sent=DETAILED[:-1],
    ),
    "mindie generate stream": PassthroughCase(
        "mindie",
        f"{GENERATE}_stream",
        DETAILED,
        TEXTS,
        "/v2/models/llama/generate_stream",
        sent=DETAILED[:-1],
    ),
}


async def serve_gateway(serve: Serve, worker: ScriptedWorker, protocol: str) -> RunningGateway:
    return await serve(FRONT.format(protocol=protocol, worker=worker.url))


async def send_case(front: RunningGateway, way: PassthroughCase) -> Any:
    headers = {"content-type": "application/json"}
    return await front.http.post(way.path, content=way.body, headers=headers)


def build_reply(way: PassthroughCase) -> list[Any]:
    return build_stream_reply(*way.answer) if isinstance(way.answer, list) else [whole(way.answer)]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
async def test_passthrough_changes_only_the_model_name(serve: Serve, way: PassthroughCase) -> None:
    async with ScriptedWorker(build_reply(way), probed=PROBED) as worker:
        front = await serve_gateway(serve, worker, way.protocol)
        answer = await send_case(front, way)

    written = b"".join(way.answer) if isinstance(way.answer, list) else way.answer
    assert answer.status_code == 200
    if way.answer is CHUNKS:  # of which only texts are forwarded as they are
        chunks = [json.loads(one[6:]) for one in answer.content.split(b"\n\n")[:-2]]
        texts = [choice["delta"].get("content") for one in chunks for choice in one["choices"]]
        assert "".join(filter(None, texts)) == "Hei"
        assert CHUNKS[1].partition(b'"choices"')[2] in answer.content
        assert {one["model"] for one in chunks} == {way.shown.decode()}
        assert answer.content.endswith(CHUNKS[-1])
    else:
        assert answer.content == written.replace(b'"llama"', b'"%b"' % way.shown)
    [request] = [one for one in worker.requests if one.method == "POST"]
    assert request.path == (way.worker_path or way.path)
    sent = way.body.replace(b'"chat"', b'"llama"') if way.sent is None else way.sent
    assert request.body.startswith(sent)
    assert len(request.body) == len(sent) or request.body[len(sent) :].startswith(b',"id":"')
    [record] = front.records
    assert (record.outcome, record.stream) == ("ok", isinstance(way.answer, list))
    assert record.usage is not None
    if b"usage" in written:
        assert record.usage.source == "worker"
        assert record.usage.prompt_tokens > 0
    else:
        assert record.usage.source in ("counted", "estimated")
        assert record.usage.completion_tokens > 0


STREAMS = [way for way in WAYS.values() if isinstance(way.answer, list)]


@pytest.mark.parametrize("way", STREAMS, ids=lambda way: f"{way.protocol} {way.path}")
@pytest.mark.parametrize("how", ["error", "cut"])
async def test_broken_stream_ends_with_an_error_and_no_finish_reason(
    serve: Serve, way: PassthroughCase, how: str
) -> None:
    assert isinstance(way.answer, list)
    begun = way.answer[:1]
    secret = b'data: {"error":{"message":"cuda","code":500}}\n\n'
    broken = (
        build_stream_reply(*begun, secret)
        if how == "error"
        else [*build_stream_reply(*begun, end=b""), CLOSE]
    )
    async with ScriptedWorker(broken, probed=PROBED) as worker:
        front = await serve_gateway(serve, worker, way.protocol)
        answer = await send_case(front, way)

    before, first, end = answer.content.partition(b'"H"')
    assert first
    assert b'"%b"' % way.shown in before + end
    assert end
    for unsaid in (b"cuda", b"[DONE]", b'"finish_reason":"'):
        assert unsaid not in end
    [record] = front.records
    assert (record.outcome, record.tokens) == ("truncated", 1)


@pytest.mark.parametrize("name", ["databricks", "databricks stream"])
async def test_response_in_the_other_streaming_mode_is_translated(serve: Serve, name: str) -> None:
    """Silence may mean a stream to a worker, and none to the client."""
    way = WAYS[name]
    other = (
        [whole(ANSWER)]
        if isinstance(way.answer, list)
        else build_stream_reply(CHUNKS[0], *CHUNKS[2:])
    )
    async with ScriptedWorker(other, probed=PROBED) as worker:
        front = await serve_gateway(serve, worker, way.protocol)
        answer = await send_case(front, way)

    if isinstance(way.answer, list):
        assert answer.content.endswith(b"data: [DONE]\n\n")
        assert b'"content":"Hi"' in answer.content
    else:
        assert answer.json()["choices"][0]["message"]["content"] == "Hi"
    assert front.records[0].outcome == "ok"


async def test_generate_without_details_is_translated_and_drops_the_details(serve: Serve) -> None:
    async with ScriptedWorker(build_stream_reply(*TEXTS), probed=PROBED) as worker:
        front = await serve_gateway(serve, worker, "mindie")
        answer = await front.http.post(f"{GENERATE}_stream", json={"text_input": "hi"})
    assert b"details" not in answer.content
    body = json.loads(get_post_bodies(worker)[0])
    assert body["parameters"]["details"] is True


async def test_stop_infer_uses_the_request_id_sent_to_the_worker(serve: Serve) -> None:
    hanging = [*build_stream_reply(TEXTS[0], end=b""), HANG]
    async with ScriptedWorker(hanging, [whole(b"{}")], probed=PROBED) as worker:
        front = await serve_gateway(serve, worker, "mindie")
        stream = front.http.stream("POST", f"{GENERATE}_stream", content=DETAILED)
        async with stream as answer:
            async for _ in answer.aiter_raw():
                break
        async with asyncio.timeout(10):
            while len(get_post_bodies(worker)) < 2:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)

    one, stop = (json.loads(body) for body in get_post_bodies(worker))
    assert stop == {"id": one["id"]}
    assert worker.requests[-1].path == "/v2/models/llama/stopInfer"


async def test_client_stops_a_passthrough_request_by_its_worker_request_id(serve: Serve) -> None:
    hanging = [*build_stream_reply(TEXTS[0], end=b""), HANG]
    async with ScriptedWorker(hanging, [whole(b"{}")], probed=PROBED) as worker:
        front = await serve_gateway(serve, worker, "mindie")
        stream = front.http.stream("POST", f"{GENERATE}_stream", content=DETAILED)
        async with stream as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            name = json.loads(get_post_bodies(worker)[0])["id"]
            stopped = await front.http.post("/v2/models/chat/stopInfer", json={"id": name})
            assert stopped.status_code == 200
            rest = b"".join([piece async for piece in pieces])

    end = json.loads(rest.removeprefix(b"data:"))
    assert end["details"]["finish_reason"] == "stop_sequence"
    assert end["details"]["generated_tokens"] == 1
