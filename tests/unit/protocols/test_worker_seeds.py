"""A seed beyond a worker's range is sent exactly or reported as lost."""

import json
from typing import Any

import pytest

from gateway.runtime.build import build_adapter
from protocols.core.request import GenerationRequest, Message, Request, SamplingParams, TextPart
from protocols.openai.endpoints import OpenAI
from tests.unit.protocols.conftest import MakeCall

SEEDS = (-(2**63), -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
PROFILES = [
    ("openai", "openai"),
    ("openai", "vllm"),
    ("openai", "sglang"),
    ("openai", "llamacpp"),
    ("openai", "interlingua"),
    ("databricks", None),
    ("ovms", "2026"),
    ("ovms", "2024"),
    ("mindie", "2x"),
    ("mindie", "rc1"),
    ("triton", "vllm"),
    ("triton", "trtllm"),
    ("triton", "llmapi"),
    ("tgi", None),
    ("anthropic", None),
]
CHAT: dict[str, Any] = {
    "kind": "chat",
    "messages": (Message("user", (TextPart("hi"),)),),
}
PROMPT: dict[str, Any] = {"kind": "completion", "prompts": ("hi",)}


def find_seed(value: Any) -> Any:
    """Return the value of the only field whose name ends with "seed"."""
    if isinstance(value, str) and value.startswith("{"):
        value = json.loads(value)
    if not isinstance(value, dict):
        return None
    for name, field in value.items():
        if name.endswith("seed"):
            return int(field)
        if (seed := find_seed(field)) is not None:
            return seed
    return None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fields", [CHAT, PROMPT], ids=["chat", "prompt"])
@pytest.mark.parametrize(("protocol", "profile"), PROFILES)
def test_a_seed_is_sent_exactly_or_reported(
    protocol: str, profile: str | None, fields: dict[str, Any], seed: int
) -> None:
    adapter: Any = build_adapter(protocol, profile, {})
    request: Request = GenerationRequest(model="m", sampling=SamplingParams(seed=seed), **fields)

    sent = find_seed(json.loads(adapter.encode_request(request).body))
    losses = [loss.path for loss in adapter.unsupported_parameters(request, {})]

    assert (sent == seed) is ("sampling.seed" not in losses), (sent, losses)
    assert sent is None or sent == seed or sent >= 0


@pytest.mark.parametrize("profile", ["openai", "vllm", "sglang", "llamacpp", "interlingua"])
def test_openai_workers_get_no_seed_beyond_64_bits_with_a_sign(profile: str) -> None:
    adapter: Any = build_adapter("openai", profile, {})
    request: Request = GenerationRequest(model="m", sampling=SamplingParams(seed=2**63), **CHAT)

    (loss,) = adapter.unsupported_parameters(request, {})

    assert loss.path == "sampling.seed"
    assert find_seed(json.loads(adapter.encode_request(request).body)) != 2**63


def test_a_negative_seed_of_a_client_is_read_exactly(make_call: MakeCall) -> None:
    call = make_call("chat", {"model": "m", "messages": CHAT_BODY, "seed": -7})

    request = OpenAI().decode_request(call)

    assert isinstance(request, GenerationRequest)
    assert request.sampling.seed == -7


CHAT_BODY = [{"role": "user", "content": "hi"}]
