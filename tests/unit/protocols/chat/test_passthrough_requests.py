"""The request behind a body that is passed on."""

from types import SimpleNamespace
from typing import Any

import pytest

from protocols.chat.passthrough import RequestKind, request_of
from protocols.core.request import EmbeddingRequest, GenerationRequest, Message, Request, TextPart

HI = SimpleNamespace(role="user", content="hi")
PARTS = SimpleNamespace(
    role="assistant", content=[SimpleNamespace(text="a"), SimpleNamespace(text="b")]
)


def relayed(kind: RequestKind, *, stream: bool = False, **body: Any) -> Request:
    return request_of(kind, SimpleNamespace(**body), "llama", stream=stream, timeout=7.0)


def test_a_conversation() -> None:
    request = relayed("chat", messages=[HI, PARTS], user="ann", n=2, stream=True)

    assert request == GenerationRequest(
        model="llama",
        kind="chat",
        messages=(Message("user", (TextPart("hi"),)), Message("assistant", (TextPart("ab"),))),
        n=2,
        stream=True,
        timeout=7.0,
        labels={"user": "ann"},
    )


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_prompts(prompt: Any) -> None:
    request = relayed("completion", prompt=prompt)

    assert request == GenerationRequest(
        model="llama", kind="completion", prompts=tuple(prompt), timeout=7.0
    )


@pytest.mark.parametrize("given", ["a", ["a", "b"]])
def test_inputs(given: Any) -> None:
    request = relayed("embedding", input=given, user="ann")

    assert request == EmbeddingRequest(
        model="llama",
        inputs=tuple(given),
        timeout=7.0,
        labels={"user": "ann"},
    )
