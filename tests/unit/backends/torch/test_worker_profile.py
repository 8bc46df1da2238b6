"""The engine supports every parameter in the profile of our own workers."""

from typing import Any

import pytest
from msgspec import Raw

from backends.torch import commands
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    Message,
    PromptOptions,
    ReasoningPart,
    Request,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
)
from protocols.openai.endpoints import OpenAI
from tests.unit.protocols.chat.test_interlingua_profile import (
    REST,
    SAMPLING,
    STOPPING,
    make_chat,
    make_completion,
)

WORKER = OpenAI("interlingua")
PARTS = (TextPart("hi"), ImagePart("https://x/y.png"))
MORE: dict[str, dict[str, Any]] = {
    "tools": {"tools": (Tool("f", parameters=Raw(b"{}")),)},
    "custom tools": {"tools": (Tool("f", kind="custom"),)},
    "output": {"output": JsonObjectFormat()},
    "template": {"templating": PromptOptions(template="T")},
    "spaces": {"stopping": StopConditions(spaces_between_special_tokens=True)},
    "reasoning": {"messages": (Message("assistant", (ReasoningPart("so"), TextPart("a"))),)},
    "images": {"messages": (Message("user", PARTS),)},
    "insert_before": {"insert_before": "x"},
}


def find_losses(request: Request) -> tuple[set[str], set[str]]:
    """Return the parameters that the engine lacks, and those that its profile lacks."""
    engine = commands.find_unsupported_params(request, {}, templates=False)
    profile = WORKER.unsupported_parameters(request, {})
    return {one.path or one.field for one in engine}, {one.path or one.field for one in profile}


@pytest.mark.parametrize("kind", [make_chat, make_completion])
def test_interlingua_profile_promises_only_what_the_engine_supports(kind: Any) -> None:
    requests = [
        *(kind(sampling=SamplingParams(**{name: value})) for name, value in SAMPLING.items()),
        *(kind(stopping=StopConditions(**{name: value})) for name, value in STOPPING.items()),
        *(kind(**{name: value}) for name, value in REST.items()),
        *(
            kind(**fields)
            for fields in MORE.values()
            if kind is make_chat or "messages" not in fields
        ),
    ]
    for request in requests:
        assert isinstance(request, GenerationRequest)
        engine, profile = find_losses(request)
        assert engine <= profile, request


@pytest.mark.parametrize(
    "fields",
    [
        {"instruction": "q"},
        {"dimensions": 8},
        {"normalize": False},
        {"truncate": 5},
        {"overflow": "truncate"},
    ],
)
def test_embedding_parameters_are_supported_by_profile_and_engine(fields: dict[str, Any]) -> None:
    engine, profile = find_losses(EmbeddingRequest(model="m", inputs=("a",), **fields))
    assert engine == profile == set()
