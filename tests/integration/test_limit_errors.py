"""A client gets a model's limits in the error that its protocol's own server would send."""

from typing import Any

import pytest

from tests.conftest import Serve

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [{protocol}]}}]
limits: {{drain_timeout: 1s}}
backends: {{echo: {{kind: echo}}}}
models:
  chat: {{backend: echo, limits: {{max_tokens: 1048577}}}}
"""
ABOVE = 1_048_578
MESSAGES = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "chat", "prompt": "hi"}
OPENAI = (
    "Invalid '{}': integer above maximum value. "
    "Expected a value <= 1048577, but got 1048578 instead."
)
CASES: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "openai chat": ("openai", "/v1/chat/completions", MESSAGES, "max_tokens", OPENAI),
    "openai chat, newer field": (
        "openai", "/v1/chat/completions", MESSAGES, "max_completion_tokens", OPENAI
    ),
    "openai completion": ("openai", "/v1/completions", PROMPT, "max_tokens", OPENAI),
    "databricks": (
        "databricks",
        "/serving-endpoints/chat/invocations",
        {"messages": MESSAGES["messages"]},
        "max_tokens",
        "{} must be in [1, 1048577], got 1048578",
    ),
    "ovms": (
        "ovms", "/v3/chat/completions", MESSAGES, "max_tokens",
        "{} exceeds limit provided in graph config: 1048577",
    ),
    "ovms, newer field": (
        "ovms", "/v3/chat/completions", MESSAGES, "max_completion_tokens",
        "{} exceeds limit provided in graph config: 1048577",
    ),
    "mindie chat": (
        "mindie", "/v1/chat/completions", MESSAGES, "max_tokens",
        "Parameter {} must be (0,1048577], got 1048578",
    ),
    "triton": (
        "{name: triton, profile: vllm}", "/v2/models/chat/generate", {"text_input": "hi"},
        "max_tokens", "'{}' must be at most 1048577, got 1048578",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_a_limit_names_the_field_that_the_client_sent_in_its_server_s_words(
    serve: Serve, case: tuple[str, str, dict[str, Any], str, str]
) -> None:
    protocol, path, body, field, text = case
    gateway = await serve(CONFIG.format(protocol=protocol))
    response = await gateway.http.post(path, json=body | {field: ABOVE})

    assert 400 <= response.status_code < 500

    values = list(response.json().values())
    texts = [value["message"] if isinstance(value, dict) else value for value in values]
    assert any(str(written).endswith(text.format(field)) for written in texts), texts
    if protocol == "openai":
        assert response.json()["error"]["param"] == field
        assert response.json()["error"]["code"] == "integer_above_max_value"


GATEWAY_LIMITS: dict[str, tuple[str, str, dict[str, Any], str, int, str]] = {
    "openai choices": (
        "openai", "/v1/completions", {"prompt": ["hi"] * 100}, "n", 128,
        "Invalid 'n': integer above maximum value. Expected a value <= 81, but got 128 instead.",
    ),
    "interlingua samples": (
        "{name: openai, profile: interlingua}", "/v1/completions", {"prompt": "hi"}, "best_of",
        9000, ("Invalid 'best_of': integer above maximum value. Expected a value <= 8192, but got "
        "9000 instead."),
    ),
    "interlingua alternatives of a chat": (
        "{name: openai, profile: interlingua}", "/v1/chat/completions",
        {"messages": MESSAGES["messages"], "logprobs": True}, "top_logprobs", 2000,
        ("Invalid 'top_logprobs': integer above maximum value. Expected a value <= 1000, but got "
        "2000 instead."),
    ),
    "triton alternatives": (
        "{name: triton, profile: vllm}", "/v2/models/chat/generate", {"text_input": "hi"},
        "logprobs", 2000, "'logprobs' must be at most 1000, got 2000",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GATEWAY_LIMITS.values(), ids=GATEWAY_LIMITS.keys())
async def test_the_gateway_s_own_limit_is_reported_like_the_server_s(
    serve: Serve, case: tuple[str, str, dict[str, Any], str, int, str]
) -> None:
    protocol, path, body, field, value, text = case
    gateway = await serve(CONFIG.format(protocol=protocol))
    response = await gateway.http.post(path, json={"model": "chat", **body, field: value})

    assert 400 <= response.status_code < 500

    values = list(response.json().values())
    texts = [value["message"] if isinstance(value, dict) else value for value in values]
    assert any(str(written).endswith(text) for written in texts), texts
