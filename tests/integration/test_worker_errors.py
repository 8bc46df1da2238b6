"""Errors of workers, as clients of the worker's own protocol get them."""

from typing import Any

import msgspec
import pytest

from tests.conftest import Serve
from tests.support.fakes import ScriptedWorker, make_reply

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, anthropic]}}]
backends: {{pool: {{protocol: {protocol}, workers: ["{worker}"], health: {{interval: 1h}}}}}}
models: {{chat: {{backend: pool}}}}
"""
CHAT: dict[str, Any] = {
    "model": "chat",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "hi"}],
}
PATHS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}
ERROR = {
    "message": "no such tool",
    "type": "x_type",
    "param": "tools[0].name",
    "code": "x_code",
    "metadata": {"provider": "P"},
}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "w", "content": []}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/audio/speech"])
async def test_refusal_of_an_openai_worker_is_the_worker_s_own(serve: Serve, path: str) -> None:
    body = msgspec.json.encode({"error": ERROR, "x": 1})
    async with ScriptedWorker([make_reply(body, "400 Bad Request")]) as worker:
        gateway = await serve(CONFIG.format(protocol="openai", worker=worker.url))
        answer = await gateway.http.post(path, json={**CHAT, "input": "hi"})

    assert (answer.status_code, answer.json()) == (400, {"error": ERROR, "x": 1})


async def test_refusal_of_an_anthropic_worker_is_the_worker_s_own(serve: Serve) -> None:
    error = {"type": "x_error", "message": "no", "details": {"error_code": "x", "at": [1]}}
    body = {"type": "error", "error": error, "request_id": "req_worker"}
    reply = make_reply(msgspec.json.encode(body), "400 Bad Request")
    async with ScriptedWorker([reply]) as worker:
        gateway = await serve(CONFIG.format(protocol="anthropic", worker=worker.url))
        answer = await gateway.http.post("/v1/messages", json=CHAT)

    assert (answer.status_code, answer.json()) == (400, body)


@pytest.mark.parametrize("client", PATHS)
async def test_failure_of_a_server_keeps_its_words_and_no_texts(serve: Serve, client: str) -> None:
    error = {"message": "CUDA error at /srv/x.py", "type": "x_type", "host": "10.0.0.7", "line": 7}
    body = msgspec.json.encode({"type": "error", "error": error})
    async with ScriptedWorker([make_reply(body, "500 Internal Server Error")]) as worker:
        gateway = await serve(CONFIG.format(protocol=client, worker=worker.url))
        answer = await gateway.http.post(PATHS[client], json=CHAT)

    shown = answer.json()["error"]
    assert (answer.status_code, shown["type"], shown["line"]) == (502, "x_type", 7)
    assert "host" not in shown
    assert "CUDA" not in answer.text


@pytest.mark.parametrize("client", PATHS)
@pytest.mark.parametrize("limit", [None, 5])
async def test_error_in_a_stream_is_the_worker_s_own(
    serve: Serve, client: str, limit: int | None
) -> None:
    """Given a stream that is passed on, and one that is written anew."""
    first = {
        "openai": {"choices": [{"index": 0, "delta": {"content": "Hi"}}]},
        "anthropic": {"type": "message_start", "message": MESSAGE},
    }[client]
    last = {"type": "error", "error": {"type": "x_type", "message": "no", "more": {"x": [1]}}}
    data = b"".join(b"data: %b\n\n" % msgspec.json.encode(one) for one in (first, last))
    config = CONFIG.replace("{{backend: pool}}", "{{backend: pool, limits: {{max_tokens: 5}}}}")
    async with ScriptedWorker([make_reply(data, content_type="text/event-stream")]) as worker:
        chosen = config if limit else CONFIG
        gateway = await serve(chosen.format(protocol=client, worker=worker.url))
        answer = await gateway.http.post(PATHS[client], json={**CHAT, "stream": True})

    shown = msgspec.json.decode(answer.text.rpartition("data: ")[2])["error"]
    assert (shown["type"], shown["more"]) == ("x_type", {"x": [1]})
    assert gateway.records[0].outcome != "ok"
