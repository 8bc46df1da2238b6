"""When max_tokens truncates a tool call, the rest of the response is kept."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from protocols.core.aggregate import aggregate
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    StreamEnd,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from protocols.core.interfaces import ResponseContext
from protocols.ollama.responses import GenerationEncoder


def build_events(reason: FinishReason) -> list[Event]:
    return [
        TextDelta("Let me see."),
        ToolCallStart(0, 0, "a", "f"),
        ToolCallDelta(0, 0, '{"x":1}'),
        ToolCallStart(0, 1, "b", "g"),
        ToolCallDelta(0, 1, '{"city": "Par'),
        ChoiceEnd(reason),
        StreamEnd(),
    ]


def read_unary(encoder: GenerationEncoder, events: list[Event]) -> list[dict[str, Any]]:
    return [json.loads(encoder.encode_unary(aggregate(events)).body)]


def read_stream(encoder: GenerationEncoder, events: list[Event]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in encoder.encode_events(events).splitlines()]


READERS = [read_unary, read_stream]


@pytest.mark.parametrize("read", READERS)
def test_call_cut_by_the_limit_is_left_out(
    response_context: ResponseContext, read: Callable[..., list[dict[str, Any]]]
) -> None:
    lines = read(
        GenerationEncoder(response_context, "m", 0.0, is_chat=True), build_events("length")
    )

    assert "".join(line["message"]["content"] for line in lines) == "Let me see."

    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == ["f"]
    assert lines[-1]["done_reason"] == "length"


@pytest.mark.parametrize("read", READERS)
def test_other_arguments_that_are_no_object_are_one_argument_and_reported(
    response_context: ResponseContext, read: Callable[..., list[dict[str, Any]]]
) -> None:
    encoder = GenerationEncoder(response_context, "m", 0.0, is_chat=True)

    lines = read(encoder, build_events("tool_calls"))

    assert "".join(line["message"]["content"] for line in lines) == "Let me see."
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert calls[1]["function"]["arguments"] == {"arguments": '{"city": "Par'}
    assert [(loss.field, loss.reason) for loss in encoder.losses] == [
        ("response.choices[0].message.tool_calls[1].function.arguments", "approximated")
    ]
