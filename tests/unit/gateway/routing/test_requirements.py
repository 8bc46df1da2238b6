"""The capabilities that a request needs, and the worker protocols that lack them."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from gateway.config.registry import load_symbol
from gateway.emulation.planner import plan_emulation
from gateway.routing.requirements import find_missing_requirements
from gateway.runtime.build import build_adapter
from protocols import PROTOCOLS
from protocols.core.errors import UnsupportedFeature
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AudioPart,
    ContentPart,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    StopConditions,
    TextPart,
    Tool,
    ToolCall,
    VideoPart,
)

TALK = GenerationRequest(
    model="m", kind="chat", messages=(Message("user", (TextPart("hi"),)),), source="elsewhere"
)
TEXT = GenerationRequest(model="m", kind="completion", prompts=("hi",), source="elsewhere")


def make_loss(path: str, reason: Any = "dropped", detail: str = "") -> UnsupportedParameter:
    return UnsupportedParameter(path, reason, detail, path)


@pytest.mark.parametrize(
    ("losses", "missing"),
    [
        ((), ()),
        (
            (
                make_loss("sampling.top_k"),
                make_loss("priority"),
                UnsupportedParameter("own", "dropped"),
            ),
            (),
        ),
        ((make_loss("tools"), make_loss("tool_choice")), ("tools", "tool choice")),
        ((make_loss("tools", "approximated"),), ("tools",)),
        ((make_loss("tools", "renamed"), make_loss("tools", "emulated")), ()),
        ((make_loss("logprobs.top", "clamped"), make_loss("logprobs.prompt")), ("logprobs",)),
        ((make_loss("output"), make_loss("adapter")), ("structured output", "adapters")),
        ((make_loss("insert_before"), make_loss("dimensions")), ("infilling", "dimensions")),
        ((make_loss("messages", "approximated", "no chat template"),), ()),
        ((make_loss("messages", detail="audio, names, videos"),), ("audio", "videos")),
        (
            (make_loss("messages", detail="files, images, tool calls"),),
            ("files", "images", "tools"),
        ),
    ],
)
def test_only_required_capabilities_are_missing(
    losses: tuple[UnsupportedParameter, ...], missing: tuple[str]
) -> None:
    assert find_missing_requirements(TALK, losses, None) == missing


def test_tools_with_tool_choice_none_are_not_required() -> None:
    idle = replace(TALK, tools=(Tool("look"),), tool_choice="none")
    assert find_missing_requirements(idle, (make_loss("tools"),), None) == ()
    assert find_missing_requirements(idle, (make_loss("tools"), make_loss("output")), None) == (
        "structured output",
    )


@pytest.mark.parametrize(
    ("request_", "context", "missing"),
    [
        (replace(TEXT, prompts=((1, 2, 3),)), 3, ()),
        (replace(TEXT, prompts=((1, 2, 3),)), 2, ("context",)),
        (replace(TEXT, prompts=((1,), (1, 2, 3))), 2, ("context",)),
        (replace(TEXT, prompts=((1, 2, 3),)), None, ()),
        (replace(TEXT, prompts=("a long text of many words",)), 1, ()),
        (replace(TEXT, prompts=((1, 2, 3),), stopping=StopConditions(overflow="truncate")), 2, ()),
        (replace(TEXT, prompts=((1, 2, 3),), stopping=StopConditions(truncate_prompt=2)), 2, ()),
        (
            replace(TEXT, prompts=((1, 2, 3),), stopping=StopConditions(overflow="error")),
            2,
            ("context",),
        ),
        (TALK, 0, ()),
        (EmbeddingRequest(model="m", inputs=("a", (1, 2, 3))), 2, ("context",)),
        (EmbeddingRequest(model="m", inputs=((1, 2, 3),), truncate=2), 2, ()),
        (EmbeddingRequest(model="m", inputs=((1, 2, 3),), overflow="truncate"), 2, ()),
    ],
)
def test_only_token_id_prompts_exceed_the_context(
    request_: Any, context: int | None, missing: tuple[str, ...]
) -> None:
    assert find_missing_requirements(request_, (), context) == missing


# --- property of all worker protocols -------------------------------------------------------------


def iterate_upstream_adapters() -> Iterator[Any]:
    for name, reference in PROTOCOLS.items():
        for profile in load_symbol(reference).profiles:
            adapter = build_adapter(name, profile, {})
            if hasattr(adapter, "encode_request"):
                yield pytest.param(adapter, id=f"{name}-{profile}")


every_upstream_adapter = pytest.mark.parametrize("adapter", list(iterate_upstream_adapters()))
MARK = "needle"
NEEDED: dict[str, GenerationRequest] = {
    "tools": replace(TALK, tools=(Tool(MARK),)),
    "structured output": replace(TALK, output=JsonSchemaFormat(Raw(b'{"const":"needle"}'))),
    "logprobs": replace(TALK, logprobs=LogprobsOptions(2)),
}
MEDIA: dict[str, ContentPart] = {
    "images": ImagePart(f"https://{MARK}.test/a.png"),
    "audio": AudioPart(MARK, "wav"),
    "videos": VideoPart(f"https://{MARK}.test/a.mp4"),
    "files": FilePart(MARK),
}
NEEDED |= {
    name: replace(TALK, messages=(Message("user", (TextPart("hi"), part)),))
    for name, part in MEDIA.items()
}
CALLED = replace(
    TALK,
    messages=(
        *TALK.messages,
        Message("assistant", tool_calls=(ToolCall("call_1", MARK, "{}"),)),
        Message("tool", (TextPart("42"),), tool_call_id="call_1"),
    ),
)


def find_missing(adapter: Any, request: GenerationRequest) -> tuple[str, ...]:
    return find_missing_requirements(
        request,
        plan_emulation(request, adapter.unsupported_parameters(request, {})).unsupported_parameters,
        None,
    )


@every_upstream_adapter
@pytest.mark.parametrize("ability", NEEDED)
def test_capability_is_sent_to_the_worker_or_reported_missing(adapter: Any, ability: str) -> None:
    request = NEEDED[ability]
    try:
        body = adapter.encode_request(request).body
    except UnsupportedFeature:
        return

    marker = b"logprobs" if ability == "logprobs" else MARK.encode()

    assert (marker in body) or (ability in find_missing(adapter, request))
    assert find_missing(adapter, TALK) == ()


@every_upstream_adapter
def test_tool_calls_are_sent_to_the_worker_or_reported_missing(adapter: Any) -> None:
    assert MARK.encode() in adapter.encode_request(CALLED).body or "tools" in find_missing(
        adapter, CALLED
    )
