"""The rate limits and budgets of API keys, over a real socket and in every protocol."""

import asyncio
import hashlib
import random
import re
from typing import Any, Final

import httpx
import msgspec
import pytest
from msgspec import Struct

from backends.echo import EchoBackend
from gateway.config.loader import load_bytes
from gateway.config.schema import RateLimitConfig
from gateway.explain.dry_run import run_dry
from gateway.explain.report import ExplainRequest
from gateway.observability.record import RequestRecord
from tests.conftest import RunningGateway, Serve
from tests.support.waiting import wait_until

BACKENDS: Final = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, databricks, triton, ovms, {name: mindie, prefix: /mindie}]
backends:
  mock: {kind: echo, script: ["Hello", " world", "!"]}
  slow: {kind: echo, script: [a, b, c, d, e, f, g, h], delay: 100ms}
  bad: {kind: echo, script: ["Hello"], fail: {mode: unavailable}}
  cut: {kind: echo, script: ["Hello", " world"], fail: {mode: disconnect, after_chunks: 1}}
models:
  mock: {backend: mock, aliases: [gpt]}
  slow: {backend: slow}
  bad: {backend: bad}
  lucky: {backend: bad, fallback: [mock]}
  cut: {backend: cut}
"""
MESSAGES: Final = [{"role": "user", "content": "Hi"}]
CHAT: Final = {"model": "gpt", "messages": MESSAGES}
ANY: Final = RateLimitConfig((10**6, 1), (10**6, 1), 10**6, 10**6)


def build_keyed_config(**limits: str) -> str:
    """Build a configuration with one key for each name and its limits; the name is the key."""
    keys = [
        f"  - {{name: {name}, sha256: {hashlib.sha256(name.encode()).hexdigest()}, limits: {one}}}"
        for name, one in limits.items()
    ]
    return "\n".join([BACKENDS, "keys:", *keys])


def build_bearer_header(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def get_usage(gateway: RunningGateway, key: str) -> tuple[int, int]:
    """Return a key's requests in flight and its tokens of today."""
    limiter = gateway.app.active_snapshots[-1].rate_limiter
    assert limiter is not None
    counters = limiter.registry.build_counters(key, "", ANY)
    slots, _, _, budget = (one.amount - one.get_status(0.0).remaining for one in counters)
    return slots, budget


async def send_chat(
    gateway: RunningGateway, key: str, model: str = "mock", **fields: Any
) -> httpx.Response:
    body = {"model": model, "messages": MESSAGES} | fields
    return await gateway.http.post(
        "/v1/chat/completions", json=body, headers=build_bearer_header(key)
    )


# --- rejected requests ----------------------------------------------------------------------------


class ProtocolErrors(Struct, frozen=True):
    """A protocol's request, and its error response: status and body."""

    name: str
    path: str
    body: dict[str, Any]
    rate: tuple[int, dict[str, Any]]
    quota: tuple[int, dict[str, Any]]


RATE: Final = "at most 1 request in 3600 s of the model 'mock' are allowed"
QUOTA: Final = "the budget of 10 tokens a day is spent: 6 are left, and this request may take 10"


def build_openai_error(kind: str, code: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


PROTOCOL_ERRORS: Final = [
    ProtocolErrors(
        "openai",
        "/v1/chat/completions",
        CHAT,
        (429, build_openai_error("requests", "rate_limit_exceeded", RATE)),
        (429, build_openai_error("insufficient_quota", "insufficient_quota", QUOTA)),
    ),
    ProtocolErrors(
        "databricks",
        "/serving-endpoints/gpt/invocations",
        {"messages": MESSAGES},
        (429, {"error_code": "REQUEST_LIMIT_EXCEEDED", "message": RATE}),
        (403, {"error_code": "PERMISSION_DENIED", "message": QUOTA}),
    ),
    ProtocolErrors(
        "triton",
        "/v2/models/gpt/versions/1/generate",
        {"text_input": "Hi"},
        (429, {"error": RATE}),
        (429, {"error": QUOTA}),
    ),
    ProtocolErrors(
        "mindie",
        "/mindie/v2/models/gpt/generate",
        {"text_input": "Hi"},
        (429, {"error": RATE, "code": 429}),
        (429, {"error": QUOTA, "code": 429}),
    ),
    ProtocolErrors(
        "ovms",
        "/v3/chat/completions",
        CHAT,
        (429, {"error": RATE}),
        (429, {"error": QUOTA}),
    ),
]


async def test_rate_and_quota_errors_have_the_format_of_each_protocol(serve: Serve) -> None:
    rates = {
        f"rate-{protocol.name}": "{models: {gpt: {requests: 1/h}}}" for protocol in PROTOCOL_ERRORS
    }
    quotas = {f"quota-{protocol.name}": "{budget: 10/day}" for protocol in PROTOCOL_ERRORS}
    gateway = await serve(build_keyed_config(**rates, **quotas))

    for protocol in PROTOCOL_ERRORS:
        for kind, (status, body) in {"rate": protocol.rate, "quota": protocol.quota}.items():
            headers = build_bearer_header(f"{kind}-{protocol.name}")
            first = await gateway.http.post(protocol.path, json=protocol.body, headers=headers)
            assert first.status_code == 200, first.text
            refused = await gateway.http.post(protocol.path, json=protocol.body, headers=headers)
            assert (refused.status_code, refused.json()) == (status, body)
            assert refused.headers.get("retry-after") == {"rate": "3600"}.get(kind)
            should_retry = refused.headers.get("x-should-retry")
            assert should_retry == (
                "false" if (kind, protocol.name) == ("quota", "openai") else None
            )

    assert {one.error for one in gateway.records} == {"", "RateLimitExceeded", "QuotaExceeded"}


async def test_requests_without_a_model_call_are_not_rate_limited(serve: Serve) -> None:
    gateway = await serve(build_keyed_config(web="{requests: 1/h}"))
    paths = ("/health", "/v1/models", "/v1/models/gpt", "/v2/models/mock/ready")

    for path in (*paths, "/.well-known/databricks-config"):
        for _ in range(3):
            response = await gateway.http.get(path, headers=build_bearer_header("web"))
            assert response.status_code in (200, 404)
            assert "x-ratelimit-limit-requests" not in response.headers

    assert (await send_chat(gateway, "web", "nobody")).status_code == 404
    assert (await send_chat(gateway, "web")).status_code == 200
    assert (await send_chat(gateway, "web")).status_code == 429


async def test_tokenizer_requests_count_against_the_request_limit(serve: Serve) -> None:
    gateway = await serve(build_keyed_config(web="{requests: 2/h, budget: 10/day}"))
    for status in (200, 200, 429):
        body = {"inputs": "Hi there", "model": "mock"}
        response = await gateway.http.post(
            "/mindie/v1/tokenizer", json=body, headers=build_bearer_header("web")
        )
        assert response.status_code == status

    assert get_usage(gateway, "web") == (0, 0)


async def test_dry_run_consumes_no_limit(serve: Serve) -> None:
    gateway = await serve(build_keyed_config(web="{requests: 1/h}"))
    body = msgspec.Raw(msgspec.json.encode(CHAT))
    question = ExplainRequest(path="/v1/chat/completions", method="POST", key="web", body=body)

    for _ in range(2):
        dry_run = await run_dry(
            question, gateway.app.active_snapshots[-1].handlers_by_address, lambda: 0.0
        )
        assert dry_run.answer is None

    assert (await send_chat(gateway, "web")).status_code == 200


async def test_keys_without_limits_each_get_the_default_limits(serve: Serve) -> None:
    common = build_keyed_config(web="{}", one="null", two="null").replace(", limits: null", "")
    gateway = await serve(f"{common}\ndefaults: {{limits: {{requests: 1/h}}}}")
    for key, statuses in {"web": [200, 200], "one": [200, 429], "two": [200, 429]}.items():
        assert [(await send_chat(gateway, key)).status_code for _ in range(2)] == statuses


async def test_clients_share_the_default_limits_when_no_keys_are_configured(serve: Serve) -> None:
    gateway = await serve(f"{BACKENDS}\ndefaults: {{limits: {{requests: 2/h}}}}")
    assert [(await send_chat(gateway, key)).status_code for key in "abc"] == [200, 200, 429]


# --- rate limit headers ---------------------------------------------------------------------------


async def test_openai_responses_have_ratelimit_headers(serve: Serve) -> None:
    gateway = await serve(
        build_keyed_config(web="{requests: 9/h, tokens: 9k/h}", batch="{concurrent: 5}")
    )
    bodies: list[dict[str, Any]] = [
        {},
        {"stream": True},
        {"temperature": 9},
        {"model": "bad"},
        {"model": "cut", "stream": True},
    ]
    statuses = []

    for number, fields in enumerate(bodies, 1):
        response = await send_chat(gateway, "web", **fields)
        statuses.append(response.status_code)
        headers = response.headers
        assert headers["x-ratelimit-limit-requests"] == "9"
        assert headers["x-ratelimit-remaining-requests"] == str(9 - number)
        assert re.fullmatch("[0-9]+m[0-9]+s", headers["x-ratelimit-reset-requests"])
        assert headers["x-ratelimit-limit-tokens"] == "9000"
        assert 8000 < int(headers["x-ratelimit-remaining-tokens"]) < 9000

    assert statuses == [200, 200, 400, 503, 200]
    for key in ("batch", "nobody"):
        assert "x-ratelimit-limit-requests" not in (await send_chat(gateway, key)).headers
    assert {"rate_limit_headers", "reservation"}.isdisjoint(RequestRecord.__struct_fields__)


# --- how requests end -----------------------------------------------------------------------------


async def test_unused_reservation_is_released_for_every_request_outcome(serve: Serve) -> None:
    gateway = await serve(build_keyed_config(web="{concurrent: 1, budget: 1M/day}"))
    spent = 0
    ends: list[tuple[dict[str, Any], int]] = [
        ({}, 1 + 3),
        ({"stream": True}, 1 + 3),
        ({"model": "lucky", "max_tokens": 500}, 1 + 3),
        ({"model": "bad", "max_tokens": 500}, 0),
        ({"temperature": 9}, 0),
        ({"model": "cut"}, 0),
    ]
    for fields, tokens in ends:
        await send_chat(gateway, "web", **fields)
        spent += tokens
        assert get_usage(gateway, "web") == (0, spent), fields


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnected_client_is_charged_for_prompt_and_received_tokens(
    serve: Serve, *, stream: bool
) -> None:
    gateway = await serve(build_keyed_config(web="{concurrent: 1, budget: 1M/day}"))
    backend: Any = gateway.app.backends["slow"]
    body = {"model": "slow", "messages": MESSAGES, "stream": stream, "max_tokens": 5000}
    response_stream = gateway.http.stream(
        "POST", "/v1/chat/completions", json=body, headers=build_bearer_header("web")
    )
    task = asyncio.create_task(read_first_chunk(response_stream))
    await wait_until(lambda: backend.running == 1)

    assert get_usage(gateway, "web")[0] == 1
    assert get_usage(gateway, "web")[1] > 5000
    assert (await send_chat(gateway, "web")).status_code == 429

    if stream:
        await task
    else:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await wait_until(lambda: get_usage(gateway, "web")[0] == 0)
    prompt = len(httpx.Request("POST", "http://x", json=body).content) // 4
    [record] = [one for one in gateway.records if one.model == "slow"]

    assert (record.outcome, record.usage) == ("cancelled", None)
    assert get_usage(gateway, "web")[1] == prompt + record.tokens
    assert (record.tokens > 0) == stream


async def read_first_chunk(stream: Any) -> None:
    """Read the first chunk of a response and disconnect."""
    async with stream as response:
        async for _ in response.aiter_bytes():
            return


async def test_concurrency_slots_are_released_after_random_disconnects(serve: Serve) -> None:
    gateway = await serve(build_keyed_config(web="{concurrent: 3}"))
    backend: Any = gateway.app.backends["slow"]
    rng = random.Random(5)
    running: list[int] = []

    async def come_and_go() -> None:
        fields: dict[str, Any] = {
            "model": rng.choice(["slow", "cut", "bad", "mock"]),
            "stream": rng.random() < 0.5,
        }
        task = asyncio.create_task(send_chat(gateway, "web", **fields))
        await asyncio.sleep(rng.random() / 5)
        running.append(backend.running)
        if rng.random() < 0.7:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(come_and_go() for _ in range(40)))
    await wait_until(lambda: get_usage(gateway, "web")[0] == 0)
    assert max(running) <= 3
    assert "RateLimitExceeded" in {one.error for one in gateway.records}

    tasks = [asyncio.create_task(send_chat(gateway, "web", "slow")) for _ in range(5)]
    statuses = sorted([(await one).status_code for one in tasks])
    assert statuses == [200, 200, 200, 429, 429]


# --- reloads --------------------------------------------------------------------------------------


async def test_reload_keeps_the_consumed_limits(serve: Serve) -> None:
    gateway = await serve(build_keyed_config(web="{concurrent: 9, requests: 2/h, budget: 1M/day}"))
    await send_chat(gateway, "web")
    running = asyncio.create_task(send_chat(gateway, "web", "slow"))
    await wait_until(lambda: get_usage(gateway, "web")[0] == 1)
    again = build_keyed_config(
        web="{concurrent: 9, requests: 3/h, budget: 1M/day}", batch="{requests: 1/h}"
    )
    await gateway.app.apply_config(load_bytes(again.encode(), "test.yaml", env={}))

    assert get_usage(gateway, "web")[0] == 1
    assert (await running).status_code == 200
    assert get_usage(gateway, "web") == (0, 4 + 9)
    assert [(await send_chat(gateway, "web")).status_code for _ in range(2)] == [200, 429]
    assert (await send_chat(gateway, "batch")).status_code == 200

    await gateway.app.apply_config(load_bytes(BACKENDS.encode(), "test.yaml", env={}))
    assert [(await send_chat(gateway, "web")).status_code for _ in range(2)] == [200, 200]


CHOICES = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends:
  local: {kind: echo, script: [a]}
  held: {kind: echo, script: [a], delay: 30s}
  gone: {protocol: openai, workers: ["http://127.0.0.1:1"]}
models: {m: {backend: local, fallback: [other]}, busy: {backend: held}, other: {backend: local},
         lost: {backend: gone, fallback: [m]}}
defaults: {limits: {concurrent: 4, requests: 100/h}}
"""


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "samples"),
    [
        ("/v1/chat/completions", CHAT | {"model": "m"}, 1),
        ("/v1/chat/completions", CHAT | {"model": "m", "n": 3}, 3),
        ("/v1/completions", {"model": "m", "prompt": ["x", "y"], "n": 2}, 4),
        ("/v1/completions", {"model": "m", "prompt": "x", "n": 1, "best_of": 4}, 4),
        ("/v1/completions", {"model": "lost", "prompt": ["x", "y", "z"], "n": 50}, 150),
    ],
)
async def test_choices_at_local_model_count_against_concurrency_limit(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, object],
    samples: int,
    *,
    is_local: bool,
) -> None:
    """A single request may have any number of choices; beside others it gets the free slots."""
    if is_local:
        monkeypatch.setattr(EchoBackend, "computes_choices", True, raising=False)
    gateway = await serve(CHOICES)
    alone = await gateway.http.post(path, json=body)
    again = await gateway.http.post(path, json=body)
    held = {"model": "busy", "prompt": "x", "n": 1}
    running = asyncio.create_task(gateway.http.post("/v1/completions", json=held))
    snapshot = gateway.app.active_snapshots[-1]
    while not snapshot.running_count:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.005)
    other_response = await gateway.http.post(path, json=body)
    after = await gateway.http.post("/v1/completions", json={"model": "m", "prompt": "x"})

    running.cancel()

    assert (alone.status_code, again.status_code) == (200, 200)
    assert other_response.status_code == (429 if is_local and samples > 3 else 200)
    assert after.status_code == 200

    if other_response.status_code == 429:
        assert "at most 4 requests at a time" in other_response.text
        assert gateway.records[-2].error == "RateLimitExceeded"
        get_usage = 100 - int(after.headers["x-ratelimit-remaining-requests"])
        assert get_usage == 4, "the rejected request counts against no limit"


async def test_no_split_has_sent_a_request_that_a_limit_refuses(serve: Serve) -> None:
    """Else it would count as refused by a version that never got it."""
    versions = """
  split:
    versions: {"1": {backend: mock}, "2": {backend: mock}}
    split: {weights: {"1": 50, "2": 50}}
"""
    text = build_keyed_config(one="{requests: 1/h}").replace("models:\n", f"models:{versions}")
    gateway = await serve(text)
    body, headers = {"model": "split", "messages": MESSAGES}, build_bearer_header("one")
    statuses = [
        (await gateway.http.post("/v1/chat/completions", json=body, headers=headers)).status_code
        for _ in range(2)
    ]
    assert statuses == [200, 429]
    assert [record.split for record in gateway.records] == ["split", ""]
