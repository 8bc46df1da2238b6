"""What agents and workers usually send passes without a setting."""

import asyncio
import base64
import gzip

import msgspec
import pytest

from tests.conftest import Serve
from tests.support.fakes import CHUNKED, HANG, ScriptedWorker, chunk, head, make_reply
from tests.support.waiting import wait_until

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, anthropic]}}]
backends: {{pool: {{protocol: openai, workers: ["{worker}"]}}}}
models: {{m: {{backend: pool}}}}
"""
ANSWER = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}'
)
IMAGE = base64.b64encode(b"x" * (12 << 20)).decode()
OPENAI_PART = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": IMAGE}
EVENTS = (
    b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
    b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/v1/chat/completions", OPENAI_PART),
        ("/v1/messages", {"type": "image", "source": SOURCE}),
    ],
)
async def test_image_of_12_mib_reaches_the_worker(
    serve: Serve, path: str, part: dict[str, object]
) -> None:
    async with ScriptedWorker([make_reply(ANSWER)]) as worker:
        gateway = await serve(CONFIG.format(worker=worker.url))
        messages = [{"role": "user", "content": [part]}]
        body = {"model": "m", "max_tokens": 5, "messages": messages}
        response = await gateway.http.post(path, json=body)

    assert response.status_code == 200
    assert IMAGE.encode() in worker.requests[0].body


async def test_head_of_20_kib_from_a_worker_behind_a_proxy_is_read(serve: Serve) -> None:
    async with ScriptedWorker([make_reply(ANSWER, set_cookie="a" * (20 << 10))]) as worker:
        gateway = await serve(CONFIG.format(worker=worker.url))
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        response = await gateway.http.post("/v1/chat/completions", json=body)

    assert response.status_code == 200


async def test_event_of_30_mib_is_passed_on(serve: Serve) -> None:
    events, end = EVENTS % (b"x" * (30 << 20)), b"0\r\n\r\n"
    start = head(content_type="text/event-stream", transfer_encoding="chunked")
    async with ScriptedWorker([start, chunk(events), end]) as worker:
        gateway = await serve(CONFIG.format(worker=worker.url))
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        response = await gateway.http.post("/v1/chat/completions", json=body)

    assert response.content.count(b"x") >= 30 << 20
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("is_compressed", [False, True])
async def test_large_body_counts_with_its_copies_until_the_response_ends(
    serve: Serve, *, is_compressed: bool
) -> None:
    """As it was read, decoded, and as the worker gets it: all three are held for a retry."""
    gate = asyncio.Event()
    async with ScriptedWorker([gate, make_reply(ANSWER)]) as worker:
        gateway = await serve(CONFIG.format(worker=worker.url))
        messages = [{"role": "user", "content": "a" * (1 << 20)}]
        body = msgspec.json.encode({"model": "m", "messages": messages})
        sent = gzip.compress(body) if is_compressed else body
        encoding = {"content-encoding": "gzip"} if is_compressed else {}
        path, headers = "/v1/chat/completions", {"content-type": "application/json", **encoding}
        pending = asyncio.create_task(gateway.http.post(path, content=sent, headers=headers))
        await wait_until(lambda: worker.requests)
        held = gateway.app.memory.get_use("bodies")
        gate.set()
        response = await pending

    assert response.status_code == 200
    assert held == (3 * len(body) + len(sent) if is_compressed else 3 * len(body))
    assert gateway.app.memory.get_use("bodies") == 0


async def test_large_body_of_a_stream_that_has_begun_counts_once(serve: Serve) -> None:
    async with ScriptedWorker([CHUNKED, chunk(EVENTS % b"hi"), HANG]) as worker:
        gateway = await serve(CONFIG.format(worker=worker.url))
        messages = [{"role": "user", "content": "a" * (1 << 20)}]
        body = msgspec.json.encode({"model": "m", "messages": messages, "stream": True})
        async with gateway.http.stream("POST", "/v1/chat/completions", content=body) as response:
            await anext(response.aiter_raw())
            held = gateway.app.memory.get_use("bodies")
        await worker.wait_for_disconnect()

    assert held == len(body)
    await wait_until(lambda: gateway.app.memory.get_use("bodies") == 0)
