"""Headers of a worker's response, for clients of the worker's own protocol and of others."""

from typing import Any

import msgspec
import pytest

from tests.conftest import Serve
from tests.support.fakes import ScriptedWorker, make_reply

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, anthropic]}}]
backends: {{pool: {{protocol: {protocol}, workers: ["{worker}"], health: {{interval: 1h}},
  retries: {{max: 0}}}}}}
models: {{chat: {{backend: pool{options}}}}}
"""
KEYS = """
keys:
  - name: a
    sha256: 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b
    limits: {models: {chat: {requests: 5/h}}}
"""
"""A key, "secret", with a limit."""
CHAT: dict[str, Any] = {
    "model": "chat",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "hi"}],
}
PATHS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}
COMMON = {"x-ratelimit-remaining-requests": "7", "x-odd": "a b"}
PASSED = {
    "openai": COMMON
    | {
        "openai-organization": "org-1",
        "openai-processing-ms": "4711",
        "openai-version": "2026-01-01",
    },
    "anthropic": COMMON
    | {"anthropic-ratelimit-unified-status": "allowed", "request-id": "req_worker"},
}
DENIED = {
    "set-cookie": "evil=1",
    "server": "evil",
    "x-request-id": "evil",
    "x-powered-by": "evil",
    "x-envoy-upstream-service-time": "evil",
    "x-accel-redirect": "/evil",
    "x-hop": "evil",
    "x-interlingua-loss": "evil",
    "x-long": "evil" * 1000,
    "x-litespeed-location": "/evil",
    "x-reproxy-url": "http://evil",
    "x-middleware-rewrite": "/evil",
    "x-content-security-policy": "evil",
    "x-k8s-pod": "evil",
    "x-remote-addr": "evil",
    "connection": "keep-alive, X-Hop",
}
WHOLE: dict[str, dict[str, Any]] = {
    "openai": {"choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}]},
    "anthropic": {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "w",
        "content": [{"type": "text", "text": "Hi"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
}
CHUNK = {"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]}
STREAMS = {
    "openai": b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(CHUNK),
    "anthropic": b"".join(
        b"data: %b\n\n" % msgspec.json.encode(one)
        for one in (
            {"type": "message_start", "message": WHOLE["anthropic"] | {"content": []}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
            {"type": "message_stop"},
        )
    ),
}


def make_answer(protocol: str, *, stream: bool, status: str = "200 OK", **more: str) -> bytes:
    sent = PASSED[protocol] | DENIED | more
    headers = {name.replace("-", "_"): value for name, value in sent.items()}
    if not stream:
        return make_reply(msgspec.json.encode(WHOLE[protocol]), status, **headers)
    return make_reply(STREAMS[protocol], status, **headers | {"content_type": "text/event-stream"})


@pytest.mark.parametrize("options", ["", ", limits: {max_tokens: 5}", ", on_loss: reject"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PATHS)
async def test_headers_reach_clients_of_the_worker_s_protocol(
    serve: Serve, protocol: str, options: str, *, stream: bool
) -> None:
    async with ScriptedWorker([make_answer(protocol, stream=stream)]) as worker:
        gateway = await serve(CONFIG.format(protocol=protocol, worker=worker.url, options=options))
        answer = await gateway.http.post(PATHS[protocol], json={**CHAT, "stream": stream})

    assert answer.status_code == 200
    assert answer.headers.items() >= PASSED[protocol].items()
    assert "evil" not in str(answer.headers)
    names = [name.lower() for name, _ in answer.headers.raw]
    assert len(names) == len({*names})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PATHS)
async def test_clients_of_other_protocols_get_a_report_of_unknown_ones(
    serve: Serve, protocol: str, *, stream: bool
) -> None:
    [path] = [path for name, path in PATHS.items() if name != protocol]
    reply = make_answer(protocol, stream=stream, **{f"{protocol}_mode": "fast"})
    async with ScriptedWorker([reply]) as worker:
        gateway = await serve(CONFIG.format(protocol=protocol, worker=worker.url, options=""))
        answer = await gateway.http.post(path, json={**CHAT, "stream": stream})

    assert f"response.header.{protocol}-mode=dropped" in answer.headers["x-interlingua-loss"]
    assert answer.headers["x-interlingua-loss"].count("header") == 1
    assert {*answer.headers.items()}.isdisjoint(PASSED[protocol].items())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
@pytest.mark.parametrize("status", ["400 Bad Request", "429 Slow", "500 Error"])
async def test_headers_of_errors_reach_clients_of_the_worker_s_protocol(
    serve: Serve, status: str, path: str
) -> None:
    reply = make_answer("openai", stream=False, status=status, retry_after="9")
    async with ScriptedWorker([reply]) as worker:
        gateway = await serve(CONFIG.format(protocol="openai", worker=worker.url, options=""))
        answer = await gateway.http.post(path, json={**CHAT, "input": "hi"})

    assert answer.headers.items() >= (PASSED["openai"] | {"retry-after": "9"}).items()
    assert "evil" not in str(answer.headers)


async def test_limits_of_the_client_s_key_win(serve: Serve) -> None:
    reply = make_answer("openai", stream=False, x_ratelimit_remaining_tokens="8")
    async with ScriptedWorker([reply]) as worker:
        config = CONFIG.format(protocol="openai", worker=worker.url, options="")
        gateway = await serve(config + KEYS)
        answer = await gateway.http.post(
            PATHS["openai"], json=CHAT, headers={"Authorization": "Bearer secret"}
        )

    limits = [answer.headers[f"x-ratelimit-remaining-{one}"] for one in ("requests", "tokens")]
    assert limits == ["4", "8"]


async def test_headers_of_several_lines_are_lists(serve: Serve) -> None:
    # given a worker that names its headers of one connection, and limits, in two lines each
    lines = b"x-limit: 1\r\nx-limit: 2\r\nx-limit: 2\r\nconnection: x-evil\r\nx-evil: 1\r\n"
    reply = make_answer("openai", stream=False).replace(b"x-odd", lines + b"x-odd", 1)
    async with ScriptedWorker([reply]) as worker:
        gateway = await serve(CONFIG.format(protocol="openai", worker=worker.url, options=""))
        answer = await gateway.http.post(PATHS["openai"], json=CHAT)

    assert answer.headers["x-limit"] == "1, 2"
    assert "evil" not in str(answer.headers)


async def test_many_and_large_headers_do_not_cost_the_answer_or_the_others(serve: Serve) -> None:
    # given more headers than Python's http.client reads, the first of them too large
    more = {"x_big": "b" * 2000, **{f"x_more_{i}": "m" for i in range(150)}}
    reply = make_answer("openai", stream=False, **more)
    async with ScriptedWorker([reply]) as worker:
        gateway = await serve(CONFIG.format(protocol="openai", worker=worker.url, options=""))
        answer = await gateway.http.post(PATHS["openai"], json=CHAT)

    assert answer.headers.items() >= PASSED["openai"].items()
    assert len(answer.headers) < 100
