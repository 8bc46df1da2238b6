"""A model's limit and defaults apply to passed-through requests: nothing else changes."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from protocols.anthropic.endpoints import Anthropic
from protocols.core.interfaces import (
    ClientRequest,
    ModelSettings,
    PassthroughRequest,
    ResponseContext,
)
from protocols.openai.endpoints import OpenAI
from tests.support.path_routers import get_path_router

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "later": 1}
COMPLETION = {"model": "m", "prompt": "a", "max_tokens": 5}
RESPONSE = {"model": "m", "input": "hi", "later": 1}
MESSAGE = {
    "model": "m",
    "max_tokens": 50,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "messages": [
        {
            "role": "user",
            "content": [
                {
                    "type": "document",
                    "source": {"type": "text", "media_type": "text/plain", "data": "d"},
                    "citations": {"enabled": True},
                }
            ],
        }
    ],
}
DEFAULTS = ModelSettings(None, {"sampling.temperature": 0.5})


def pass_through(
    adapter: Any, path: str, body: Mapping[str, Any], settings: ModelSettings
) -> PassthroughRequest | None:
    match = get_path_router(adapter).find_endpoint("POST", path)
    headers = {"anthropic-beta": "x-2026-01-01"}
    call = ClientRequest(
        match.endpoint, match.params, headers, "", msgspec.json.encode(body), path, "7f"
    )
    context = ResponseContext("r", 1, "m", "1", "w", lambda: 0.0, settings=settings)
    passed: PassthroughRequest | None = adapter.prepare_passthrough(adapter, call, context)
    return passed


def find_changes(
    adapter: Any, path: str, body: Mapping[str, Any], settings: ModelSettings
) -> dict[str, Any]:
    """Return the fields of the worker's body that the settings change."""
    plain = pass_through(adapter, path, body, ModelSettings())
    passed = pass_through(adapter, path, body, settings)
    assert plain is not None
    assert passed is not None
    assert passed.upstream_request.headers == plain.upstream_request.headers
    before: dict[str, Any] = msgspec.json.decode(plain.upstream_request.body)
    after: dict[str, Any] = msgspec.json.decode(passed.upstream_request.body)
    assert before.keys() <= after.keys()
    return {name: one for name, one in after.items() if before.get(name) != one}


VLLM = OpenAI("vllm")
RESPONSES = OpenAI("vllm", worker_api="both")
LONG = MESSAGE | {"max_tokens": 5000, "thinking": {"type": "enabled", "budget_tokens": 3000}}


@pytest.mark.parametrize(
    ("adapter", "path", "body", "settings", "changes"),
    [
        (VLLM, "/v1/chat/completions", CHAT, ModelSettings(9), {"max_tokens": 9}),
        (VLLM, "/v1/chat/completions", CHAT | {"max_tokens": 9}, ModelSettings(9), {}),
        (VLLM, "/v1/chat/completions", CHAT, DEFAULTS, {"temperature": 0.5}),
        (VLLM, "/v1/chat/completions", CHAT | {"temperature": 1.5}, DEFAULTS, {}),
        (
            VLLM,
            "/v1/chat/completions",
            CHAT,
            ModelSettings(9, {"stopping.max_tokens": 5}),
            {"max_tokens": 5},
        ),
        (VLLM, "/v1/completions", COMPLETION, ModelSettings(9), {}),
        (VLLM, "/v1/completions", COMPLETION, DEFAULTS, {"temperature": 0.5}),
        (VLLM, "/v1/embeddings", {"model": "m", "input": "a"}, ModelSettings(9), {}),
        (RESPONSES, "/v1/responses", RESPONSE, ModelSettings(9), {"max_output_tokens": 9}),
        (RESPONSES, "/v1/responses", RESPONSE, DEFAULTS, {"temperature": 0.5}),
        (Anthropic(), "/v1/messages", MESSAGE | {"max_tokens": 2000}, ModelSettings(2000), {}),
        (
            Anthropic(),
            "/v1/messages",
            MESSAGE | {"max_tokens": 2000},
            DEFAULTS,
            {"temperature": 0.5},
        ),
        (Anthropic(), "/v1/messages", LONG, ModelSettings(4000), {"max_tokens": 4000}),
        (
            Anthropic(),
            "/v1/messages",
            LONG,
            ModelSettings(2000),
            {
                "max_tokens": 2000,
                "thinking": {"type": "enabled", "budget_tokens": 1999},
            },
        ),
        (
            Anthropic(),
            "/v1/messages",
            LONG | {"thinking": {"type": "adaptive"}},
            ModelSettings(2000),
            {"max_tokens": 2000},
        ),
    ],
)
def test_only_the_fields_in_the_settings_change(
    adapter: Any,
    path: str,
    body: Mapping[str, Any],
    settings: ModelSettings,
    changes: Mapping[str, Any],
) -> None:
    assert find_changes(adapter, path, body, settings) == changes


def test_a_lowered_limit_is_reported() -> None:
    passed = pass_through(Anthropic(), "/v1/messages", LONG, ModelSettings(2000))

    assert passed is not None
    assert [(one.field, one.reason, one.detail) for one in passed.unsupported_parameters] == [
        ("max_tokens", "clamped", "5000 to 2000"),
        ("thinking.budget_tokens", "clamped", "3000 to 1999"),
    ]


@pytest.mark.parametrize(
    ("adapter", "path", "body", "settings"),
    [
        (VLLM, "/v1/chat/completions", CHAT | {"max_tokens": 10}, ModelSettings(9)),
        (VLLM, "/v1/chat/completions", CHAT, ModelSettings(9, {"stopping.max_tokens": 10})),
        (OpenAI(), "/v1/chat/completions", CHAT, ModelSettings(None, {"sampling.top_k": 3})),
        (VLLM, "/v1/chat/completions", CHAT, ModelSettings(None, {"sampling.top_p": 0.0})),
        (RESPONSES, "/v1/responses", RESPONSE | {"max_output_tokens": 10}, ModelSettings(9)),
        (Anthropic(over_limit="error"), "/v1/messages", LONG, ModelSettings(2000)),
    ],
    ids=["too many tokens", "default above the limit", "unknown default", "default out of range",
         "too many tokens of a response", "clamping is off"],
)  # fmt: skip
def test_what_cannot_be_written_as_it_is_is_translated(
    adapter: Any, path: str, body: Mapping[str, Any], settings: ModelSettings
) -> None:
    assert pass_through(adapter, path, body, settings) is None
