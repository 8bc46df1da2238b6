"""Explanations of served requests and of dry runs, over real sockets."""

import hashlib
import json
from typing import Any

import httpx
import pytest

from backends.interfaces import WorkerFailure
from gateway.explain.explanation_store import MAX_EXPLANATIONS
from tests.conftest import RunningGateway, Serve
from tests.support.fakes import CLOSE, ScriptedWorker, chunked, make_reply

EXPLAIN = {"x-interlingua-explain": "1"}
USER = {"x-user-id": "u"}
"""A user who is assigned to version 1."""
HI_RESPONSE = json.dumps(
    {
        "id": "a",
        "object": "chat.completion",
        "created": 1,
        "model": "llama3",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }
).encode()
EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hi"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]
HI_STREAM = [
    *(b"data: " + json.dumps({"id": "a", "model": "llama3", **event}).encode() for event in EVENTS),
    b"data: [DONE]",
]
FRONT = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, triton]}}]
admin: {{address: "127.0.0.1:0"}}
backends:
  gpu:
    protocol: openai
    profile: vllm
    policy: round_robin
    workers: [{workers}]
  small: {{kind: echo, script: [small]}}
models:
  chat:
    versions:
      "1": {{backend: gpu, model: llama3}}
      "2": {{backend: small}}
      "3": {{backend: gpu, model: llama3}}
    split: {{name: rollout, weights: {{"1": 1, "3": 1}}, sticky: [header:x-user-id]}}
    defaults: {{temperature: 0.5}}
    fallback: ["2"]
  "*": {{backend: gpu}}
"""


def build_key_config(name: str, *, explain: bool) -> str:
    digest = hashlib.sha256(f"{name}-key".encode()).hexdigest()
    return f'  - {{name: {name}, sha256: "{digest}", explain: {str(explain).lower()}}}\n'


KEYS = (
    "keys:\n" + build_key_config("plain", explain=False) + build_key_config("curious", explain=True)
)


def build_config(*urls: str) -> str:
    listed = (f'{{url: "{url}", auth: {{bearer: canary-of-a-worker}}}}' for url in urls)
    return FRONT.format(workers=", ".join(listed))


def open_admin_client(running: RunningGateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=running.admin, timeout=30)


async def send_chat(
    running: RunningGateway, headers: dict[str, str] | None = None, **fields: object
) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "chat", "messages": messages, **fields}
    return await running.http.post(
        "/v1/chat/completions", json=body, headers=EXPLAIN | USER | (headers or {})
    )


def parse_explain_header(answer: httpx.Response) -> dict[str, Any]:
    text = answer.headers["x-interlingua-explain"]
    assert text.isascii()
    assert len(text) <= 4096
    explanation: dict[str, Any] = json.loads(text)
    return explanation


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_explain_header_describes_routing_and_timing(serve: Serve, *, stream: bool) -> None:
    reply = chunked(*(line + b"\n\n" for line in HI_STREAM)) if stream else make_reply(HI_RESPONSE)
    async with ScriptedWorker([reply]) as worker:
        running = await serve(build_config(worker.url))
        response = await send_chat(running, stream=stream, top_k=3, logit_bias={})

        assert response.status_code == 200

        explanation = parse_explain_header(response)
        seconds = explanation.pop("seconds")
        bucket = explanation.pop("bucket")

        assert explanation == {
            "protocol": "openai",
            "model": "chat",
            "version": "1",
            "rule": "",
            "sticky": "header:x-user-id",
            "pinned": False,
            "failed_attempts": [],
            "unsupported_parameters": "",
            "worker": worker.url,
            "attempts": 1,
        }
        assert list(seconds) == ["read", "route", "translate", "first_byte"]
        assert all(0 <= one < 5 for one in seconds.values())
        assert 0 <= bucket < 2**52


async def test_stored_explanation_has_the_exact_worker_request_with_masked_secrets(
    serve: Serve,
) -> None:
    async with ScriptedWorker([make_reply(HI_RESPONSE)]) as worker:
        running = await serve(build_config(worker.url))
        response = await send_chat(running, {"x-request-id": "one/1"}, max_tokens=5)
        async with open_admin_client(running) as http:
            explanation = (await http.get("/-/explain/one/1")).json()
            missing = await http.get("/-/explain/two")

    assert response.status_code == 200
    assert missing.status_code == 404
    assert missing.json()["error"]["field"] == "id"
    assert (explanation["id"], explanation["dry_run"], explanation["model"]) == (
        "one/1",
        False,
        "chat",
    )
    assert explanation["sticky"] == [{"source": "header:x-user-id", "present": True}]
    assert explanation["answer"]["usage"]["completion_tokens"] == 1
    assert explanation["answer"]["duration"] > 0

    [attempt] = explanation["attempts"]
    assert attempt["defaults"] == [{"field": "temperature", "value": 0.5, "applied": True}]

    [choice] = attempt["choices"]
    assert choice["expected_url"] == choice["candidates"][0]["url"] == worker.url

    [sent] = attempt["sent"]
    [received] = [one for one in worker.requests if one.method == "POST"]
    assert sent["body"].encode() == received.body
    assert (sent["url"], sent["path"]) == (worker.url, received.path)
    assert received.headers["authorization"] == "Bearer canary-of-a-worker"

    masked = received.headers | {"authorization": "***"}
    assert {name.lower(): text for name, text in sent["headers"]}.items() <= masked.items()
    assert "canary" not in json.dumps(explanation)


async def test_explanation_lists_failed_attempts_and_the_fallback(serve: Serve) -> None:
    async with ScriptedWorker([CLOSE]) as bad:
        running = await serve(build_config(bad.url, "http://127.0.0.1:1"))
        response = await send_chat(running, {"x-request-id": "r"})
        async with open_admin_client(running) as http:
            explanation = (await http.get("/-/explain/r")).json()

    assert response.json()["choices"][0]["message"]["content"] == "small"

    header = parse_explain_header(response)
    assert header["failed_attempts"] == [
        f"chat@1 {running.records[0].failed_attempts[0].split()[1]}"
    ]
    assert (header["version"], header["attempts"]) == ("2", 2)
    assert list(header["seconds"]) == ["read", "route", "translate", "fallback", "first_byte"]

    first, second = explanation["attempts"]
    assert {one["error"] for one in first["sent"]} == {"StreamBroken", "WorkerUnreachable"}
    assert [len(one["candidates"]) for one in first["choices"]] == [2, 2]
    assert [one["availability"] for one in first["choices"][1]["candidates"]].count("tried") == 1
    assert second["target"]["backend"] == "small"
    assert "sent" not in second
    assert explanation["failed_attempts"] == header["failed_attempts"]


async def test_explanation_of_a_rejected_request_stops_before_the_attempts(serve: Serve) -> None:
    running = await serve(build_config("http://127.0.0.1:1"))

    response = await send_chat(running, {"x-request-id": "r"}, temperature="hot")
    async with open_admin_client(running) as http:
        explanation = (await http.get("/-/explain/r")).json()

    assert response.status_code == 400
    assert parse_explain_header(response)["model"] == "chat"
    assert explanation["answer"]["error"] == "InvalidParameter"
    assert "attempts" not in explanation


async def test_explain_header_is_only_sent_to_keys_with_explain_permission(serve: Serve) -> None:
    async with ScriptedWorker([make_reply(HI_RESPONSE)]) as worker:
        running = await serve(build_config(worker.url) + KEYS)
        plain = await send_chat(running, {"authorization": "Bearer plain-key"})
        curious = await send_chat(running, {"authorization": "Bearer curious-key"})
        nobody = await send_chat(running)

    assert plain.status_code == curious.status_code == 200
    assert "x-interlingua-explain" not in plain.headers
    assert parse_explain_header(curious)["worker"] == worker.url
    assert nobody.status_code == 401
    assert "x-interlingua-explain" not in nobody.headers


async def test_explain_header_is_only_sent_on_request(serve: Serve) -> None:
    running = await serve(build_config("http://127.0.0.1:1"))

    answer = await running.http.get("/v1/models")
    unasked = await running.http.get("/v1/models", headers={"x-interlingua-explain": "0"})

    response = await running.http.get("/v1/models", headers=EXPLAIN)

    assert "x-interlingua-explain" not in answer.headers
    assert "x-interlingua-explain" not in unasked.headers
    assert parse_explain_header(response)["protocol"] == "openai"


async def test_explanation_store_keeps_the_newest_entries_up_to_its_limit(serve: Serve) -> None:
    running = await serve(build_config("http://127.0.0.1:1"))
    for number in range(MAX_EXPLANATIONS + 1):
        headers = {**EXPLAIN, "x-request-id": f"r{number}"}
        await running.http.get("/v1/models", headers=headers)
    await running.http.get("/v1/models", headers={**EXPLAIN, "x-request-id": "r2"})

    async with open_admin_client(running) as http:
        statuses = [
            (await http.get(f"/-/explain/r{number}")).status_code
            for number in (0, 1, 2, MAX_EXPLANATIONS)
        ]

    assert statuses == [404, 200, 200, 200]


async def test_stored_worker_body_is_truncated_to_64_kib(serve: Serve) -> None:
    async with ScriptedWorker([make_reply(HI_RESPONSE)]) as worker:
        running = await serve(build_config(worker.url))
        messages = [{"role": "user", "content": "x" + "é" * 70_000}]
        await send_chat(running, {"x-request-id": "r"}, messages=messages, model="other")
        async with open_admin_client(running) as http:
            explanation = (await http.get("/-/explain/r")).json()

    [sent] = explanation["attempts"][0]["sent"]
    [received] = [one for one in worker.requests if one.method == "POST"]

    assert sent["size"] == len(received.body)
    assert 65_000 < len(sent["body"].encode()) <= 65_536
    assert received.body.startswith(sent["body"].encode())
    assert "base64" not in sent


# --- dry runs -------------------------------------------------------------------------------------


async def test_dry_run_uses_live_worker_states_and_sends_no_request(
    serve: Serve,
) -> None:
    async with ScriptedWorker([make_reply(HI_RESPONSE)]) as worker:
        running = await serve(build_config(worker.url, "http://127.0.0.1:1"))
        await send_chat(running)
        await send_chat(running)
        request_count = len([one for one in worker.requests if one.method == "POST"])
        records = len(running.records)
        question = {
            "path": "/v1/chat/completions",
            "headers": USER,
            "body": {"model": "chat", "messages": [{"role": "user", "content": "hi"}]},
            "peer": "192.0.2.7",
        }
        async with open_admin_client(running) as http:
            explanations = [(await http.post("/-/explain", json=question)).json() for _ in range(2)]

    assert len([one for one in worker.requests if one.method == "POST"]) == request_count
    assert len(running.records) == records

    one, _ = explanations
    assert (one["dry_run"], one["listener"]) == (True, "127.0.0.1:0")
    assert one["sticky"] == [{"source": "header:x-user-id", "present": True, "value": "u"}]

    states = {each["url"]: each for each in one["attempts"][0]["choices"][0]["candidates"]}
    assert states["http://127.0.0.1:1"]["state"] != "up"
    assert {each["attempts"][0]["choices"][0]["expected_url"] for each in explanations} == {
        worker.url
    }
    assert one["fallbacks"] == [{"target": "chat@2"}]
    assert "answer" not in one


@pytest.mark.parametrize(
    ("question", "field", "says"),
    [
        ({}, "path", "path"),
        ({"path": "v1"}, "path", "regex"),
        ({"path": "/v1/models", "key": "none"}, None, "there is no key 'none'"),
        ({"path": "/v1/models", "listener": "x"}, None, "known: 127.0.0.1:0"),
        ({"path": "/", "extra": 1}, "extra", "extra"),
    ],
)
async def test_invalid_explain_request_is_rejected(
    serve: Serve, question: dict[str, Any], field: str | None, says: str
) -> None:
    running = await serve(build_config("http://127.0.0.1:1"))

    async with open_admin_client(running) as http:
        response = await http.post("/-/explain", json=question)

    assert response.status_code == 400
    assert response.json()["error"]["field"] == field
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": "é"}]}),
        ("/v1/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "a"}]}),
        ("/v2/models/chat/generate", {"text_input": "a", "parameters": {"temperature": 0.25}}),
    ],
    ids=["translated", "passed-on", "another-protocol"],
)
async def test_dry_run_predicts_the_exact_worker_request(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    async with ScriptedWorker([make_reply(HI_RESPONSE)]) as worker:
        running = await serve(build_config(worker.url))
        async with open_admin_client(running) as http:
            question = {"path": path, "headers": USER, "body": body}
            explanation = (await http.post("/-/explain", json=question)).json()
        predicted = explanation["attempts"][0]["sent"][0]

        assert not [one for one in worker.requests if one.method == "POST"]

        await running.http.post(path, json=body, headers=USER)

    [received] = [one for one in worker.requests if one.method == "POST"]
    assert predicted["path"] == received.path
    assert json.loads(predicted["body"]) == json.loads(received.body)
    assert predicted["size"] == len(received.body)


async def test_worker_error_is_in_the_record_and_the_explanation_but_not_in_the_response(
    serve: Serve,
) -> None:
    """The first worker fails, its API key is masked, and the second worker answers."""
    error_body = b'{"error":{"message":"CUDA out of memory; your key is canary-of-a-worker"}}'
    broken = [make_reply(error_body, "500 Oops")]
    async with (
        ScriptedWorker(*[broken] * 3) as bad,
        ScriptedWorker(*[[make_reply(HI_RESPONSE)]] * 3) as good,
    ):
        running = await serve(build_config(bad.url, good.url))
        answers = [await send_chat(running) for _ in range(2)]
        async with open_admin_client(running) as admin:
            pages = [
                (await admin.get(f"/-/explain/{one.headers['x-request-id']}")).json()
                for one in answers
            ]

    text = "CUDA out of memory; your key is ***"
    [failures] = [one.worker_failures for one in running.records if one.worker_failures]
    assert failures == (WorkerFailure(bad.url, "WorkerFailed", 500, text),)
    assert [one.status_code for one in answers] == [200, 200]

    sent = [one for page in pages for attempt in page["attempts"] for one in attempt["sent"]]
    log_lines = [
        (one["url"], one["error"], one["worker_status"], one["worker_text"])
        for one in sent
        if "error" in one
    ]
    assert log_lines == [(bad.url, "WorkerFailed", 500, text)]
    assert "canary" not in repr((pages, running.records))
    assert "CUDA" not in repr([(one.text, one.headers) for one in answers])


async def test_worker_error_within_a_stream_is_in_the_record(serve: Serve) -> None:
    broken = [chunked(HI_STREAM[0] + b"\n\n", b'data: {"error":{"message":"it broke"}}\n\n')]
    async with ScriptedWorker(broken) as worker:
        running = await serve(build_config(worker.url))
        response = await send_chat(running, stream=True)

    [record] = running.records
    assert record.outcome == "truncated"
    assert record.worker_failures == (WorkerFailure(worker.url, "WorkerFailed", None, "it broke"),)
    assert "it broke" not in response.text
