"""Headers that the configuration adds to the requests to a worker."""

import pytest

from tests.conftest import Serve
from tests.support.fakes import ScriptedWorker, make_reply

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, anthropic]}}]
backends:
  pool:
    protocol: {protocol}
    workers:
      - url: "{worker}"
        auth: {{bearer: the-key-of-the-worker}}
        headers: {{OpenAI-Organization: org-1, X-Title: My app, anthropic-version: "2024-01-01"}}
    health: {{interval: 1h}}
models:
  chat: {{backend: pool}}
"""
CHAT = {"model": "chat", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("protocol", "path"),
    [
        ("openai", "/v1/chat/completions"),
        ("openai", "/v1/messages"),
        ("openai", "/v1/audio/speech"),
        ("anthropic", "/v1/messages"),
        ("anthropic", "/v1/chat/completions"),
    ],
)
async def test_configured_headers_reach_the_worker_and_win_over_those_of_clients(
    serve: Serve, protocol: str, path: str
) -> None:
    """Whether the request is passed through, translated or forwarded."""
    async with ScriptedWorker([make_reply(b"{}")]) as worker:
        gateway = await serve(CONFIG.format(protocol=protocol, worker=worker.url))
        sent = {"anthropic-version": "2023-06-01", "openai-organization": "another"}

        await gateway.http.post(path, json=CHAT, headers=sent)

    [request] = worker.requests
    assert request.headers["openai-organization"] == "org-1"
    assert request.headers["x-title"] == "My app"
    assert request.headers["anthropic-version"] == "2024-01-01"
    assert request.headers["authorization"] == "Bearer the-key-of-the-worker"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/audio/speech"])
async def test_no_client_sees_a_key_or_header_of_a_worker_that_quotes_it_in_an_error(
    serve: Serve, path: str
) -> None:
    """Whether the request is passed through, translated or forwarded."""
    text = "the-key-of-the-worker has no organization org-1-is-secret"
    error = b'{"error": {"message": "%b", "type": "x"}, "org": "%b"}' % (2 * (text.encode(),))
    reply, probed = [make_reply(error, "400 Bad Request")], make_reply(b"{}")
    config = CONFIG.replace("org-1", "org-1-is-secret")
    async with ScriptedWorker(reply, probed=probed) as worker:
        gateway = await serve(config.format(protocol="openai", worker=worker.url))

        response = await gateway.http.post(path, json=CHAT)

    assert response.status_code == 400
    assert "*** has no organization ***" in response.text
