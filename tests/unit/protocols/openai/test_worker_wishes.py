"""Wishes that one kind of worker fulfils and another does not: what is sent, and what is lost."""

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from gateway.core.loss import Loss
from gateway.core.types import GenerateRequest, Logprobs, Message, Stopping, TextPart, Tool, Want
from protocols.openai import OpenAI

SAID = (Message("user", (TextPart("hi"),)),)
TOOLS = (Tool("f"),)
CUSTOM = (Tool("g", kind="custom"),)
ALL = Logprobs(top=-1)


def chat(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", kind="chat", messages=SAID, **fields)


TABLE: list[tuple[str, GenerateRequest, dict[str, Any], set[tuple[str, str]]]] = [
    ("openai", chat(tools=TOOLS), {"tools": [{"type": "function", "function": {"name": "f"}}]},
     set()),
    ("openai", chat(parallel_tools=False), {}, set()),
    ("vllm", chat(tools=CUSTOM), {}, {("tools", "dropped")}),
    ("openai", chat(want=Want(token_ids=True)), {}, {("return_token_ids", "dropped")}),
    ("vllm", chat(want=Want(token_ids=True)), {"return_token_ids": True}, set()),
    ("openai", chat(logprobs=ALL), {"logprobs": True, "top_logprobs": 20},
     {("top", "clamped")}),
    ("vllm", chat(logprobs=ALL), {"logprobs": True, "top_logprobs": -1}, set()),
    ("vllm", chat(logprobs=Logprobs(top=30)), {"logprobs": True, "top_logprobs": 30}, set()),
    ("openai", chat(stopping=Stopping(overflow="truncate")), {},
     {("overflow", "dropped")}),
    ("vllm", chat(stopping=Stopping(overflow="truncate")), {"truncate_prompt_tokens": -1}, set()),
    ("openai", chat(stream=True), {"stream": True, "stream_options": {"include_usage": True}},
     set()),
    ("vllm", chat(stream=True, want=Want(usage="each")),
     {"stream": True,
      "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
     set()),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "request_", "body", "losses"), TABLE)
def test_a_wish(
    profile: str, request_: GenerateRequest, body: dict[str, Any], losses: set[tuple[str, str]]
) -> None:
    worker = OpenAI(profile)

    sent = json.loads(worker.encode(request_).body)
    lost = {(loss.field, loss.reason) for loss in worker.losses(request_, {})}

    assert {name: got for name, got in sent.items() if name not in ("model", "messages")} == body
    assert lost == losses


def test_what_only_another_dialects_workers_may_know_is_not_sent() -> None:
    request = GenerateRequest(
        model="m", kind="completion", prompts=("x",), extra={"foo": Raw(b"1")}, source="elsewhere"
    )
    own = msgspec.structs.replace(request, source="openai")
    worker = OpenAI("vllm")

    assert b"foo" not in worker.encode(request).body
    assert worker.losses(request, {}) == (Loss("foo", "dropped"),)
    assert b'"foo":1' in worker.encode(own).body
    assert worker.losses(own, {}) == ()
