"""Tool calls in the odder forms that workers send."""

from typing import Any

import msgspec
import pytest

from protocols.chat.decoder import ToolCallAssembler, WireDelta
from protocols.core.events import Event, ToolCallDelta, ToolCallStart


def read(*deltas: dict[str, Any]) -> list[Event]:
    calls = ToolCallAssembler(0)
    events: list[Event] = []
    for delta in deltas:
        events += calls.read_delta(msgspec.convert(delta, WireDelta))
    calls.close()
    return events


def piece(**fields: Any) -> dict[str, Any]:
    function = {k: fields.pop(k) for k in ("name", "arguments") if k in fields}
    return {"tool_calls": [{**fields, "function": function}]}


ONE = [ToolCallStart(0, 0, "a", "f"), ToolCallDelta(0, 0, "1"), ToolCallDelta(0, 0, "2")]


@pytest.mark.parametrize(
    "deltas",
    [
        [piece(id="a", name="f", arguments="1"), piece(id="a", arguments="2")],
        [piece(id="a", name="f", arguments="1"), piece(arguments="2")],
        [piece(id="a", name="f", arguments="1"), piece(id="a", name="f", arguments="2")],
        [piece(id="a", name="f", arguments="1"), {"tool_calls": [{"index": 0}]},
         piece(index=0, arguments="2")],
    ],
)  # fmt: skip
def test_pieces_of_one_call(deltas: list[dict[str, Any]]) -> None:
    assert read(*deltas) == ONE


def test_calls_without_index_and_id_are_told_apart_by_their_names() -> None:
    events = read(piece(name="f", arguments="1"), piece(name="g", arguments="2"))
    assert events == [
        ToolCallStart(0, 0, "call_0_0", "f"),
        ToolCallDelta(0, 0, "1"),
        ToolCallStart(0, 1, "call_0_1", "g"),
        ToolCallDelta(0, 1, "2"),
    ]


def test_the_older_function_call() -> None:
    events = read({"function_call": {"name": "f"}}, {"function_call": {"arguments": "{}"}})
    assert events == [ToolCallStart(0, 0, "call_0_0", "f"), ToolCallDelta(0, 0, "{}")]


def test_a_custom_tool() -> None:
    events = read({"tool_calls": [{"id": "a", "custom": {"name": "f", "input": "go"}}]})
    assert events == [ToolCallStart(0, 0, "a", "f"), ToolCallDelta(0, 0, "go")]
