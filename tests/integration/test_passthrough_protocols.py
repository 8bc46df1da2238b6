"""With a client and workers of one protocol other than OpenAI's, bytes pass through."""

import asyncio
import json
from typing import Any

import pytest
from msgspec import Struct

from tests.conftest import RunningGateway, Serve
from tests.integration.test_passthrough import build_response, build_stream_reply, get_post_bodies
from tests.support.fakes import CLOSE, HANG, ScriptedWorker
from tests.support.waiting import PATIENCE

CONFIGURATION = """
listeners: [{{address: "127.0.0.1:0", protocols: [{protocol}]}}]
limits: {{drain_timeout: 1s}}
backends:
  pool: {{protocol: {protocol}, workers: ["{worker}"], health: {{interval: 1h}}}}
models:
  chat: {{backend: pool, model: llama}}
"""

MESSAGES = b'"messages":[{"role":"user","content":"hi"}],"temperature":0.50'
CHAT_REQUEST = b'{"model":"chat",%b}' % MESSAGES
CHAT_STREAM_REQUEST = CHAT_REQUEST[:-1] + b',"stream":true}'
CLIENT_INVOCATIONS = "/serving-endpoints/chat/invocations"
INVOCATION = b"{%b}" % MESSAGES
WORKER_INVOCATIONS = "/serving-endpoints/llama/invocations"
CLIENT_GENERATE = "/v2/models/chat/generate"
GENERATE_REQUEST = b'{"text_input":"hi","parameters":{"details":true,"temperature":0.50}}'
CHAT_RESPONSE = (
    b'{"id":"c1", "odd":1.50,"choices":[{"index":0,"message":{"role":"assistant","content":"Hi"},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}'
)
CHAT_EVENTS = [
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
GENERATE_EVENTS = [
    b'data:{"model_name":"llama","text_output":"H","details":{"generated_tokens":1},"odd":1.50}\n\n',
    (
        b'data:{"model_name":"llama","text_output":"i","details":{"finish_reason":"eos_token",'
        b'"generated_tokens":2}}\n\n'
    ),
]
EMBEDDING_RESPONSE = (
    b'{"data":[{"index":0,"embedding":[1.50]}], "usage":{"prompt_tokens":1,"total_tokens":1}}'
)


class PassthroughCase(Struct, frozen=True):
    """A client's request, the request that the worker gets, and the worker's response."""

    protocol: str
    path: str
    body: bytes
    answer: bytes | list[bytes]
    worker_path: str = ""
    """The worker's path, if it differs from the client's."""
    shown: bytes = b"chat"
    """The model's name in responses."""
    sent: bytes | None = None
    """The body that the worker gets up to the request id, if more than the model's name changes."""


CASES = {
    "ovms": PassthroughCase("ovms", "/v3/chat/completions", CHAT_REQUEST, CHAT_RESPONSE),
    "ovms stream": PassthroughCase(
        "ovms",
        "/v3/chat/completions",
        CHAT_STREAM_REQUEST,
        CHAT_EVENTS,
        sent=CHAT_STREAM_REQUEST.replace(b'"chat"', b'"llama"')[:-1]
        + b',"stream_options":{"include_usage":true}}',
    ),
    "ovms embeddings": PassthroughCase(
        "ovms", "/v3/embeddings", b'{"model":"chat","input":"a"}', EMBEDDING_RESPONSE
    ),
    "databricks": PassthroughCase(
        "databricks",
        CLIENT_INVOCATIONS,
        INVOCATION,
        CHAT_RESPONSE,
        WORKER_INVOCATIONS,
        sent=INVOCATION,
    ),
    "databricks stream": PassthroughCase(
        "databricks",
        "/serving-endpoints/chat/completions",
        CHAT_STREAM_REQUEST,
        CHAT_EVENTS,
        shown=b"llama",
    ),
    "databricks embeddings": PassthroughCase(
        "databricks",
        CLIENT_INVOCATIONS,
        b'{"input":"a"}',
        EMBEDDING_RESPONSE,
        WORKER_INVOCATIONS,
        sent=b'{"input":"a"}',
    ),
    "mindie chat": PassthroughCase(
        "mindie", "/v1/chat/completions", CHAT_REQUEST, CHAT_RESPONSE.replace(b'"id":"c1", ', b"")
    ),
    "mindie chat stream": PassthroughCase(
        "mindie", "/v1/chat/completions", CHAT_STREAM_REQUEST, CHAT_EVENTS
    ),
    "mindie generate": PassthroughCase(
        "mindie",
        CLIENT_GENERATE,
        GENERATE_REQUEST,
        b'{"text_output": "Hi","odd":1.50,"details":{"finish_reason":"length"}}',
        "/v2/models/llama/generate",
        sent=GENERATE_REQUEST[:-1],
    ),
    "mindie generate stream": PassthroughCase(
        "mindie",
        f"{CLIENT_GENERATE}_stream",
        GENERATE_REQUEST,
        GENERATE_EVENTS,
        "/v2/models/llama/generate_stream",
        sent=GENERATE_REQUEST[:-1],
    ),
}


async def serve_gateway(serve: Serve, worker: ScriptedWorker, protocol: str) -> RunningGateway:
    return await serve(CONFIGURATION.format(protocol=protocol, worker=worker.url))


async def send_case(gateway: RunningGateway, case: PassthroughCase) -> Any:
    headers = {"content-type": "application/json"}
    return await gateway.http.post(case.path, content=case.body, headers=headers)


def build_reply(case: PassthroughCase) -> list[Any]:
    return (
        build_stream_reply(*case.answer)
        if isinstance(case.answer, list)
        else [build_response(case.answer)]
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_passthrough_changes_only_the_model_name(serve: Serve, case: PassthroughCase) -> None:
    async with ScriptedWorker(build_reply(case)) as worker:
        gateway = await serve_gateway(serve, worker, case.protocol)
        response = await send_case(gateway, case)

    written = b"".join(case.answer) if isinstance(case.answer, list) else case.answer
    assert response.status_code == 200

    if case.answer is CHAT_EVENTS:  # only its text events are forwarded unchanged
        chunks = [json.loads(one[6:]) for one in response.content.split(b"\n\n")[:-2]]
        texts = [choice["delta"].get("content") for one in chunks for choice in one["choices"]]
        assert "".join(filter(None, texts)) == "Hei"
        assert CHAT_EVENTS[1].partition(b'"choices"')[2] in response.content
        assert {one["model"] for one in chunks} == {case.shown.decode()}
        assert response.content.endswith(CHAT_EVENTS[-1])
    else:
        assert response.content == written.replace(b'"llama"', b'"%b"' % case.shown)
    [request] = [one for one in worker.requests if one.method == "POST"]
    assert request.path == (case.worker_path or case.path)

    sent = case.body.replace(b'"chat"', b'"llama"') if case.sent is None else case.sent
    assert request.body.startswith(sent)
    assert len(request.body) == len(sent) or request.body[len(sent) :].startswith(b',"id":"')

    [record] = gateway.records
    assert (record.outcome, record.stream) == ("ok", isinstance(case.answer, list))
    assert record.usage is not None
    if b"usage" in written:
        assert record.usage.source == "worker"
        assert record.usage.prompt_tokens > 0
    else:
        assert record.usage.source in ("counted", "estimated")
        assert record.usage.completion_tokens > 0


STREAMS = [case for case in CASES.values() if isinstance(case.answer, list)]


@pytest.mark.parametrize("case", STREAMS, ids=lambda case: f"{case.protocol} {case.path}")
@pytest.mark.parametrize("how", ["error", "cut"])
async def test_broken_stream_ends_with_an_error_and_no_finish_reason(
    serve: Serve, case: PassthroughCase, how: str
) -> None:
    assert isinstance(case.answer, list)

    begun = case.answer[:1]
    secret = b'data: {"error":{"message":"cuda","code":500}}\n\n'
    broken = (
        build_stream_reply(*begun, secret)
        if how == "error"
        else [*build_stream_reply(*begun, end=b""), CLOSE]
    )
    async with ScriptedWorker(broken) as worker:
        gateway = await serve_gateway(serve, worker, case.protocol)
        response = await send_case(gateway, case)

    before, first, end = response.content.partition(b'"H"')
    assert first
    assert b'"%b"' % case.shown in before + end
    assert end
    for unsaid in (b"cuda", b"[DONE]", b'"finish_reason":"'):
        assert unsaid not in end

    [record] = gateway.records
    assert (record.outcome, record.tokens) == ("truncated", 1)


@pytest.mark.parametrize("name", ["databricks", "databricks stream"])
async def test_response_in_the_other_streaming_mode_is_translated(serve: Serve, name: str) -> None:
    """A request without ``stream`` may mean a stream to the worker and none to the client."""
    case = CASES[name]
    other = (
        [build_response(CHAT_RESPONSE)]
        if isinstance(case.answer, list)
        else build_stream_reply(CHAT_EVENTS[0], *CHAT_EVENTS[2:])
    )

    async with ScriptedWorker(other) as worker:
        gateway = await serve_gateway(serve, worker, case.protocol)
        response = await send_case(gateway, case)

    if isinstance(case.answer, list):
        assert response.content.endswith(b"data: [DONE]\n\n")
        assert b'"content":"Hi"' in response.content
    else:
        assert response.json()["choices"][0]["message"]["content"] == "Hi"
    assert gateway.records[0].outcome == "ok"


async def test_generate_without_details_is_translated_and_drops_the_details(serve: Serve) -> None:
    async with ScriptedWorker(build_stream_reply(*GENERATE_EVENTS)) as worker:
        gateway = await serve_gateway(serve, worker, "mindie")
        response = await gateway.http.post(f"{CLIENT_GENERATE}_stream", json={"text_input": "hi"})
    assert b"details" not in response.content

    body = json.loads(get_post_bodies(worker)[0])
    assert body["parameters"]["details"] is True


async def test_stop_infer_uses_the_request_id_sent_to_the_worker(serve: Serve) -> None:
    hanging = [*build_stream_reply(GENERATE_EVENTS[0], end=b""), HANG]
    async with ScriptedWorker(hanging, [build_response(b"{}")]) as worker:
        gateway = await serve_gateway(serve, worker, "mindie")
        stream = gateway.http.stream("POST", f"{CLIENT_GENERATE}_stream", content=GENERATE_REQUEST)
        async with stream as response:
            async for _ in response.aiter_raw():
                break
        async with asyncio.timeout(PATIENCE):
            while len(get_post_bodies(worker)) < 2:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)

    one, stop = (json.loads(body) for body in get_post_bodies(worker))
    assert stop == {"id": one["id"]}
    assert worker.requests[-1].path == "/v2/models/llama/stopInfer"


async def test_client_stops_a_passthrough_request_by_its_worker_request_id(serve: Serve) -> None:
    hanging = [*build_stream_reply(GENERATE_EVENTS[0], end=b""), HANG]
    async with ScriptedWorker(hanging, [build_response(b"{}")]) as worker:
        gateway = await serve_gateway(serve, worker, "mindie")
        stream = gateway.http.stream("POST", f"{CLIENT_GENERATE}_stream", content=GENERATE_REQUEST)
        async with stream as response:
            pieces = response.aiter_raw()
            await anext(pieces)
            name = json.loads(get_post_bodies(worker)[0])["id"]

            stopped = await gateway.http.post("/v2/models/chat/stopInfer", json={"id": name})

            assert stopped.status_code == 200

            rest = b"".join([piece async for piece in pieces])

    end = json.loads(rest.removeprefix(b"data:"))
    assert end["details"]["finish_reason"] == "stop_sequence"
    assert end["details"]["generated_tokens"] == 1
