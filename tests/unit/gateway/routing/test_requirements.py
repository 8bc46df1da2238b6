"""What a request needs, and which worker dialects say that they lack it."""

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


def of(path: str, reason: Any = "dropped", detail: str = "") -> UnsupportedParameter:
    return UnsupportedParameter(path, reason, detail, path)


@pytest.mark.parametrize(
    ("losses", "missing"),
    [
        ((), ()),
        ((of("sampling.top_k"), of("priority"), UnsupportedParameter("own", "dropped")), ()),
        ((of("tools"), of("tool_choice")), ("tools", "tool choice")),
        ((of("tools", "approximated"),), ("tools",)),
        ((of("tools", "renamed"), of("tools", "emulated")), ()),
        ((of("logprobs.top", "clamped"), of("logprobs.prompt")), ("logprobs",)),
        ((of("output"), of("adapter")), ("structured output", "adapters")),
        ((of("insert_before"), of("dimensions")), ("infilling", "dimensions")),
        ((of("messages", "approximated", "no chat template"),), ()),
        ((of("messages", detail="audio, names, videos"),), ("audio", "videos")),
        ((of("messages", detail="files, images, tool calls"),), ("files", "images", "tools")),
    ],
)
def test_only_what_is_needed_is_lacking(
    losses: tuple[UnsupportedParameter, ...], missing: tuple[str]
) -> None:
    assert find_missing_requirements(TALK, losses, None) == missing


def test_tools_that_are_not_to_be_called_are_not_needed() -> None:
    idle = replace(TALK, tools=(Tool("look"),), tool_choice="none")
    assert find_missing_requirements(idle, (of("tools"),), None) == ()
    assert find_missing_requirements(idle, (of("tools"), of("output")), None) == (
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
def test_only_counted_tokens_are_too_many(
    request_: Any, context: int | None, missing: tuple[str, ...]
) -> None:
    assert find_missing_requirements(request_, (), context) == missing


# --- a law over all worker dialects ---------------------------------------------------------------


def every_worker() -> Iterator[Any]:
    for name, reference in PROTOCOLS.items():
        for profile in load_symbol(reference).profiles:
            dialect = build_adapter(name, profile, {})
            if hasattr(dialect, "encode_request"):
                yield pytest.param(dialect, id=f"{name}-{profile}")


every_worker_dialect = pytest.mark.parametrize("dialect", list(every_worker()))
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


def missing(dialect: Any, request: GenerationRequest) -> tuple[str, ...]:
    return find_missing_requirements(
        request,
        plan_emulation(request, dialect.unsupported_parameters(request, {})).unsupported_parameters,
        None,
    )


@every_worker_dialect
@pytest.mark.parametrize("ability", NEEDED)
def test_what_is_not_sent_is_lacking(dialect: Any, ability: str) -> None:
    request = NEEDED[ability]
    try:
        body = dialect.encode_request(request).body
    except UnsupportedFeature:
        return
    said = b"logprobs" if ability == "logprobs" else MARK.encode()
    assert (said in body) or (ability in missing(dialect, request))
    assert missing(dialect, TALK) == ()


@every_worker_dialect
def test_calls_that_are_not_sent_are_lacking(dialect: Any) -> None:
    assert MARK.encode() in dialect.encode_request(CALLED).body or "tools" in missing(
        dialect, CALLED
    )
