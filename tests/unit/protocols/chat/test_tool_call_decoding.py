"""Tool calls in the odder forms that workers send."""

from typing import Any

import msgspec
import pytest

from protocols.chat.decoder import ToolCallAssembler, WireDelta
from protocols.core.events import Event, ToolCallDelta, ToolCallStart


def decode_deltas(*deltas: dict[str, Any]) -> list[Event]:
    calls = ToolCallAssembler(0)
    events: list[Event] = []
    for delta in deltas:
        events += calls.read_delta(msgspec.convert(delta, WireDelta))
    calls.close()
    return events


def make_delta(**fields: Any) -> dict[str, Any]:
    function = {k: fields.pop(k) for k in ("name", "arguments") if k in fields}
    return {"tool_calls": [{**fields, "function": function}]}


ONE = [ToolCallStart(0, 0, "a", "f"), ToolCallDelta(0, 0, "1"), ToolCallDelta(0, 0, "2")]


@pytest.mark.parametrize(
    "deltas",
    [
        [make_delta(id="a", name="f", arguments="1"), make_delta(id="a", arguments="2")],
        [make_delta(id="a", name="f", arguments="1"), make_delta(arguments="2")],
        [make_delta(id="a", name="f", arguments="1"), make_delta(id="a", name="f", arguments="2")],
        [make_delta(id="a", name="f", arguments="1"), {"tool_calls": [{"index": 0}]},
         make_delta(index=0, arguments="2")],
    ],
)  # fmt: skip
def test_deltas_of_one_tool_call_are_joined(deltas: list[dict[str, Any]]) -> None:
    assert decode_deltas(*deltas) == ONE


def test_tool_calls_without_index_and_id_are_distinguished_by_name() -> None:
    events = decode_deltas(make_delta(name="f", arguments="1"), make_delta(name="g", arguments="2"))
    assert events == [
        ToolCallStart(0, 0, "call_0_0", "f"),
        ToolCallDelta(0, 0, "1"),
        ToolCallStart(0, 1, "call_0_1", "g"),
        ToolCallDelta(0, 1, "2"),
    ]


def test_legacy_function_call_is_decoded() -> None:
    events = decode_deltas({"function_call": {"name": "f"}}, {"function_call": {"arguments": "{}"}})
    assert events == [ToolCallStart(0, 0, "call_0_0", "f"), ToolCallDelta(0, 0, "{}")]


def test_custom_tool_call_is_decoded() -> None:
    events = decode_deltas({"tool_calls": [{"id": "a", "custom": {"name": "f", "input": "go"}}]})
    assert events == [ToolCallStart(0, 0, "a", "f"), ToolCallDelta(0, 0, "go")]
