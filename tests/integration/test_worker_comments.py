"""Comments, pings and empty chunks extend timeouts up to ``idle_max``, but are no progress."""

from typing import Any

import pytest

from tests.conftest import Serve
from tests.fault.protocol_clients import DONE, STARTED_STREAM, STOP
from tests.support.fakes import END, ScriptedWorker, chunk

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
limits: {{drain_timeout: 1s}}
backends:
  pool:
    protocol: openai
    workers: ["{worker}"]
    health: {{interval: 1h}}
    timeouts: {timeouts}
models:
  chat: {{backend: pool, model: llama}}
"""
BODY: dict[str, Any] = {
    "model": "chat",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
}
PINGS = {
    "comment": b": ping\n\n",
    "event": b"event: ping\n\n",
    "id": b"id: 7\n\n",
    "chunk without content": b'data: {"model":"llama","choices":[{"index":0,"delta":{}}]}\n\n',
    "chunk without choices": b'data: {"id":"c","model":"llama","choices":[]}\n\n',
}
every_ping = pytest.mark.parametrize("ping", PINGS.values(), ids=PINGS.keys())
both_ways = pytest.mark.parametrize("headers", [{}, {"x-interlingua-strict": "1"}])
PAUSE = 0.02
REPEATED = 150


def repeat(ping: bytes) -> list[Any]:
    return [part for _ in range(REPEATED) for part in (chunk(ping), PAUSE)]


@every_ping
@both_ways
async def test_pings_do_not_restart_the_idle_timeout(
    serve: Serve, ping: bytes, headers: dict[str, str]
) -> None:
    reply = [STARTED_STREAM, *repeat(ping), chunk(STOP), chunk(DONE) + END]
    async with ScriptedWorker(reply) as worker:
        gateway = await serve(
            CONFIG.format(worker=worker.url, timeouts="{idle: 300ms, idle_max: 300ms}")
        )
        response = await gateway.http.post("/v1/chat/completions", json=BODY, headers=headers)

    [record] = gateway.records
    assert (record.outcome, record.error) == ("truncated", "DeadlineExceeded")
    assert "[DONE]" not in response.text


@every_ping
async def test_pings_do_not_restart_the_first_token_timeout(serve: Serve, ping: bytes) -> None:
    head, _, _ = STARTED_STREAM.partition(b"\r\n\r\n")
    reply = [head + b"\r\n\r\n", *repeat(ping), chunk(STOP), chunk(DONE) + END]

    async with ScriptedWorker(reply) as worker:
        gateway = await serve(
            CONFIG.format(worker=worker.url, timeouts="{first_token: 300ms, idle_max: 300ms}")
        )
        response = await gateway.http.post("/v1/chat/completions", json=BODY)

    assert response.status_code == 504


@every_ping
@pytest.mark.parametrize("limits", ["idle", "first_token"])
async def test_pings_extend_a_timeout_up_to_the_longest_silence(
    serve: Serve, ping: bytes, limits: str
) -> None:
    head, _, _ = STARTED_STREAM.partition(b"\r\n\r\n")
    begin = STARTED_STREAM if limits == "idle" else head + b"\r\n\r\n"
    text = b'data: {"id":"c","model":"llama","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    for_one_second = repeat(ping)[:100]
    reply = [begin, *for_one_second, chunk(text), chunk(STOP), chunk(DONE) + END]

    async with ScriptedWorker(reply) as worker:
        timeouts = "{idle: 300ms, first_token: 300ms, idle_max: 10s}"
        gateway = await serve(CONFIG.format(worker=worker.url, timeouts=timeouts))
        response = await gateway.http.post("/v1/chat/completions", json=BODY)

    assert response.status_code == 200
    assert "[DONE]" in response.text


async def test_content_restarts_the_idle_timeout(serve: Serve) -> None:
    text = b'data: {"id":"c","model":"llama","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    reply = [STARTED_STREAM, *repeat(text)[:50], chunk(STOP), chunk(DONE) + END]

    async with ScriptedWorker(reply) as worker:
        gateway = await serve(CONFIG.format(worker=worker.url, timeouts="{idle: 300ms}"))
        response = await gateway.http.post("/v1/chat/completions", json=BODY)

    assert "[DONE]" in response.text
