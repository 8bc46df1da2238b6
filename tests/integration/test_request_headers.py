"""Headers of requests that no worker gets: which are reported, and which say nothing."""

import pytest

from tests.conftest import Serve
from tests.support.fakes import ScriptedWorker, make_reply

CONFIG = """
listeners: [{address: "127.0.0.1:0", protocols: [openai, anthropic]}]
backends: {b: {kind: echo, script: [fine]}}
models:
  m:
    versions: {"1": {backend: b}, "2": {backend: b}}
    split: {weights: {"1": 50, "2": 50}, sticky: [header:X-User]}
  big: {backend: b}
routes: [{name: team, when: {model: m, header: {X-Team: red}}, to: {model: big}}]
"""
PATHS = ("/v1/chat/completions", "/v1/messages")
BODY = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
SILENT_HEADERS = {
    "X-User": "u",
    "X-Team": "red",
    "User-Agent": "Mozilla/5.0",
    "Sec-Fetch-Mode": "cors",
    "Cookie": "a=b",
    "X-Forwarded-For": "192.0.2.1",
    "CF-Ray": "1",
    "traceparent": "00-00000000000000000000000000000001-0000000000000001-01",
    "X-Stainless-Lang": "python",
    "X-OpenAI-Subagent": "review",
    "ChatGPT-Account-Id": "1",
    "Semantic-Kernel-Version": "1",
    "X-OpenWebUI-User-Id": "1",
    "langsmith-trace": "1",
    "Alt-Used": "localhost",
    "DISGUISED-HOST": "localhost",
    "WAS-DEFAULT-HOSTNAME": "localhost",
    "CloudFront-Viewer-Country": "DE",
    "l5d-client-id": "1",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("names", [[], ["X-Foo"], ["Foo", "X-Target-Machine"]])
async def test_unknown_headers_are_reported_and_silent_ones_are_not(
    serve: Serve, path: str, names: list[str]
) -> None:
    gateway = await serve(CONFIG)

    answer = await gateway.http.post(
        path, json=BODY, headers=SILENT_HEADERS | dict.fromkeys(names, "1")
    )

    assert answer.status_code == 200
    expected = ",".join(f"header.{name.lower()}=dropped" for name in names)
    assert answer.headers.get("x-interlingua-loss", "") == expected


async def test_beta_headers_of_several_lines_reach_the_worker(serve: Serve) -> None:
    async with ScriptedWorker([make_reply(b"{}", "400 Bad")]) as worker:
        backend = f'{{protocol: anthropic, workers: ["{worker.url}"], health: {{interval: 1h}}}}'
        gateway = await serve(CONFIG.replace("{kind: echo, script: [fine]}", backend))
        lines = [("anthropic-beta", "one"), ("anthropic-beta", "two")]
        await gateway.http.post(PATHS[1], json=BODY, headers=lines)

        assert worker.requests[0].headers["anthropic-beta"] == "one, two"
