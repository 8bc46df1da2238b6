"""What is measured of the responses of a running gateway."""

import msgspec
import pytest

from gateway.config.schema import CompareGuardrailsConfig
from gateway.evidence.live_measures import LIVE_MEASURES, count_event_bytes, measure_response
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    StreamEnd,
    TextDelta,
    ToolCallStart,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"required": ["a"]}}}


def respond(text: str, reason: FinishReason = "stop") -> list[Event]:
    return [TextDelta(text), ChoiceEnd(reason), StreamEnd()]


@pytest.mark.parametrize(
    ("request_body", "events", "measure", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, respond("{}"), "json_valid", True),
        ({"response_format": {"type": "json_object"}}, respond("{"), "json_valid", False),
        ({}, respond("{"), "json_valid", None),
        ({"tools": [TOOL]}, respond("no"), "tool_calls", False),
        ({}, respond("no"), "tool_calls", None),
        ({"stop": "END"}, respond("the END"), "stop_strings", False),
        ({"stop": "END"}, respond("the"), "stop_strings", True),
        ({}, respond("the"), "stop_strings", None),
        ({}, respond("the"), "not_truncated", True),
        ({}, respond("the", "length"), "not_truncated", False),
        ({}, respond("I cannot help with that."), "not_refused", False),
        ({}, respond("Yes"), "not_refused", True),
        ({}, respond(" "), "not_empty", False),
        ({}, respond("Yes"), "not_empty", True),
    ],
)
def test_response_is_measured_by_what_its_request_requires(
    request_body: object, events: list[Event], measure: str, expected: bool | None
) -> None:
    measures = measure_response(msgspec.json.encode(request_body), events)
    assert measures.get(measure) is expected


def test_arguments_of_a_tool_call_must_fit_its_schema() -> None:
    call = ToolCallStart(0, 0, "call_1", "f")
    measures = measure_response(
        msgspec.json.encode({"tools": [TOOL]}), [call, ChoiceEnd("tool_calls"), StreamEnd()]
    )
    assert (measures["tool_calls"], measures["tool_arguments"]) == (True, False)


def test_request_that_is_no_json_leaves_what_needs_none() -> None:
    assert measure_response(b"{", respond("Yes")) == {
        "not_truncated": True,
        "not_refused": True,
        "not_empty": True,
    }


def test_configuration_names_each_measure() -> None:
    assert CompareGuardrailsConfig.__struct_fields__ == tuple(LIVE_MEASURES)


def test_text_counts_in_the_size_of_events() -> None:
    few, many = [TextDelta("a")], [TextDelta("a" * 5000)]

    assert count_event_bytes(many) - count_event_bytes(few) == 4999
