"""Tool calls in unusual forms of workers are decoded."""

import json
from typing import Any

import msgspec
import pytest

from protocols.chat.tool_call_assembler import ToolCallAssembler
from protocols.chat.wire_responses import WireDelta
from protocols.core.events import Event, ToolCallDelta, ToolCallStart


def decode_deltas(*deltas: dict[str, Any]) -> list[Event]:
    calls = ToolCallAssembler(0)
    events: list[Event] = []
    for delta in deltas:
        events += calls.read_delta(msgspec.convert(delta, WireDelta))
    return [*events, *calls.close()]


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


@pytest.mark.parametrize(
    ("value", "text"),
    [([1], "[1]"), (5, "5"), (0, "0"), (False, "false"), ({"x": 1}, '{"x":1}'), ([], "[]")],
    ids=str,
)
def test_arguments_of_another_type_are_written_as_json(value: Any, text: str) -> None:
    """A client would run a call without its arguments otherwise."""
    called = [ToolCallStart(0, 0, "a", "f"), ToolCallDelta(0, 0, text)]

    assert decode_deltas(make_delta(id="a", name="f", arguments=value)) == called
    custom = {"tool_calls": [{"id": "a", "custom": {"name": "f", "input": value}}]}
    wrapped = json.dumps({"input": text}, separators=(",", ":"))
    assert decode_deltas(custom) == [called[0], ToolCallDelta(0, 0, wrapped)]


def test_a_piece_of_arguments_that_is_a_number_keeps_its_place() -> None:
    events = decode_deltas(
        make_delta(index=0, id="a", name="f", arguments='{"x": '),
        make_delta(index=0, arguments=5),
        make_delta(index=0, arguments="}"),
    )

    pieces = [one.text for one in events if isinstance(one, ToolCallDelta)]
    assert "".join(pieces) == '{"x": 5}'


def test_legacy_function_call_is_decoded() -> None:
    events = decode_deltas({"function_call": {"name": "f"}}, {"function_call": {"arguments": "{}"}})
    assert events == [ToolCallStart(0, 0, "call_0_0", "f"), ToolCallDelta(0, 0, "{}")]


def test_custom_tool_call_becomes_that_of_a_function_with_json_arguments() -> None:
    """Clients that know of no custom tools read the arguments of every call as JSON."""
    events = decode_deltas(
        {"tool_calls": [{"index": 0, "id": "a", "custom": {"name": "f", "input": 'g"'}}]},
        {"tool_calls": [{"index": 0, "custom": {"input": "o"}}]},
        {"tool_calls": [{"index": 0, "id": "b", "custom": {"name": "g", "input": "x"}}]},
    )
    assert events == [
        ToolCallStart(0, 0, "a", "f"),
        ToolCallDelta(0, 0, '{"input":"g\\"o"}'),
        ToolCallStart(0, 1, "b", "g"),
        ToolCallDelta(0, 1, '{"input":"x"}'),
    ]
