"""The request behind a body that is passed on: the little that is asked of it, and all of it."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.core.types import EmbedRequest, GenerateRequest, Message, TextPart
from protocols.openai.relayed import Kind, Relayed

HI = SimpleNamespace(role="user", content="hi")
PARTS = SimpleNamespace(
    role="assistant", content=[SimpleNamespace(text="a"), SimpleNamespace(text="b")]
)


def relayed(kind: Kind, *, stream: bool = False, **body: Any) -> Relayed:
    return Relayed(kind, SimpleNamespace(**body), "llama", stream, 7.0)


def test_a_conversation() -> None:
    request = relayed("chat", messages=[HI, PARTS], user="ann", n=2, stream=True).request()

    assert request == GenerateRequest(
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
    request = relayed("completion", prompt=prompt).request()

    assert request == GenerateRequest(
        model="llama", kind="completion", prompts=tuple(prompt), timeout=7.0
    )


@pytest.mark.parametrize("given", ["a", ["a", "b"]])
def test_inputs(given: Any) -> None:
    request = relayed("embedding", input=given, user="ann").request()

    assert request == EmbedRequest(
        model="llama",
        inputs=tuple(given),
        timeout=7.0,
        labels={"user": "ann"},
    )


@pytest.mark.parametrize(
    "told",
    [
        relayed("chat", messages=[HI], user="ann", n=2, stream=True),
        relayed("completion", prompt=["a", "b"], n=3),
        relayed("embedding", input=["a", "b"]),
    ],
)
def test_what_reads_the_answer_needs_less(told: Relayed) -> None:
    request: Any = told.request()
    unasked: dict[str, Any] = {"timeout": None, "labels": {}}
    if told.kind == "chat":
        unasked["messages"] = ()
    assert told.bare() == replace(request, **unasked)
