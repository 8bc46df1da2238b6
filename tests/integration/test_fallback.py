"""A fallback target answers when a model's own target can't."""

import hashlib
import json
from typing import Any

import pytest

from gateway.pipeline.model_settings import apply_model_settings
from gateway.routing.router import Route
from protocols.core.request import AnyRequest
from tests.conftest import Serve
from tests.support.fakes import ScriptedWorker, make_reply

FRONT = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends:
  gone: {protocol: openai, workers: ["http://127.0.0.1:1"]}
  broken: {kind: echo, script: [a, b], fail: {mode: error}}
  late: {kind: echo, script: [a, b], fail: {mode: disconnect, after_chunks: 1}}
  well: {kind: echo, script: [fine]}
models:
  chat:
    versions: {"1": {backend: gone}, "2": {backend: broken}, "3": {backend: well}}
    split: {weights: {"1": 1, "2": 0, "3": 0}}
    fallback: ["2", spare]
  spare: {backend: well}
  own: {versions: {"1": {backend: gone}, "2": {backend: well}}, split: {weights: {"1": 1}},
        fallback: ["1", "2"]}
  mid: {backend: late, fallback: [spare]}
  lost: {backend: gone, fallback: [also-lost]}
  also-lost: {backend: broken}
"""


def build_chat_body(model: str, *, stream: bool = False, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": model, "stream": stream, "messages": messages} | fields


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("model", "tried", "version"),
    [
        ("chat", ["chat@1 Overloaded", "chat@2 WorkerFailed"], "1"),
        ("own", ["own@1 Overloaded"], "2"),
    ],
)
async def test_failed_target_falls_back_to_the_next_target(
    serve: Serve, model: str, tried: list[str], version: str, *, stream: bool
) -> None:
    gateway = await serve(FRONT)

    response = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body(model, stream=stream)
    )

    assert response.status_code == 200
    assert "fine" in response.text
    assert f'"model":"{model}"' in response.text
    assert response.headers["x-served-model"] == version
    assert list(gateway.records[0].failed_attempts) == tried
    assert gateway.records[0].outcome == "ok"


async def test_last_fallback_error_is_returned_when_all_targets_fail(serve: Serve) -> None:
    gateway = await serve(FRONT)
    response = await gateway.http.post("/v1/chat/completions", json=build_chat_body("lost"))

    assert response.status_code == 502
    assert list(gateway.records[0].failed_attempts) == ["lost@1 Overloaded"]


async def test_started_stream_is_never_retried_on_a_fallback(serve: Serve) -> None:
    gateway = await serve(FRONT)
    response = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body("mid", stream=True)
    )

    assert b'"error"' in response.content
    assert b"fine" not in response.content


async def test_pinned_version_has_no_fallback(serve: Serve) -> None:
    gateway = await serve(FRONT)
    response = await gateway.http.post("/v1/chat/completions", json=build_chat_body("chat@1"))
    assert response.status_code == 503


async def test_client_error_does_not_trigger_a_fallback(serve: Serve) -> None:
    gateway = await serve(FRONT)
    response = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body("chat") | {"temperature": 9}
    )

    assert response.status_code == 400
    assert gateway.records[0].failed_attempts == ()


# --- required capabilities ------------------------------------------------------------------------

ABLE = """
listeners: [{address: "127.0.0.1:0", protocols: [openai, databricks, ovms]}]
backends:
  gone: {protocol: openai, workers: ["http://127.0.0.1:1"]}
  text: {protocol: triton, profile: plain, workers: ["http://127.0.0.1:2"]}
  talk: {protocol: tgi, workers: ["http://127.0.0.1:3"]}
  well: {kind: echo, script: [fine]}
  short: {kind: echo, script: [fine], context: 3}
models:
  chat: {backend: gone, fallback: [plain, spare]}
  hopeless: {backend: gone, fallback: [plain]}
  worse: {backend: gone, fallback: [plain, also-gone, plain-too]}
  plain: {backend: text}
  plain-too: {backend: text}
  also-gone: {backend: talk}
  spare: {backend: well}
  strict: {backend: gone, fallback: [picky, brief, spare]}
  picky: {backend: text, on_loss: reject}
  brief: {backend: well, limits: {max_tokens: 8}}
  vectors: {backend: gone, task: embedding, fallback: [more-vectors]}
  more-vectors: {backend: well, task: embedding}
  full: {backend: short, fallback: [untold, small, large]}
  stuck: {backend: short, fallback: [untold, small]}
  untold: {backend: well}
  small: {backend: well, limits: {context: 3}}
  large: {backend: well, limits: {context: 100}}
  numbers: {backend: gone, fallback: [plain, small, large]}
  narrow: {backend: gone, fallback: [full-too, small, large]}
  full-too: {backend: short}
"""
TOOLS = {"tools": [{"type": "function", "function": {"name": "look"}}]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
IMAGE = [{"type": "image_url", "image_url": {"url": "https://pictures.test/cat.png"}}]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "lacking"),
    [
        (TOOLS, "lacks tools"),
        (TOOLS | {"tool_choice": "auto", "parallel_tool_calls": False}, "lacks tools"),
        ({"response_format": SCHEMA}, "lacks structured output"),
        ({"response_format": {"type": "json_object"}}, "lacks structured output"),
        ({"logprobs": True, "top_logprobs": 2}, "lacks logprobs"),
        (TOOLS | {"logprobs": True}, "lacks logprobs, tools"),
        ({"temperature": 0.5, "top_k": 3, "logit_bias": {"5": 1}}, "Overloaded"),
        (TOOLS | {"tool_choice": "none"}, "Overloaded"),
    ],
)
async def test_fallback_skips_targets_that_lack_a_required_capability(
    serve: Serve, fields: dict[str, object], lacking: str, *, stream: bool
) -> None:
    gateway = await serve(ABLE)

    response = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body("chat", stream=stream) | fields
    )

    assert response.status_code == 200
    assert "fine" in response.text

    [record] = gateway.records
    assert record.failed_attempts == ("chat@1 Overloaded", f"plain@1 {lacking}")
    assert (record.model, record.fallback_from, record.outcome) == ("spare", "chat@1", "ok")


async def test_first_error_is_returned_when_no_fallback_has_the_capability(serve: Serve) -> None:
    gateway = await serve(ABLE)
    response = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body("hopeless") | TOOLS
    )
    plain = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body("gone-too") | TOOLS
    )

    assert (response.status_code, plain.status_code) == (503, 404)

    record = gateway.records[0]
    assert record.failed_attempts == ("plain@1 lacks tools",)
    assert (record.model, record.version, record.error) == ("hopeless", "1", "Overloaded")
    assert record.fallback_from == ""


async def test_last_attempted_target_determines_the_error(serve: Serve) -> None:
    gateway = await serve(ABLE)
    response = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body("worse") | TOOLS
    )

    assert response.status_code == 503

    [record] = gateway.records
    failures = ("worse@1 Overloaded", "plain@1 lacks tools", "plain-too@1 lacks tools")
    assert record.failed_attempts == failures
    assert (record.model, record.fallback_from) == ("also-gone", "worse@1")


async def test_fallbacks_that_see_no_images_keep_the_first_error(serve: Serve) -> None:
    gateway = await serve(ABLE)
    message = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, *IMAGE]}
    response = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body("chat", messages=[message])
    )

    assert response.status_code == 503

    [record] = gateway.records
    assert record.failed_attempts == ("plain@1 lacks images", "spare@1 lacks images")
    assert (record.model, record.error, record.fallback_from) == ("chat", "Overloaded", "")


async def test_limits_and_strictness_of_a_fallback_model_skip_that_model(serve: Serve) -> None:
    gateway = await serve(ABLE)
    body = build_chat_body("strict") | {"max_tokens": 9, "top_k": 3, "logit_bias": {"5": 1}}
    response = await gateway.http.post("/v1/chat/completions", json=body)

    assert response.status_code == 200

    failures = ("strict@1 Overloaded", "picky@1 UnsupportedFeature", "brief@1 InvalidParameter")
    assert gateway.records[0].failed_attempts == failures


async def test_embeddings_fall_back_to_another_target(serve: Serve) -> None:
    gateway = await serve(ABLE)
    response = await gateway.http.post("/v1/embeddings", json={"model": "vectors", "input": "hi"})

    assert response.json()["data"][0]["embedding"]

    assert gateway.records[0].failed_attempts == ("vectors@1 Overloaded",)


# --- prompts beyond the context length ------------------------------------------------------------


async def test_fallback_skips_targets_with_a_context_too_small_for_the_token_ids(
    serve: Serve,
) -> None:
    gateway = await serve(ABLE)
    for length, model in ((3, "small"), (4, "large")):
        body = {"model": "numbers", "prompt": list(range(length))}
        response = await gateway.http.post("/v1/completions", json=body)
        assert response.status_code == 200
        assert gateway.records[-1].model == model
    failures = ("numbers@1 Overloaded", "plain@1 UnsupportedFeature", "small@1 lacks context")

    assert gateway.records[-1].failed_attempts == failures


@pytest.mark.parametrize("stream", [True, False])
async def test_context_overflow_falls_back_to_a_target_with_a_larger_context(
    serve: Serve, *, stream: bool
) -> None:
    gateway = await serve(ABLE)
    messages = [{"role": "user", "content": "one two three four"}]
    response = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body("full", stream=stream) | {"messages": messages}
    )

    assert response.status_code == 200
    assert "fine" in response.text

    failures = ("full@1 ContextTooLong", "untold@1 lacks context", "small@1 lacks context")
    assert gateway.records[0].failed_attempts == failures
    assert gateway.records[0].model == "large"


async def test_context_overflow_is_returned_when_no_larger_context_is_declared(
    serve: Serve,
) -> None:
    gateway = await serve(ABLE)
    messages = [{"role": "user", "content": "one two three four"}]

    response = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body("stuck", messages=messages)
    )

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert gateway.records[0].failed_attempts == ("untold@1 lacks context", "small@1 lacks context")


async def test_context_overflow_of_a_fallback_continues_with_a_larger_context(serve: Serve) -> None:
    gateway = await serve(ABLE)
    messages = [{"role": "user", "content": "one two three four"}]
    response = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body("narrow", messages=messages)
    )

    assert response.status_code == 200

    failures = ("narrow@1 Overloaded", "full-too@1 ContextTooLong", "small@1 lacks context")
    assert gateway.records[0].failed_attempts == failures
    assert gateway.records[0].model == "large"


async def test_passthrough_body_is_only_decoded_for_a_fallback(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def reading(request: AnyRequest, route: Route, *rest: Any) -> AnyRequest:
        read.append(route.target_name)
        return apply_model_settings(request, route, *rest)

    monkeypatch.setattr("gateway.pipeline.strategies.apply_model_settings", reading)
    reply = make_reply(
        b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}'
    )
    probed = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    async with ScriptedWorker([reply], probed=probed) as worker:
        text = ABLE.replace(
            "{kind: echo, script: [fine]}", f'{{protocol: openai, workers: ["{worker.url}"]}}'
        )
        gateway = await serve(text)

        alone = await gateway.http.post(
            "/v1/chat/completions", json=build_chat_body("spare", own="x")
        )

        assert (alone.status_code, read) == (200, [])

        response = await gateway.http.post(
            "/v1/chat/completions", json=build_chat_body("chat", own="x")
        )

    assert response.status_code == 200
    assert read == ["plain@1", "spare@1"]

    sent = [json.loads(one.body) for one in worker.requests]
    assert sent == [build_chat_body("spare", own="x"), build_chat_body("spare", own="x")]


KEYED = f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
admin: {{address: "127.0.0.1:0"}}
backends:
  gone: {{protocol: openai, workers: ["http://127.0.0.1:1"]}}
  well: {{kind: echo, script: [fine]}}
models:
  strict: {{versions: {{"1": {{backend: gone}}, "2": {{backend: well}}}},
           split: {{weights: {{"1": 1}}}}, fallback: [other, "2"], fallback_requires_access: true}}
  lax: {{backend: gone, fallback: [other]}}
  other: {{backend: well, aliases: [another]}}
keys:
  - {{name: narrow, sha256: "{hashlib.sha256(b"narrow").hexdigest()}", models: [strict, lax]}}
  - {{name: wide, sha256: "{hashlib.sha256(b"wide").hexdigest()}", models: [strict, another]}}
  - {{name: all, sha256: "{hashlib.sha256(b"all").hexdigest()}"}}
"""


@pytest.mark.parametrize(
    ("key", "model", "server", "failures"),
    [
        ("narrow", "strict", "strict", ["strict@1 Overloaded", "other@1 no access"]),
        ("wide", "strict", "other", ["strict@1 Overloaded"]),
        ("all", "strict", "other", ["strict@1 Overloaded"]),
        ("narrow", "lax", "other", ["lax@1 Overloaded"]),
    ],
)
async def test_fallback_skips_model_that_key_may_not_use(
    serve: Serve, key: str, model: str, server: str, failures: list[str]
) -> None:
    gateway = await serve(KEYED)

    headers = {"authorization": f"Bearer {key}"}
    response = await gateway.http.post(
        "/v1/chat/completions", json=build_chat_body(model), headers=headers
    )

    assert response.status_code == 200
    assert gateway.records[0].model == server
    assert list(gateway.records[0].failed_attempts) == failures
